"""Files that hold tensors: masks, checkpoints, weights in both formats. Checksums are made right again after the damage."""

from __future__ import annotations

import functools
import hashlib
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from sparsedp import checkpoint, mask_files, state
from sparsedp.config import Sparsity
from sparsedp.dp.ledger import Ledger, training_event
from sparsedp.dp.masks import maskable_layers
from sparsedp.keys import chosen
from sparsedp.models.weights import load_weights, read_state
from sparsedp.pruning import PrivateData, prune
from sparsedp.rundir import RunDir
from tests.fuzz import pickles
from tests.fuzz.containers import block, header_of, odd_block, zipped
from tests.fuzz.harness import Target
from tests.fuzz.mutation import damaged
from tests.fuzz.trees import RAW, changed, written
from tests.made_up import cross_entropy


def model() -> nn.Module:
    """A small network with a convolution, a norm and a classifier."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 3))


@functools.cache
def own() -> nn.Module:
    return model()


def search_row(shape: Any) -> dict[str, Any]:
    """The best of some trials, as a ledger has it."""
    return {"type": "RepeatAndSelectDpEvent", "event": {"type": "NoOpDpEvent"}, "mean": 10.0, "shape": shape}


EVENTS = [
    {"type": "NoOpDpEvent"}, {"type": "NonPrivateDpEvent"}, {"type": "GaussianDpEvent", "noise_multiplier": 1.0},
    {"type": "GaussianDpEvent", "noise_multiplier": 10**400}, {"type": "ComposedDpEvent", "events": []},
    {"type": "SelfComposedDpEvent", "event": {"type": "NoOpDpEvent"}, "count": 10**30},
    {"type": "PoissonSampledDpEvent", "sampling_probability": 0.1, "event": {"type": "GaussianDpEvent", "noise_multiplier": 1.0}},
    search_row(1.0), search_row("infinity"), search_row(10**400),
    functools.reduce(lambda event, _: {"type": "SelfComposedDpEvent", "event": event, "count": 1}, range(400), {"type": "NoOpDpEvent"}),
]  # fmt: skip
MASK_WORDS = (
    *EVENTS, "0.weight", "3.weight", "weight", "filter", "random", [3, 1, 2, 2], [3, 12], [2**62, 4], [0], [1] * 9, [2**40], [[2]], True, 0.999,
)  # fmt: skip


@functools.cache
def masks() -> list[tuple[str, dict[str, np.ndarray]]]:
    """What whole mask files say and hold."""
    made = []
    nothing = PrivateData(num_units=3, read=lambda units: [], loss=cross_entropy)
    for settings in ({}, {"granularity": "filter"}, {"maskable": ("*weight",)}):
        pruned = prune(
            model(), Sparsity(prune="random", prune_rate=0.6, **settings), chosen("x"), input_shape=(1, 3, 3), data=nothing
        )
        packed = {name: np.packbits(mask.numpy().reshape(-1)) for name, mask in pruned.masks.items()}
        made.append((json.dumps(mask_files._describe(pruned)), packed))
    return made


def make_mask(rng: Random) -> bytes:
    described, packed = rng.choice(masks())
    packed = dict(packed)
    if rng.random() < 0.8:
        described = written(rng, changed(rng, described, MASK_WORDS)).decode("utf-8", "surrogatepass")
    elif rng.random() < 0.3:
        described = rng.choice(RAW).decode("latin1")
    if rng.random() < 0.4:
        name = rng.choice(list(packed))
        odd = (
            np.zeros_like(packed[name]),
            np.full_like(packed[name], 255),
            packed[name][:-1],
            packed[name][None],
            packed[name].astype(np.int64),
        )
        packed[rng.choice((name, "0.bias", "x"))] = rng.choice(odd)
    header, body = signed(described, packed)
    if rng.random() < 0.2:
        return odd_block(rng, header, body)
    told = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(told).to_bytes(8, "little") + told + body


def signed(described: str, packed: dict[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """The header and the body of a mask file, its checksum right."""
    of = hashlib.sha256(described.encode("utf-8", "surrogatepass"))
    for name in sorted(packed):
        of.update(f"\0{name}\0{packed[name].dtype}\0{packed[name].shape}\0".encode() + packed[name].tobytes())
    return header_of(packed, {mask_files.FORMAT: described, "sha256": of.hexdigest()})


def read_mask(content: bytes, place: Path) -> None:
    path = place / "mask.safetensors"
    path.write_bytes(content)
    found = mask_files.load(path)
    assert all(mask.dtype == torch.bool and bool(mask.any()) for mask in found.masks.values()) and 0 <= found.rate < 1
    Ledger().append("mask", found.event).to_json()
    found = mask_files.load(path, own())
    layers = {layer.name: layer for layer in maskable_layers(own(), found.granularity, found.maskable)}
    for name, mask in found.masks.items():
        shape = layers[name].shape
        assert tuple(mask.shape) == (shape[:1] if layers[name].by_filter else shape)


def warm_mask(place: Path) -> None:
    for made in masks():
        header, body = signed(*made)
        read_mask(block(json.dumps(header).encode(), body), place)


def learner() -> state.Learner:
    """All that changes in a run, new."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    return state.Learner(network, AveragedModel(network), optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))


