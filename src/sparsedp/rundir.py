"""A run's folder: `public/` may be released as it is, `private/` never; which is which is decided here and nowhere else.

`private/` holds the key and the resumable state while the run is unfinished; both are erased when it ends. The folder of a search
(`tune`) has public/search.json and its trials' folders below `private/`; they are erased when it ends, unless they are to be kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import shutil
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsedp import disk, keys
from sparsedp.config import Run
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.randomness import Key
from sparsedp.engines import Plan
from sparsedp.errors import UsageError, require, shown, told

VERSION = 1


class RunDir:
    """Paths and files of one run. One process at a time has it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.public, self.private = path / "public", path / "private"
        self.states = self.private / "state"
        self.is_new = False
        self._made: list[Path] = []
        self._lock: int | None = None

    @staticmethod
    def open(path: Path, run: Run, search: bool = False) -> RunDir:
        """A new folder for this run, or the folder of the same run, unfinished; anything else is refused. So for a search."""
        folder = RunDir(path)
        if path.exists() and not path.is_dir():
            raise UsageError(f"--run-dir is {path}, which is a file; name a new or empty folder.")
        folder.is_new = not (folder.public / "config.json").exists()
        folder._refuse_strangers()
        folder._made = [place for place in (path, *path.parents) if not place.exists()]
        for part in (folder.public, folder.private, folder.states):
            disk.make_folder(part, 0o755 if part is folder.public else 0o700)
        folder._hold()
        try:
            folder._take(run, search)
        except BaseException:
            folder.close()
            raise
        return folder

    def _refuse_strangers(self) -> None:
        if not self.is_new or not self.path.exists():
            return
        if any(p.name not in ("public", "private") for p in self.path.iterdir()):
            raise UsageError(f"--run-dir is {self.path}, which holds other files; name a new or empty folder.")
        if (self.public / "ledger.json").exists() or any(self.states.glob("*.state")):
            raise UsageError(
                f"The run in {self.path} has lost its public/config.json; restore it, or start a new run in another folder and count "
                "this one as spent."
            )

    def _hold(self) -> None:
        self._lock = disk.lock(self.private / "lock")
        if self._lock is None:
            raise UsageError(
                f"The run in {self.path} is being trained by another process; wait for it, or name another --run-dir."
            )

    def _take(self, run: Run, search: bool) -> None:
        for part in (self.public, self.private, self.states):
            disk.sweep(part)
        recorded = self.public / "config.json"
        if self.is_new:
            disk.write_json(self.private / "where.json", _whereabouts(run), mode=0o600)
            disk.write_json(recorded, describe(run))
            return
        if (self.public / "summary.json").exists():
            self.finish()
            raise UsageError(
                f"The run in {self.path} is finished; name another --run-dir, or look at it with 'sparsedp evaluate {self.path}'."
            )
        if not search and self.settings.exists():
            raise UsageError(
                f"The folder {self.path} is that of a search; take it up with 'sparsedp tune', or name another --run-dir."
            )
        if search and self.base.exists():
            recorded = self.base  # in public/ the best trial's may stand already
        differences = different(disk.read_json(recorded, "the run's configuration"), describe(run))
        if differences:
            raise UsageError(
                f"The run in {self.path} was started with another configuration ({'; '.join(differences[:3])}); resume it with the "
                "same one, or name another --run-dir."
            )

    @property
    def settings(self) -> Path:
        """The public settings of a search."""
        return self.public / "search.json"

    @property
    def base(self) -> Path:
        """The configuration that a search began with, while it is unfinished."""
        return self.private / "base.json"

    @property
    def trials(self) -> Path:
        """The trials of a search."""
        return self.private / "trials"

    def close(self) -> None:
        """Let other processes have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove what `open` made, if it was new and nothing was spent."""
        if self.is_new and not (self.public / "ledger.json").exists():
            self.close()
            for part in (self.public, self.private):
                shutil.rmtree(part, ignore_errors=True)
            for place in self._made:
                with contextlib.suppress(OSError):  # something else has been put there meanwhile
                    place.rmdir()

    @property
    def name(self) -> str:
        """What the budget file calls the run: another run in the same place, after this one was removed, has another name."""
        path = self.private / "id"
        if not path.exists():
            disk.write_text(path, secrets.token_hex(8), mode=0o600)
        return f"{self.path.resolve()} {path.read_text(encoding='utf-8', errors='backslashreplace')}"

    def key(self, chosen: str | None) -> Key:
        """The run's key: chosen by the user, or made once by the operating system; kept until the run ends."""
        path = self.private / "key"
        if self.is_new and path.exists():
            raise UsageError(
                f"{path} was there before the run, so its noise may have been used before; name a new or empty folder."
            )
        if not path.exists():
            made = keys.fresh() if chosen is None else keys.chosen(chosen)
            disk.write_bytes(path, made.secret, mode=0o600)
        secret = path.read_bytes()
        if chosen is not None and secret != keys.chosen(chosen).secret:
            raise UsageError(
                f"runtime.key is not the one that the run in {self.path} was started with; give that one, or name another --run-dir."
            )
        if len(secret) != 32:
            raise UsageError(f"The key in {path} is damaged; start a new run, what this one spent stays spent.")
        return Key(secret, given=chosen is not None)

    def write_ledger(self, ledger: Ledger) -> None:
        """Before a step reads anything: so a crash can over-count, and never under-count."""
        disk.write_json(self.public / "ledger.json", ledger.to_json())

    def read_ledger(self) -> Ledger:
        path = self.public / "ledger.json"
        return Ledger.from_json(disk.read_json(path, "the ledger")) if path.exists() else Ledger()

    def write_plans(self, plans: Mapping[int, Plan]) -> None:
        """Which plan of the engine serves from which step on; written before the first step that it serves."""
        disk.write_json(self.private / "plans.json", {str(step): plan.to_json() for step, plan in plans.items()}, mode=0o600)

    def read_plans(self) -> dict[int, Plan]:
        path = self.private / "plans.json"
        if not path.exists():
            return {}
        found = disk.read_json(path, "the engine's plans")
        if not isinstance(found, dict) or not all(step.isascii() and step.isdecimal() and len(step) < 19 for step in found):
            raise UsageError(f"{path} does not hold plans by step; start a new run.")
        return {int(step): Plan.from_json(plan) for step, plan in found.items()}

    def keep_metrics(self, upto: int, steps: int) -> None:
        """Of the lines of metrics, keep what a run that stands at step `upto` of `steps` has written and will not write again."""
        for path, mode in ((self.public / "metrics.jsonl", 0o644), (self.private / "metrics.jsonl", 0o600)):
            if path.exists():
                lines = path.read_text(encoding="utf-8", errors="backslashreplace").splitlines(keepends=True)
                disk.write_text(path, "".join(line for line in lines if _step(line) <= upto and _step(line) < steps), mode)

    def note(self, text: str) -> None:
        """Keep what the operator was told, for one who was not at the screen."""
        disk.append_text(self.private / "notes.txt", f"{text}\n")

    def finish(self) -> None:
        """Erase the key and the resumable state: nobody can recompute the noise any more."""
        for path in (self.private / "key", self.private / "plans.json"):
            disk.erase(path)
        shutil.rmtree(self.states, ignore_errors=True)
        if self.settings.exists():
            if not disk.read_json(self.settings, "the settings of the search").get("keep_trials"):
                disk.erase_all(self.trials)
            for path in (self.base, self.private / "data.json"):
                disk.erase(path)


