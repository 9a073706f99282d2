"""Memory that runs out: in mid-step for a while or for good, while pruning, in the optimiser, while evaluating, while saving."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from sparsedp import checkpoint, private, prune_run, training
from sparsedp.dp import clipping
from tests import whole_runs
from tests.faults import children
from tests.faults.children import Ended
from tests.faults.worlds import Outcome, World, close, finish, unclear


def refused() -> Exception:
    """What torch says when the kernel itself refuses memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (64 << 20), before[1]))
    try:
        torch.empty(1 << 30, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    raise AssertionError("the kernel gave what it was told to refuse")


ERRORS: tuple[Callable[[], Exception], ...] = (
    MemoryError, refused,
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    lambda: OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
)  # fmt: skip
"""The forms in which memory that ran out reaches a program."""
APART = 1e-4
"""How far weights may be apart when a batch was cut into other parts."""


def mid_step(worlds: dict[str, World], every: int) -> Iterator[Outcome]:
    """From some step on only so many rows fit at once; every error, step and limit, or every `every`th of all."""
    cases = itertools.product(worlds.values(), (1, 3, 4), (8, 2, 1, 0), ERRORS)
    for world, step, most, error in itertools.islice(cases, None, None, every):
        folder = world.folder()
        ended = _short(world, folder, step, most, error)
        if ended.text == "0" and most > 2:
            world.forget(folder)  # there never were so many rows
            continue
        said = f"{world.name}, {type(error()).__name__} from step {step} on where more than {most} rows are worked on at once"
        if most >= world.run.data.views:
            kind = "memory for a few rows only, from a step on"
            came = "fewer rows at once; the same ledger, masks and (to rounding) weights"
            wrong = "" if ended.how == "done" else f"it {ended.how}: {ended.text}"
            wrong = wrong or ("memory was never short" if ended.text == "0" else "")
        else:
            kind, came = (
                "no memory even for the rows of one unit, from a step on",
                "a sentence; later resumed, fewer rows at once",
            )
            wrong = unclear(ended, world.place, "emory")
        wrong = wrong or finish(world, folder, ended.noised, nearly)
        yield _outcome(world, folder, kind, said, came, wrong)


def nearly(world: World, folder: Path) -> str:
    return close(world, folder, APART)


def then_killed(worlds: dict[str, World]) -> Iterator[Outcome]:
    """Memory runs short, the process is killed some steps later, and the run is taken up where there is room again."""
    for world, step, most in itertools.product(worlds.values(), (1, 2), (8, 2)):
        variant = dataclasses.replace(world, place=world.place / f"short-{step}-{most}")
        ended = _short(variant, variant.whole, step, most, MemoryError)
        assert ended.how == "done", ended.text
        variant.noised = ended.noised
        folder = variant.folder()
        ended = _short(variant, folder, step, most, MemoryError, killed_after=3)
        wrong = "" if ended.how == "killed" else f"it {ended.how}: {ended.text}"
        wrong = wrong or finish(variant, folder, ended.noised)
        said = f"{world.name}, at most {most} rows from step {step} on, killed after step 3"
        came = "replayed with as few rows at once as the first time, to the same bytes"
        yield _outcome(variant, folder, "memory runs short, then kill -9", said, came, wrong)


def elsewhere(worlds: dict[str, World], every: int = 1) -> Iterator[Outcome]:
    """Where nothing can be halved: a sentence, and the same command goes on."""
    places: tuple[tuple[str, Any, str], ...] = (
        ("before DP-SNIP reads the data", prune_run, "choose_engine"), ("in the optimiser's step", torch.optim, "step"),
        ("while evaluating", training, "evaluate"), ("while a checkpoint is made", checkpoint, "encode"),
        ("while the moving average is taken", AveragedModel, "update_parameters"),
    )  # fmt: skip
    cases = itertools.product(worlds.values(), places, ERRORS)
    for world, (where, owner, name), error in itertools.islice(cases, None, None, every):
        folder, owner = world.folder(), getattr(torch.optim, world.run.optim.name) if owner is torch.optim else owner
        ended = children.run(lambda w=world, f=folder, o=owner, n=name, e=error: _failing(w, f, o, n, e))  # type: ignore[misc]
        wrong = unclear(ended, world.place, "emory") or finish(world, folder, ended.noised)
        yield _outcome(world, folder, f"no memory {where}", world.name, "a sentence, then resumed to the same bytes", wrong)


def _outcome(world: World, folder: Path, kind: str, said: str, came: str, wrong: str) -> Outcome:
    if not wrong:
        world.forget(folder)
    return Outcome(kind, said, came, wrong and f"{said}, {folder}: {wrong}")


def _failing(world: World, folder: Path, owner: Any, name: str, error: Callable[[], Exception]) -> None:
    """The third call of a function finds no memory (the first, where pruning calls it once)."""
    real, calls = getattr(owner, name), itertools.count(1)

    def failing(*given: Any, **named: Any) -> Any:
        if next(calls) == (1 if owner is prune_run else 3):
            raise error()
        return real(*given, **named)

    setattr(owner, name, failing)
    world.train(folder)()


def _short(
    world: World, folder: Path, step: int, most: int, error: Callable[[], Exception], killed_after: int | None = None
) -> Ended:
    """A run in which, from a step on, whoever is given more than `most` rows at once finds no memory; if it ends well, with how
    often that was."""

    def work() -> int:
        real, on_grid, begun, raised = private.sheltered, clipping.clipped_sum_on_grid, -1, 0

        def check(rows: Any) -> Any:
            nonlocal raised
            if begun >= step and len(rows.unit) > most:
                raised += 1
                raise error()
            return rows

        def sheltered(engine: Any) -> Any:
            nonlocal begun
            begun += 1
            return real(lambda model, loss, rows, masks, clip: engine(model, loss, check(rows), masks, clip))

        private.sheltered = sheltered
        clipping.clipped_sum_on_grid = lambda model, loss, batch, *rest: on_grid(model, loss, map(check, batch), *rest)
        asked = whole_runs.after(killed_after or 0)

        def stop() -> bool:
            if asked():
                os.kill(os.getpid(), signal.SIGKILL)
            return False

        world.train(folder, stop=stop)()
        return raised

    return children.run(work)
