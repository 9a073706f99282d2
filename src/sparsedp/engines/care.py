"""What stands around an engine during a private step: broken records, random modules, memory that runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sparsedp.dp.clipping import Engine, Loss, Rows, one_unit, reference, unless_it_raises, wide
from sparsedp.dp.masks import Masks, participating
from sparsedp.dp.randomness import Key, raw
from sparsedp.errors import UsageError, out_of_memory


@contextmanager
def memory_in_words() -> Iterator[None]:
    """Where memory runs out for good, a sentence says so."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not out_of_memory(error):
            raise
        raise UsageError(
            "Memory ran out; free some, or start the run with a smaller runtime.micro_batch. The same command takes a run that has "
            "begun up again: nothing that was saved is lost."
        ) from error


def sheltered(engine: Engine) -> Engine:
    """The engine, but where a record makes the loss or the model raise, the unit of that record counts as zero, in silence.

    Made-up rows have passed by then, so what raises is the record; whether a run ends must not depend on one. The others of its
    part go through the same engine as ever, one by one, so that their gradients are what they are without that record.
    """

    def run(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
        try:
            return engine(model, loss, rows, masks, clip)
        except Exception as error:
            if out_of_memory(error):
                raise
        total = {name: torch.zeros_like(p, dtype=wide(p.dtype)) for name, p in participating(model).items()}
        for inputs, targets in rows.of_each_unit():
            for name, tensor in alone(model, loss, one_unit(inputs, targets), masks, clip).items():
                total[name] += tensor
        return total

    def alone(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
        return unless_it_raises(engine, model, loss, rows, masks, clip) or unless_it_raises(
            reference, model, loss, rows, masks, clip
        )

    return run


def seeded(engine: Engine, key: Key, step: int) -> Engine:
    """The engine with torch's own generators seeded from the key at each part of a batch, for dropout and the like.

    The draws depend on how the batch is cut into parts; models without such modules do not notice.
    """
    calls = 0

    def run(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        with drawing_from(key, step, calls):
            return engine(model, loss, rows, masks, clip)

    return run


@contextmanager
def drawing_from(key: Key, step: int, part: int) -> Iterator[None]:
    """What draws from torch's own generators in this block draws from the key; afterwards they are as they were."""
    seed = int.from_bytes(raw(key, 8, "modules", step, part), "little") >> 1
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
