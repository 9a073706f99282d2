"""A trained network as files that others can read: safetensors, ONNX, torch.export.

The safetensors file has the keys of the module's state_dict, so that it loads into the same module without sparsedp:
`module.load_state_dict(safetensors.torch.load_file(path))`. A network of ours needs our classes for that (a
`WSConv2d` has weight, gain, bias and, pruned, kept); its ONNX and torch.export files need nothing of ours, and hold
weight-standardised filters ready-made.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import logging
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from sparsedp.disk import write_bytes
from sparsedp.errors import missing_extra, require
from sparsedp.models.layers import SameConv2d, WSConv2d

Shape = tuple[int, int, int]


def describe(name: str, classes: Sequence[str] | int, shape: Shape, normalisation: object) -> dict[str, str]:
    """Metadata for `save_safetensors`: what one must know to use the weights. Each value is JSON."""
    facts = {"name": name, "classes": classes, "shape": list(shape), "normalisation": normalisation}
    return {key: json.dumps(value) for key, value in facts.items()}


def save_safetensors(model: nn.Module, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the state_dict under its own names, atomically; the same model and metadata give the same bytes.

    Tied weights are written once for each name, so that loading needs no knowledge of the ties.
    """
    facts = dict(metadata or {})
    texts = all(isinstance(part, str) for pair in facts.items() for part in pair)
    require(texts, "metadata", facts, "a safetensors file takes text only", "make it with describe")
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    write_bytes(Path(path), with_metadata(save(tensors), facts))


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def with_metadata(content: bytes, metadata: dict[str, str]) -> bytes:
    """Put metadata into a safetensors file's header in sorted order; the library's own order changes from run to run."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    if metadata:
        header = {"__metadata__": dict(sorted(metadata.items())), **header}
    coded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    coded += b" " * (-len(coded) % 8)
    return struct.pack("<Q", len(coded)) + coded + content[8 + length :]


def folded(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode whose weight-standardised convolutions are plain ones with the effective weight."""
    copied = copy.deepcopy(model).eval()
    for parent in list(copied.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, WSConv2d):
                setattr(parent, name, _plain(child))
    return _plain(copied) if isinstance(copied, WSConv2d) else copied


def _plain(layer: WSConv2d) -> SameConv2d:
    made = SameConv2d(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.dilation, layer.groups).to(
        layer.weight
    )
    with torch.no_grad():
        made.weight.copy_(layer.effective_weight())
        made.bias.copy_(layer.bias)
    return made.eval()


def export_torch(model: nn.Module, shape: Shape, path: str | Path) -> None:
    """Write a torch.export program (.pt2) for batches of any size: `torch.export.load(path).module()(images)`."""
    subject, images = _ready(model, shape)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(subject, (images,), dynamic_shapes=({0: batch},))
    content = io.BytesIO()
    torch.export.save(program, content)
    write_bytes(Path(path), content.getvalue())


def export_onnx(model: nn.Module, shape: Shape, path: str | Path) -> None:
    """Write an ONNX file for batches of any size, with input `images` and output `logits`."""
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, "onnx", "export to ONNX")
    subject, images = _ready(model, shape)
    with _quiet_exporter():
        program = torch.onnx.export(
            subject,
            (images,),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            dynamo=True,
            verbose=False,
        )
    write_bytes(Path(path), program.model_proto.SerializeToString())


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Without torch's remarks on its exporter's insides and on packages that are not needed; failures are exceptions."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _ready(model: nn.Module, shape: Shape) -> tuple[nn.Module, Tensor]:
    """The folded model on the CPU, its weights laid out plainly, and two blank images (with one, the batch size would become a constant)."""
    require(len(shape) == 3, "shape", shape, "it is (channels, height, width)", "take it from the data set")
    plain = folded(model).to(device="cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return plain, torch.zeros(2, *shape)
