"""Files for others: plain keys in safetensors, the same bytes every time, and programs that compute the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sparsedp.config import Model
from sparsedp.errors import UsageError
from sparsedp.models import WSConv2d, build
from sparsedp.models.export import describe, export_onnx, export_torch, folded, read_metadata, save_safetensors

SHAPE = (3, 16, 16)


def network(name: str = "wrn_10_1") -> nn.Module:
    made = build(Model(name=name), SHAPE, 4, torch.Generator().manual_seed(0))
    if name == "wrn_10_1":
        made.stem.prune(torch.rand(made.stem.weight.shape) < 0.5)
        made.groups[1][0].conv1.prune(torch.arange(32) % 3 > 0)
    return made


def test_keys_are_the_modules_own_and_every_tensor_is_there(tmp_path: Path):
    model = network().to(memory_format=torch.channels_last)
    save_safetensors(model, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert set(loaded) == set(model.state_dict())
    assert all(torch.equal(loaded[n], t) and loaded[n].dtype == t.dtype for n, t in model.state_dict().items())
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_file_of_a_users_network_loads_without_sparsedp(tmp_path: Path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    save_safetensors(model, tmp_path / "w", describe("own", 2, (3, 2, 2), None))
    code = (
        "import sys, torch; from safetensors.torch import load_file; from torch import nn\n"
        "m = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)); m.load_state_dict(load_file(sys.argv[1]))\n"
        "assert 'sparsedp' not in sys.modules; print(m(torch.ones(1, 3, 2, 2))[0, 1].item())"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "w")], capture_output=True, text=True, check=True)
    assert float(run.stdout) == pytest.approx(model(torch.ones(1, 3, 2, 2))[0, 1].item(), rel=1e-6)


def test_metadata_is_text_and_the_same_model_gives_the_same_bytes(tmp_path: Path):
    model = network()
    facts = describe("wrn_10_1", ["cat", "dög"], SHAPE, ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
    for order, name in ((list(facts), "a"), (sorted(facts, reverse=True), "b")):
        save_safetensors(model, tmp_path / name, {key: facts[key] for key in order})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    read = read_metadata(tmp_path / "a")
    assert read == facts
    assert {key: json.loads(value) for key, value in read.items()} == {
        "name": "wrn_10_1",
        "classes": ["cat", "dög"],
        "shape": [3, 16, 16],
        "normalisation": [[0.5, 0.5, 0.5], [0.25, 0.25, 0.25]],
    }
    save_safetensors(model, tmp_path / "c")
    assert read_metadata(tmp_path / "c") == {}


def test_metadata_must_be_text(tmp_path: Path):
    with pytest.raises(UsageError, match="metadata"):
        save_safetensors(network(), tmp_path / "w", {"classes": 10})  # type: ignore[dict-item]
    assert not (tmp_path / "w").exists()


def test_tied_weights_are_there_under_each_name(tmp_path: Path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    model, other = Tied(), Tied()
    save_safetensors(model, tmp_path / "w")
    other.load_state_dict(load_file(tmp_path / "w"))
    assert torch.equal(other.b.weight, model.a.weight)


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be written"):
        save_safetensors(network(), tmp_path / "absent" / "w")


def test_folding_keeps_the_function_and_the_original():
    model = network().train()
    keys = list(model.state_dict())
    plain = folded(model)
    images = torch.randn(2, *SHAPE)
    assert not any(isinstance(m, WSConv2d) for m in plain.modules())
    torch.testing.assert_close(plain(images), model(images))
    assert model.training
    assert list(model.state_dict()) == keys
    assert not plain.training
    assert type(folded(WSConv2d(3, 4, 3))).__name__ == "SameConv2d"


@pytest.mark.parametrize("name", ["wrn_10_1", "small_cnn"])
def test_torch_export_computes_the_same_for_any_batch(tmp_path: Path, name: str):
    model = network(name)
    export_torch(model, SHAPE, tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2").module()
    for batch in (1, 5):
        images = torch.randn(batch, *SHAPE)
        torch.testing.assert_close(program(images), model(images))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wrn_10_1", "small_cnn"])
def test_onnx_computes_the_same_for_any_batch(tmp_path: Path, name: str):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model = network(name)
    export_onnx(model, SHAPE, tmp_path / "m.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    program = reference.ReferenceEvaluator(onnx.load(tmp_path / "m.onnx"))
    for batch in (1, 3):
        images = torch.randn(batch, *SHAPE)
        (out,) = program.run(["logits"], {"images": images.numpy()})
        np.testing.assert_allclose(out, model(images).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_without_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'sparsedp\[onnx\]'"):
        export_onnx(network(), SHAPE, tmp_path / "m.onnx")