def _step(line: str) -> float:
    """The step of a line of metrics; infinite for a line that was not written to its end."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")


def describe(run: Run) -> dict[str, Any]:
    """A run as plain values, which may be published. A key that the user chose is not told, only that there is one; of a path,
    which may name a person or an illness, only its end."""
    values = dataclasses.asdict(run)
    for section, name in PATHS:
        if values[section][name] is not None:
            values[section][name] = Path(values[section][name]).name
    if values["runtime"]["key"] is not None:
        values["runtime"]["key"] = "chosen by the user"
    return {"version": VERSION, **json.loads(json.dumps(values))}


PATHS = (("data", "dir"), ("model", "weights"), ("sparsity", "mask_file"))


def _whereabouts(run: Run) -> dict[str, Any]:
    """The paths that `describe` cuts, whole."""
    return {f"{section}.{name}": getattr(getattr(run, section), name) for section, name in PATHS}


def recorded_run(path: Path) -> Run:
    """The run of a folder, with whole paths where private/ is still there to tell them."""
    run = run_of(disk.read_json(path / "public" / "config.json", "the run's configuration"))
    kept = path / "private" / "where.json"
    whole = disk.read_json(kept, "the run's paths") if kept.exists() else {}
    for section, name in PATHS:
        found = whole.get(f"{section}.{name}") if isinstance(whole, dict) else None
        if isinstance(found, str):
            run = dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **{name: found})})
    return run


CHANGEABLE = ("evaluate_every", "checkpoint_every", "tensorboard", "export", "workers")
"""Runtime settings that may differ when a run is resumed: they change no number that is computed."""


def different(recorded: Any, now: dict[str, Any]) -> list[str]:
    """Which settings of two descriptions differ, each in words."""
    if not isinstance(recorded, dict):
        return ["the recorded one cannot be read"]

    def said(name: str, old: Any, new: Any) -> str:
        return f"{shown(name)}: {told(old)}, now {told(new)}"

    found = []
    for section in sorted(recorded.keys() | now.keys()):
        old, new = recorded.get(section), now.get(section)
        if not isinstance(old, dict) or not isinstance(new, dict):
            found += [said(section, old, new)] if old != new else []
            continue
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name) and not (section == "runtime" and name in CHANGEABLE):
                found.append(said(f"{section}.{name}", old.get(name), new.get(name)))
    return found


def run_of(recorded: Any) -> Run:
    """The run that a config.json describes."""
    from sparsedp import config

    kinds = {f.name: f.default_factory for f in dataclasses.fields(config.Run)}
    parts = {"data": config.Data, "model": config.Model, "sparsity": config.Sparsity, "mechanism": config.Mechanism,
             "optim": config.Optim, "runtime": config.Runtime}  # fmt: skip
    assert kinds.keys() == parts.keys()
    try:
        made = {
            name: kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in recorded[name].items()})
            for name, kind in parts.items()
        }
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"The configuration cannot be read ({shown(str(error))}); use the version of sparsedp that wrote it."
        ) from error
    for name, kind in parts.items():
        for field, declared in _declared(kind).items():
            value = getattr(made[name], field)
            require(
                _is(value, declared), f"the recorded {name}.{field}", value, "a value of another kind belongs there",
                "use the version of sparsedp that wrote it",
            )  # fmt: skip
    return config.Run(**made)


@functools.cache
def _declared(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _is(value: object, declared: Any) -> bool:
    """Whether a value is of the kind that a setting is declared as; numbers must be finite."""
    inner = typing.get_args(declared)
    if typing.get_origin(declared) is typing.Literal:
        return isinstance(value, str) and value in inner
    if typing.get_origin(declared) is tuple:
        return isinstance(value, tuple) and all(_is(one, inner[0]) for one in value)
    if inner:
        return any(_is(value, kind) for kind in inner)
    if declared is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    return type(value) is declared