def step(it: state.Learner) -> None:
    """One step of the optimiser and the schedule, as after a checkpoint."""
    for parameter in it.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    it.optimizer.step()
    it.scheduler.step()


HERE = {"torch": "2", "threads": 1}


@functools.cache
def kept() -> bytes:
    """A whole checkpoint of a run that took five steps."""
    it = learner()
    step(it)
    progress = vars(state.Progress(taken=5, epoch=0, extra=0, seconds=1.5))
    return checkpoint.encode({**it.state(), "progress": progress, "run": "00ff", "bits_depend_on": HERE})


START = len(checkpoint.MAGIC) + 32
NESTED = (
    {"tensor": "0"}, {"tensor": "99"}, {"tensor": 0}, {"dict": []}, {"dict": [[{"tensor": "0"}, 1]]}, {"list": []}, {"tuple": [1]}, {"list": 5}, {"dict": 5},
    {"dict": [[{"list": []}, 1]]}, {"dict": [["a"]]}, {"object": 1}, {"list": ["a", "b"]}, {"dict": "ab"}, {"dict": [["lr", "x"]]},
    functools.reduce(lambda value, _: {"list": [value]}, range(300), 0),
)  # fmt: skip


def make_checkpoint(rng: Random) -> bytes:
    whole = kept()
    kind = rng.random()
    if kind < 0.1:
        return damaged(rng, (whole,), head=START)
    content = whole[START:]
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    if kind < 0.75:
        nesting = written(rng, changed(rng, header["__metadata__"]["nesting"], NESTED))
        header["__metadata__"]["nesting"] = nesting.decode("utf-8", "surrogatepass")
    elif kind < 0.8:
        header["__metadata__"]["nesting"] = rng.choice(RAW).decode("latin1")
    if kind > 0.7:
        content = odd_block(rng, header, body)
    else:
        told = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
        content = len(told).to_bytes(8, "little") + told + body
    return checkpoint.MAGIC + hashlib.sha256(content).digest() + content


def read_checkpoint(content: bytes, place: Path) -> None:
    assert isinstance(checkpoint.decode(content, "it"), dict)


LEDGER = Ledger().append("train", training_event(0.1, 1.0), 6)


def read_taken_up(content: bytes, place: Path) -> None:
    """A run that is resumed: what it took up must be fit to go on with."""
    folder = RunDir(place)
    folder.states.mkdir(parents=True, exist_ok=True)
    (folder.private / "id").write_text("00ff")
    (folder.states / "step-00000005.state").write_bytes(content)
    it = learner()
    found = state.take_up(folder, it, LEDGER, HERE)
    progress = found.progress
    assert all(type(n) is int and n >= 0 for n in (progress.taken, progress.epoch, progress.extra)) and progress.seconds >= 0
    assert found.charged >= progress.taken and state.trained_steps(found.ledger) >= 6
    step(it)


def warm_taken_up(place: Path) -> None:
    read_taken_up(kept(), place)


def weights() -> dict[str, Tensor]:
    return model().state_dict()


