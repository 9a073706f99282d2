"""Every call with which a run changes the disk, numbered; at a chosen one the process dies or the disk is full.

`install` is for forked children only: it replaces functions of this process for good.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsedp import disk
from tests.faults import children
from tests.faults.worlds import World

ALLOWED = {
    errno.ENOSPC: ("unlink", "rmdir", "fsync a folder"), errno.EDQUOT: ("unlink", "rmdir", "fsync a folder"),
    errno.EROFS: ("fsync a folder",), errno.EIO: (),
}  # fmt: skip
"""What a disk that is full, over its quota, read-only or broken does not refuse."""


@dataclass
class Operations:
    """Counts; at number `at` it kills this process (`error` is None) or raises `error`, from then on always if `stays`."""

    at: int = 0
    error: int | None = None
    stays: bool = False
    seen: int = 0
    done: int = 0
    """How many calls failed."""
    log: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, name: str, path: object, half: Callable[[], Any] = lambda: None) -> None:
        self.seen += 1
        self.log.append((name, str(path)))
        if not (self.seen == self.at or (self.stays and self.seen > self.at > 0)):
            return
        if self.error is None:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        elif name not in ALLOWED[self.error]:
            self.done += 1
            half()
            raise OSError(self.error, os.strerror(self.error), str(path))

    def install(self) -> None:
        disk.os = _System(self)  # type: ignore[assignment]
        make = tempfile.mkstemp

        def mkstemp(*given: Any, **named: Any) -> Any:
            self("create", Path(named["dir"]) / f"{named['prefix']}...{named['suffix']}")
            return make(*given, **named)

        tempfile.mkstemp = mkstemp
        for method in ("mkdir", "chmod", "replace", "unlink", "rmdir"):
            setattr(pathlib.Path, method, self._told(method, getattr(pathlib.Path, method)))
        opened = pathlib.Path.open

        def open_path(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
            if not set(mode) & set("aw+x"):
                return opened(path, mode, *given, **named)
            self("open", path)
            return _File(self, opened(path, mode, *given, **named))

        pathlib.Path.open = open_path  # type: ignore[method-assign,assignment]

    def _told(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def told(path: Path, *given: Any, **named: Any) -> Any:
            if not (name == "mkdir" and path.is_dir()):
                self(name, path)
            return method(path, *given, **named)

        return told


class _System:
    """The module `os` as `disk` sees it."""

    def __init__(self, tell: Operations) -> None:
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and not Path(path).exists():
            self._tell("create", path)
        return os.open(path, flags, *mode)

    def fdopen(self, handle: int, mode: str) -> Any:
        return _File(self._tell, os.fdopen(handle, mode))

    def fsync(self, handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        self._tell("fsync a folder" if path.is_dir() else "fsync", path)
        os.fsync(handle)


class _File:
    """An open file whose writes are told; one that fails or dies has written half."""

    def __init__(self, tell: Operations, file: Any) -> None:
        self._tell, self._file = tell, file

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: Any) -> int:
        def half() -> None:
            self._file.write(content[: len(content) // 2])
            self._file.flush()

        self._tell("write", self._file.name if isinstance(self._file.name, str) else _path_of(self._file), half)
        return int(self._file.write(content))


def _path_of(file: Any) -> Path:
    return Path(f"/proc/self/fd/{file.fileno()}").readlink()


def of_a_run(world: World) -> list[tuple[str, str]]:
    """Every operation of one undisturbed run, in order: its name, and the file within the run."""
    folder, written = world.folder(), world.place / "operations.json"
    counted = Operations()

    def work() -> None:
        counted.install()
        world.train(folder)()
        with open(written, "w") as file:  # noqa: PTH123 - Path.open is counted
            json.dump(counted.log, file)

    ended = children.run(work)
    assert ended.how == "done", ended.text
    world.forget(folder)
    return [(name, path.replace(str(folder), "RUN")) for name, path in json.loads(written.read_text())]


def disturbed(world: World, folder: Path, operations: Operations) -> children.Ended:
    """A run in a child whose disk behaves so; if it ends well, with how many calls that failed."""

    def work() -> int:
        operations.install()
        world.train(folder)()
        return operations.done

    return children.run(work)
