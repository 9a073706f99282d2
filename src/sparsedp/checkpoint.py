"""The resumable state of a run: nested values with tensors in them, in one checked file, with no pickle anywhere.

A file is the format's name, the SHA-256 of the rest, and a safetensors block whose metadata hold the nesting. A file that
is cut short, changed, or of another format is refused; the one before it is then used. Since every random number is a
function of (key, step), the state of the generators is the step's number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from sparsedp import disk
from sparsedp.errors import UsageError

MAGIC = b"sparsedp state 1\n"
KEEP = 2


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state at a step, then let go of all but the last two. A failed write leaves what was there."""
    path = folder / f"step-{step:08d}.state"
    disk.write_bytes(path, encode(state), mode=0o600)
    for old in sorted(folder.glob("step-*.state"))[:-KEEP]:
        disk.remove(old)
    return path


def load_latest(
    folder: Path, ours: Callable[[dict[str, Any]], bool] = lambda state: True
) -> tuple[int, dict[str, Any], list[str]] | None:
    """The newest state that is whole and `ours`, its step, and what was wrong with newer ones. None where there never was one."""
    problems: list[str] = []
    paths = sorted(folder.glob("step-*.state"), reverse=True)
    for path in paths:
        try:
            step, state = int(path.stem.removeprefix("step-")), decode(path.read_bytes(), path.name)
            if ours(state):
                return step, state, problems
            problems.append(f"{path.name} is of another run.")
        except UsageError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path.name} cannot be read ({error.strerror}).")
        except ValueError:
            problems.append(f"{path.name} is not the name of a checkpoint.")
    if paths:
        raise UsageError(
            f"No checkpoint in {folder} is whole and of this run: {' '.join(problems)} Start a new run; what this one spent stays spent."
        )
    return None


def encode(state: dict[str, Any]) -> bytes:
    """The bytes of a checkpoint file."""
    tensors: dict[str, Tensor] = {}
    nesting = json.dumps(_fold(state, tensors), allow_nan=True)
    block = safetensors.torch.save(tensors, metadata={"nesting": nesting})
    return MAGIC + hashlib.sha256(block).digest() + block


def decode(content: bytes, name: str) -> dict[str, Any]:
    """The state in a checkpoint file's bytes, if they are whole."""
    head, digest, block = content[: len(MAGIC)], content[len(MAGIC) : len(MAGIC) + 32], content[len(MAGIC) + 32 :]
    if head != MAGIC:
        raise UsageError(f"{name} is not a checkpoint of this version of sparsedp; use the version that wrote it.")
    if hashlib.sha256(block).digest() != digest:
        raise UsageError(f"{name} is damaged: its checksum does not match.")
    try:
        tensors = safetensors.torch.load(block)
        length = int.from_bytes(block[:8], "little")
        nesting = json.loads(json.loads(block[8 : 8 + length])["__metadata__"]["nesting"])
        state = _unfold(nesting, tensors)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{name} is not a checkpoint that can be read ({type(error).__name__}).") from error
    if not isinstance(state, dict):
        raise UsageError(f"{name} is not a checkpoint: it holds no named state.")
    return state


def _fold(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Tensors are moved out into `tensors`; dictionaries keep the types of their keys, tuples stay tuples."""
    if isinstance(value, Tensor):
        place = str(len(tensors))
        tensors[place] = value.detach().cpu().contiguous().clone()
        return {"tensor": place}
    if isinstance(value, dict):
        return {"dict": [[_fold(k, tensors), _fold(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__ if type(value) in (list, tuple) else "tuple": [_fold(v, tensors) for v in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise AssertionError(f"a {type(value).__name__} cannot be kept in a checkpoint")


def _unfold(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_unfold(k, tensors): _unfold(v, tensors) for k, v in content}
    if kind in ("list", "tuple"):
        items = [_unfold(v, tensors) for v in content]
        return items if kind == "list" else tuple(items)
    raise ValueError(kind)
