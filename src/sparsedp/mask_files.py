"""Masks on disk: one bit per entry, in safetensors, with what they are for and what they cost. No pickle."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes
from torch import Tensor, nn

from sparsedp.apply_masks import check_fit
from sparsedp.disk import write_bytes
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.masks import Layer, maskable_layers
from sparsedp.errors import UsageError
from sparsedp.models.export import with_metadata
from sparsedp.pruning import Pruned

FORMAT = "sparsedp-mask"
VERSION = 2


def save(path: str | Path, pruned: Pruned) -> Path:
    """Write masks atomically: the file is either the old one or the whole new one. The same masks give the same bytes."""
    path = Path(path)
    packed = {name: np.packbits(mask.cpu().numpy().reshape(-1)) for name, mask in pruned.masks.items()}
    described = json.dumps(_describe(pruned))
    write_bytes(path, with_metadata(to_bytes(packed), {FORMAT: described, "sha256": digest(described, packed)}))
    return path


def _describe(pruned: Pruned) -> dict[str, Any]:
    return {
        "version": VERSION,
        "criterion": pruned.criterion,
        "private": pruned.private,
        "key_given": pruned.key_given,
        "rate": pruned.rate,
        "granularity": pruned.granularity,
        "maskable": None if pruned.maskable is None else list(pruned.maskable),
        "ledger": Ledger().append(f"pruning by {pruned.criterion}", pruned.event).to_json(),
        "layers": [
            {"name": la.name, "shape": list(la.shape), "by_filter": la.by_filter}
            for la in pruned.layers
            if la.name in pruned.masks
        ],
    }


def load(path: str | Path, model: nn.Module | None = None) -> Pruned:
    """Read masks, and check that they are for this model: the same maskable parameters, of the same shapes."""
    path = Path(path)
    described, packed = _read(path)
    try:
        pruned = _assemble(described, packed)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise _broken(path) from None
    if model is not None:
        _check_layers(pruned, model)
    return pruned


def _broken(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not a whole mask file of version {VERSION} of this library; make the mask anew with 'sparsedp prune'."
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if not path.is_file():
        raise UsageError(f"There is no mask file {path}; make one with 'sparsedp prune'.")
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            packed = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        expected(metadata["sha256"] == digest(metadata[FORMAT], packed))
        described = json.loads(metadata[FORMAT])
        expected(isinstance(described, dict))
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError):
        # AttributeError: safetensors, where numpy has no such type of numbers
        raise _broken(path) from None
    return described, packed


def digest(described: str, packed: Mapping[str, np.ndarray]) -> str:
    """A checksum of all that a mask file says."""
    hasher = hashlib.sha256(described.encode())
    for name in sorted(packed):
        hasher.update(f"\0{name}\0{packed[name].dtype}\0{packed[name].shape}\0".encode() + packed[name].tobytes())
    return hasher.hexdigest()


def _assemble(described: dict[str, Any], packed: dict[str, np.ndarray]) -> Pruned:
    """Raises ValueError, KeyError or TypeError at anything that `save` would not have written."""
    layers = tuple(_layer(row) for row in described["layers"])
    rate, private, given, patterns = (described[field] for field in ("rate", "private", "key_given", "maskable"))
    words = (described["criterion"], described["granularity"])
    entries = Ledger.from_json(described["ledger"]).entries
    expected(described["version"] == VERSION and type(private) is type(given) is bool and len(entries) == 1)
    expected(all(isinstance(word, str) for word in words) and words[1] in ("weight", "filter"))
    expected(type(rate) in (int, float) and 0 <= rate < 1 and len(packed) == len({la.name for la in layers}) == len(layers))
    expected(patterns is None or (isinstance(patterns, list) and all(isinstance(p, str) for p in patterns)))
    return Pruned(
        masks={la.name: _unpack(packed[la.name], la) for la in layers}, event=entries[0].event, criterion=words[0],
        rate=float(rate), granularity=words[1], private=private, key_given=given, layers=layers,
        maskable=None if patterns is None else tuple(patterns),
    )  # fmt: skip


def expected(ok: bool) -> None:
    """A check of a file's content; the caller words the error."""
    if not ok:
        raise ValueError


def _layer(row: Any) -> Layer:
    name, shape, by_filter = row["name"], row["shape"], row["by_filter"]
    expected(isinstance(name, str) and isinstance(shape, list) and type(by_filter) is bool)
    expected(1 <= len(shape) <= 8 and all(type(n) is int and n >= 1 for n in shape))
    return Layer(name, tuple(shape), by_filter)


def _unpack(packed: np.ndarray, layer: Layer) -> Tensor:
    shape = layer.shape[:1] if layer.by_filter else layer.shape
    count = math.prod(shape)
    expected(packed.dtype == np.uint8 and packed.shape == (-(-count // 8),))
    bits = np.unpackbits(packed)
    expected(not bits[count:].any() and bool(bits[:count].any()))
    return torch.from_numpy(bits[:count].astype(bool)).reshape(shape)


def _check_layers(pruned: Pruned, model: nn.Module) -> None:
    check_fit(model, pruned.masks)
    own = {la.name: la for la in maskable_layers(model, pruned.granularity, pruned.maskable)}
    if not pruned.masks:
        return
    for layer in own.values():
        if layer.name not in pruned.masks:
            raise UsageError(f"The mask file has no mask for {layer.name!r}, which this model has; make a mask for this model.")
    for layer in pruned.layers:
        if own.get(layer.name) != layer:
            raise UsageError(
                f"The mask file's {layer.name!r} has shape {layer.shape}, masked by {'channel' if layer.by_filter else 'weight'}, and this "
                "model's has not; make a mask for this model."
            )
