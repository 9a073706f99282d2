"""Files that are whole or absent: written beside their place, flushed to the disk, and moved there in one step."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsedp.errors import UsageError

DEEPEST = 64  # values within each other in a JSON file; those of this library have a dozen
UNFINISHED = ".part"  # ends the name of a file that is being written


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the file's content at once. After a failure or a crash the old content is still there."""
    try:
        _replace(path, content, mode)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, text.encode(), mode)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """`write_bytes` of readable JSON; a NaN or an infinity is written as null, which JSON can say."""
    write_text(path, json.dumps(_plain(value), indent=2, allow_nan=False) + "\n", mode)


def append_line(path: Path, value: Any) -> None:
    """One more line of JSON at the end of the file."""
    append_text(path, json.dumps(_plain(value), allow_nan=False) + "\n")


def append_text(path: Path, text: str) -> None:
    """More text at the end of the file."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(path, error) from error


def read_json(path: Path, what: str) -> Any:
    """The value in a JSON file; `what` names it in errors."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _refuse_depth(found)
        return found
    except FileNotFoundError:
        raise UsageError(f"{what} is missing: there is no {path}; check the path.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} cannot be read from {path} ({type(error).__name__}); restore the file.") from error


def read_number(path: Path, what: str, name: str, or_null: bool = False) -> Any:
    """The finite number of this name in a JSON file; a null is None, where there may be one."""
    found = read_json(path, what)
    value = found.get(name, "") if isinstance(found, dict) else ""
    if value is None and or_null:
        return None
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise UsageError(f"{what} in {path} has no number {name!r}; restore the file.")
    return float(value)


def _refuse_depth(value: Any) -> None:
    """Raise ValueError for values within each other that would overflow the stack of whoever walks through them."""
    level = [value]
    for _ in range(DEEPEST):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for values in inner for one in values]
        if not level:
            return
    raise ValueError("too deep")


def make_folder(path: Path, mode: int = 0o755) -> Path:
    """The folder, made if it was not there."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "not writable")
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def sweep(folder: Path) -> None:
    """Remove what a process that died was writing."""
    for left in folder.glob(f".*{UNFINISHED}"):
        remove(left)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def lock(path: Path) -> int | None:
    """Hold a file until `os.close` or the end of the process, however it ends; None if another process holds it."""
    handle = _opened(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait for a file that only one process can hold, and hold it for the block."""
    handle = _opened(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def erase(path: Path) -> None:
    """Overwrite a file where it lies, and remove it. What a file system kept elsewhere is out of reach."""
    if path.exists():
        try:
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
        except OSError as error:
            raise cannot_write(path, error) from error


def erase_all(folder: Path) -> None:
    """Overwrite every file below a folder, and remove it."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            erase(path)
    shutil.rmtree(folder, ignore_errors=True)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> UsageError:
    """The error for a path that cannot be written; the last whole version of the file is still there."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    remedy = "remove the folder that is there" if error.errno == errno.EISDIR else "free space or choose another folder"
    return UsageError(f"{path} cannot be written ({reason}); {remedy}, nothing that was saved is lost.")


def _replace(path: Path, content: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return value
