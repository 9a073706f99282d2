"""Masks on disk: what was saved comes back, what does not fit is refused by name, what is broken is refused in a sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import nn

from sparsedp import mask_files
from sparsedp.config import Sparsity
from sparsedp.errors import UsageError
from sparsedp.models.cnn import SmallCNN
from sparsedp.pruning import PrivateData, Pruned, prune
from tests.made_up import KEY, build, cross_entropy


def pruned(model: nn.Module, name: Any = "random", **changes: Any) -> Pruned:
    data = PrivateData(num_units=3, read=lambda units: [], loss=cross_entropy)
    return prune(model, Sparsity(prune=name, prune_rate=0.8, **changes), KEY, input_shape=(2, 5, 5), data=data)


@pytest.mark.parametrize("family", ("linear", "mlp", "conv", "standardised"))
@pytest.mark.parametrize(
    "settings",
    (
        {"name": "synflow"}, {"name": "random", "granularity": "filter"}, {"name": "random", "maskable": ("*weight",)},
        {"name": "dp-snip", "snip_noise_multiplier": 3.0, "snip_batch_size": 2}, {"name": "snip-not-private"},
    ),
)  # fmt: skip
def test_what_was_saved_comes_back(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    if family == "mlp" and "maskable" in settings:
        settings = {**settings, "name": "random"}  # the norm's weight is among them
    model = build(family, 0)
    saved = pruned(model, **settings)
    loaded = mask_files.load(mask_files.save(tmp_path / "mask.safetensors", saved), model)
    assert list(loaded.masks) == list(saved.masks)
    assert all(torch.equal(loaded.masks[n], saved.masks[n]) and loaded.masks[n].dtype == torch.bool for n in saved.masks)
    for field in ("event", "criterion", "rate", "granularity", "private", "key_given", "layers", "maskable"):
        assert getattr(loaded, field) == getattr(saved, field), field
    assert loaded.report.to_json() == saved.report.to_json()


def test_a_mask_takes_a_bit_per_weight_and_says_what_it_is(tmp_path: Path) -> None:
    model = SmallCNN((1, 28, 28), 10)
    path = mask_files.save(tmp_path / "mask.safetensors", pruned(model, "snip-not-private"))
    weights = sum(p.numel() for n, p in model.named_parameters() if n.endswith("weight"))
    assert path.stat().st_size < weights / 8 + 1500
    with safe_open(path, framework="numpy") as file:
        described = json.loads(file.metadata()["sparsedp-mask"])
        assert file.get_tensor("conv1.weight").dtype == np.uint8
    assert described["private"] is False and described["criterion"] == "snip-not-private" and described["rate"] == 0.8
    assert described["ledger"][0]["event"] == {"type": "NonPrivateDpEvent"}
    assert [row["name"] for row in described["layers"]] == [
        "conv1.weight",
        "conv2.weight",
        "hidden.weight",
        "classifier.weight",
    ]


def test_bits_are_in_row_order_on_a_kernel_that_is_not_square(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    masks = {"weight": torch.tensor([[1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)}
    made = pruned(model, maskable=("weight",))
    path = mask_files.save(tmp_path / "m", Pruned(**{**made.__dict__, "masks": masks}))
    with safe_open(path, framework="numpy") as file:
        assert file.get_tensor("weight").tolist() == [0b10000000, 0b01110000]
    assert torch.equal(mask_files.load(path, model).masks["weight"], masks["weight"])


def test_a_mask_for_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = mask_files.save(tmp_path / "mask", pruned(build("mlp", 0)))
    with pytest.raises(UsageError, match=r"1\.weight is \(6, 50\)"):
        mask_files.load(path, build("linear", 0))
    with pytest.raises(UsageError, match=r"'1\.weight'"):
        mask_files.load(path, nn.Linear(50, 3))
    wider = build("mlp", 0)
    wider[1], wider[4] = nn.Linear(50, 7), nn.Linear(7, 3)
    with pytest.raises(UsageError, match=r"1\.weight is \(6, 50\)"):
        mask_files.load(path, wider)
    deeper = build("mlp", 0)
    deeper.append(nn.Linear(3, 3))
    with pytest.raises(UsageError, match=r"no mask for '5\.weight'"):
        mask_files.load(path, deeper)
    frozen = build("mlp", 0)
    frozen[1].weight.requires_grad_(False)
    with pytest.raises(UsageError, match=r"'1\.weight'"):
        mask_files.load(path, frozen)


def test_missing_foreign_and_unwritable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no mask file"):
        mask_files.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="There is no mask file"):
        mask_files.load(tmp_path)
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a mask")
    for name in ("model.safetensors", "empty", "text"):
        with pytest.raises(UsageError, match="not a whole mask file"):
            mask_files.load(tmp_path / name)
    with pytest.raises(UsageError):
        mask_files.save(tmp_path / "no" / "folder" / "mask", pruned(build("linear", 0)))


def rewrite(path: Path, tensors: dict[str, Any], described: Any) -> None:
    text = json.dumps(described)
    save_file(tensors, path, metadata={"sparsedp-mask": text, "sha256": mask_files.digest(text, tensors)})


def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = mask_files.save(tmp_path_factory.mktemp("masks") / "mask", pruned(build("conv", 0)))
    return path, path.read_bytes()


@given(seed=st.integers(0, 10**9))
def test_damaged_files_are_refused(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path, good = whole(tmp_path_factory)
    rng = random.Random(seed)
    for _ in range(8):
        blob = bytearray(good)
        match rng.randrange(3):
            case 0:
                blob = blob[: rng.randrange(len(blob))]
            case 1:
                blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
            case _:
                place = rng.randrange(len(blob))
                blob[place : place + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
        path.write_bytes(blob)
        try:
            loaded = mask_files.load(path)
        except UsageError as error:
            assert "\n" not in str(error)
        else:
            original = pruned(build("conv", 0))  # damage to a blank or to an unread field only
            assert all(torch.equal(m, original.masks[n]) for n, m in loaded.masks.items()) and loaded.rate == original.rate


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "BF16"])
def test_numbers_of_a_type_that_numpy_lacks_are_refused(kind: str, tmp_path: Path) -> None:
    header = json.dumps(
        {"0.weight": {"dtype": kind, "shape": [4], "data_offsets": [0, 4 * (2 if kind == "BF16" else 1)]}}
    ).encode()
    (tmp_path / "m").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8 if kind == "BF16" else 4))
    with pytest.raises(UsageError, match=r"is not a whole mask file .*sparsedp prune'\.$"):
        mask_files.load(tmp_path / "m")


REPLACED = {
    "version": 1, "criterion": None, "private": 1, "key_given": 0, "rate": 1.5, "granularity": "row", "maskable": "weight", "ledger": [],
    "layers": [{"name": "1.weight", "shape": [3, 50], "by_filter": 0}],
}  # fmt: skip


@pytest.mark.parametrize("field", REPLACED)
@pytest.mark.parametrize("missing", (True, False))
def test_every_field_is_checked(field: str, missing: bool, tmp_path: Path) -> None:
    path = mask_files.save(tmp_path / "mask", pruned(build("linear", 0)))
    with safe_open(path, framework="numpy") as file:
        described = json.loads(file.metadata()["sparsedp-mask"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    rewrite(path, tensors, described)
    mask_files.load(path)
    described.pop(field)
    if not missing:
        described[field] = REPLACED[field]
    rewrite(path, tensors, described)
    with pytest.raises(UsageError, match="not a whole mask file"):
        mask_files.load(path)


@pytest.mark.parametrize("shape", ([3, 10**9, 10**9], [3, -50], [3, 40], [], [3.0, 50], [0, 50]))
def test_shapes_in_a_file_cannot_exhaust_the_memory(shape: list[Any], tmp_path: Path) -> None:
    path = mask_files.save(tmp_path / "mask", pruned(build("linear", 0)))
    with safe_open(path, framework="numpy") as file:
        described = json.loads(file.metadata()["sparsedp-mask"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    described["layers"][0]["shape"] = shape
    rewrite(path, tensors, described)
    with pytest.raises(UsageError, match="not a whole mask file"):
        mask_files.load(path)