@functools.cache
def plain_weights() -> tuple[dict[str, Any], bytes]:
    return header_of({name: tensor.numpy() for name, tensor in weights().items()}, {"format": "pt"})


def make_safetensors(rng: Random) -> bytes:
    return odd_block(rng, *plain_weights())


def read_weights(content: bytes, place: Path) -> None:
    """Read, then loaded: the model is as good as before, or has exactly what the file holds."""
    path = place / "weights"
    path.write_bytes(content)
    held = read_state(path)
    fresh = model()
    report = load_weights(fresh, path)
    now = fresh.state_dict()
    assert all(bool(tensor.isfinite().all()) for tensor in now.values())
    assert all(torch.equal(now[name], held[name].to(now[name].dtype)) for name in report.loaded)


def warm_weights(place: Path) -> None:
    header, body = plain_weights()
    read_weights(block(json.dumps(header).encode(), body), place)


@functools.cache
def saved_by_torch() -> list[tuple[str, dict[str, bytes], bytes]]:
    """The members of zip archives that torch.save wrote, and the same in the old format."""
    import zipfile

    made = []
    prefixed = {f"module.{name}": tensor for name, tensor in weights().items()}
    odd = {
        "model": {**weights(), "more": torch.zeros(2, dtype=torch.bfloat16), "quantised": torch.zeros(2).to_sparse()},
        "epoch": 3,
    }
    for content in (weights(), {"state_dict": prefixed}, odd):
        new, old = io.BytesIO(), io.BytesIO()
        torch.save(content, new)
        torch.save(content, old, _use_new_zipfile_serialization=False)
        with zipfile.ZipFile(new) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        made.append((next(name for name in members if name.endswith("data.pkl")), members, old.getvalue()))
    return made


TORCH_WORDS = (
    *pickles.WORDS, b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"ctorch\nLongStorage\n", b"ctorch._utils\n_rebuild_parameter\n",
    b"ctorch._utils\n_rebuild_sparse_tensor\n", b"ctorch\ndevice\n", b"ccollections\nOrderedDict\n", b"X\x03\x00\x00\x00cpu", b"J\xff\xff\xff\x7f", b"Q",
    b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n", b"ctorch.serialization\n_get_layout\n", b"ctorch\nSize\n", b"ctorch._tensor\n_rebuild_from_type_v2\n",
)  # fmt: skip


def make_state_dict(rng: Random) -> bytes:
    name, members, old = rng.choice(saved_by_torch())
    kind = rng.random()
    if kind < 0.2:
        return damaged(rng, (old,), TORCH_WORDS, head=400)
    if kind < 0.35:
        return pickles.hostile(rng, (old,))
    if kind < 0.45:
        return damaged(rng, (zipped(None, members),), (b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04"), head=400)
    changed_members = dict(members)
    if kind < 0.9:
        pickled = members[name]
        bad = damaged(rng, (pickled,), TORCH_WORDS, head=len(pickled))
        changed_members[name] = bad if rng.random() < 0.6 else pickles.hostile(rng, (pickled,))
    else:
        other = rng.choice(list(members))
        changed_members[other] = damaged(rng, (members[other],)) if members[other] else b"x"
    return zipped(rng, changed_members)


def warm(place: Path) -> None:
    """What torch imports late: on loading, and on naming a tensor in an error."""
    for _, members, old in saved_by_torch():
        for content in (zipped(None, members), old):
            (place / "weights").write_bytes(content)
            read_state(place / "weights") if b"quantised" not in content else repr(torch.zeros(1))


TARGETS = (
    Target("mask", "mask files", make_mask, read_mask, warm=warm_mask),
    Target("checkpoint", "checkpoints", make_checkpoint, read_checkpoint, warm=lambda place: read_checkpoint(kept(), place)),
    Target("resume", "checkpoints, taken up by a run", make_checkpoint, read_taken_up, warm=warm_taken_up),
    Target("safetensors", "weights as safetensors", make_safetensors, read_weights, warm=warm_weights),
    Target("state-dict", "weights as torch.save wrote them", make_state_dict, read_weights, warm=warm),
)
