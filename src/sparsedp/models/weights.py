"""Public weights from a file: safetensors, or a state_dict that torch saved. Nothing in a file is ever executed."""

from __future__ import annotations

import io
import pickletools
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sparsedp.errors import UsageError, require, shown, together
from sparsedp.models.head import classifier_name
from sparsedp.models.layers import WSConv2d

State = dict[str, Tensor]
OLD_PARTS, FEW = 5, 1000
"""The old format is so many pickles, then the data; the first has a huge number, others none."""
NESTED = ("state_dict", "model", "model_state_dict")
"""Where training scripts put the state_dict inside what they save."""


@dataclass(frozen=True)
class LoadReport:
    """What became of each tensor, by name. `replaced`: the classifier's, which keep their fresh values."""

    loaded: tuple[str, ...]
    replaced: tuple[str, ...]
    reason: str
    """Why the classifier was replaced; empty if it was not."""

    def __str__(self) -> str:
        text = f"{len(self.loaded)} tensors loaded"
        return f"{text}; new: {', '.join(self.replaced)} ({self.reason})" if self.replaced else text


def load_weights(model: nn.Module, path: str | Path, classifier: str | None = None) -> LoadReport:
    """Copy a file's tensors into the model. The classifier is left new when its shape differs or the file has none.

    Every other tensor must be there, with its shape and finite values, and the file may hold nothing else: one error
    names all that do not. `classifier` is the path of the last layer, found by `classifier_name` if left out.
    Nothing is changed unless all of it can be.
    """
    saved = read_state(path)
    wanted = model.state_dict() | _pruned(model, saved)
    head = _head_tensors(model, wanted, classifier)
    reason = _why_new(head, saved, wanted)
    replaced = head if reason else set()
    problems = _mismatches(saved, wanted, replaced)
    if problems:
        raise together(f"The weights in {Path(path).name} do not fit the model {type(model).__name__}:", problems)
    loaded = tuple(name for name in wanted if name in saved and name not in replaced)
    model.load_state_dict({**wanted, **{name: saved[name] for name in loaded}})
    return LoadReport(loaded, tuple(sorted(replaced)), reason)


def _head_tensors(model: nn.Module, wanted: State, classifier: str | None) -> set[str]:
    if classifier is None and not any(isinstance(module, nn.Linear) for module in model.modules()):
        return set()
    path = classifier_name(model) if classifier is None else classifier
    return {name for name in wanted if name.startswith(f"{path}.")} if path else set(wanted)


def _pruned(model: nn.Module, saved: State) -> State:
    """Masks in the file that belong to weight-standardised layers which are not pruned yet."""
    layers = {f"{path}.kept": m for path, m in model.named_modules() if isinstance(m, WSConv2d) and m.kept is None}
    fitting = {n: (m.weight.shape, m.weight.shape[:1]) for n, m in layers.items()}
    return {n: saved[n] for n, shapes in fitting.items() if n in saved and saved[n].shape in shapes}


def _why_new(head: set[str], saved: State, wanted: State) -> str:
    """A reason to leave the classifier as it is, or nothing."""
    if head and head.isdisjoint(saved):
        return "the file has no classifier"
    for name in sorted(head & saved.keys()):
        if saved[name].shape != wanted[name].shape:
            return f"{name} is {_size(saved[name])} in the file and {_size(wanted[name])} in the model"
    return ""


def _mismatches(saved: State, wanted: State, replaced: set[str]) -> list[str]:
    problems = []
    present = {(wanted[name].data_ptr(), wanted[name].shape) for name in wanted.keys() & saved.keys()}
    for name in sorted(wanted.keys() - saved.keys() - replaced):
        counter = name.endswith("num_batches_tracked")  # old files lack it and nothing here reads it
        tied = (wanted[name].data_ptr(), wanted[name].shape) in present
        if not counter and not tied:
            problems.append(f"{name} is missing from the file.")
    problems += [f"{shown(name)} is in the file, but not in the model." for name in sorted(saved.keys() - wanted.keys())]
    for name in sorted((saved.keys() & wanted.keys()) - replaced):
        if saved[name].shape != wanted[name].shape:
            problems.append(f"{name} is {_size(saved[name])} in the file and {_size(wanted[name])} in the model.")
        elif saved[name].is_floating_point() != wanted[name].is_floating_point():
            problems.append(f"{name} is {saved[name].dtype} in the file and {wanted[name].dtype} in the model.")
        elif not bool(saved[name].isfinite().all()):
            problems.append(f"{name} has values in the file that are not finite.")
    return problems


def _size(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a scalar"


def read_state(path: str | Path) -> State:
    """The tensors of a safetensors file or of a state_dict that torch saved, by name, on the CPU.

    Which of the two it is, its first bytes say. A state_dict may lie under `state_dict` or `model`, and its names may all
    begin with `module.`, as DataParallel leaves them.
    """
    path = Path(path)
    require(path.is_file(), "weights", str(path), "there is no such file", "give a safetensors or state_dict file")
    if _saved_by_torch(path):
        state = _state_of(_torch_load(path), path)
    else:
        try:
            state = load_file(path)
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"weights is {str(path)!r}, which is neither a whole safetensors file nor a state_dict saved by torch ({shown(str(error))}); "
                "fetch it again."
            ) from error
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return state


def _saved_by_torch(path: Path) -> bool:
    """Whether the file begins as a zip archive or, as of old, as a pickle, and not as safetensors: a length, then JSON."""
    with path.open("rb") as file:
        start = file.read(9)
    header = int.from_bytes(start[:8], "little")
    if start[8:] == b"{" and header <= path.stat().st_size - 8:
        return False
    return start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))


def _torch_load(path: Path) -> object:
    try:
        _refuse_bombs(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols; what cannot be read is an error here
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(
            f"weights is {str(path)!r}, but it is damaged or holds more than tensors, and nothing in a file is executed; save the "
            "model's state_dict(), or better a safetensors file."
        ) from error


def _refuse_bombs(path: Path) -> None:
    """Raise ValueError for a small file that would fill the memory, or take hours: torch compresses nothing that it saves,
    and huge numbers can be chosen so that all collide as keys of a dictionary."""
    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                    raise ValueError("compressed")
                for member in members:
                    if member.filename.endswith("data.pkl"):
                        _count_huge(io.BytesIO(archive.read(member)))
            return
        file.seek(0)
        for _ in range(OLD_PARTS):
            _count_huge(file)


def _count_huge(pickled: IO[bytes]) -> None:
    found = 0
    for _, argument, _ in pickletools.genops(pickled):
        found += isinstance(argument, int) and abs(argument) >= 1 << 63
        if found > FEW:
            raise ValueError("colliding numbers")


def _state_of(content: object, path: Path) -> State:
    if isinstance(content, Mapping):
        for key in NESTED:
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
    if not isinstance(content, Mapping) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise UsageError(
            f"weights is {str(path)!r}, but it does not hold one tensor per name; save the model's state_dict() or a safetensors file."
        )
    return {str(name): tensor for name, tensor in content.items()}
