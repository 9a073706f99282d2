"""Real models of timm, from their names to private steps. `make timm` runs this where timm is; elsewhere it is skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sparsedp.config import Data, Mechanism, Model, Optim, Run, Runtime
from sparsedp.dp.clipping import Rows, reference
from sparsedp.dp.masks import maskable_layers, participating
from sparsedp.engines import Plan, choose_engine, explain
from sparsedp.errors import UsageError
from sparsedp.linearise import Linearised
from sparsedp.models import build, classifier_name, prepare, split_head
from sparsedp.rundir import RunDir
from sparsedp.training import Result, train
from tests.data.pictures import made_up, save_folder
from tests.made_up import cross_entropy

timm = pytest.importorskip("timm")

SHAPE = (3, 32, 32)
CLASSES = ("bird", "cat", "dog")
KEPT = [
    ("mobilenetv3_small_050", "group"),
    ("mobilenetv3_small_050", "freeze"),
    ("convnext_atto", "refuse"),
    ("vit_tiny_patch16_224", "refuse"),
    ("efficientnet_b0", "group"),
    ("resnet18", "group"),
    ("resnet18", "freeze"),
    ("nf_resnet26", "refuse"),
]
"""Names, and what is done about BatchNorm."""
NAMES = sorted({name for name, _ in KEPT})
GATED = {
    "mobilenetv3_small_050": r"blocks\.0\.0\.se\b.* uses \S*mul",
    "efficientnet_b0": r"blocks\.0\.0\.se\b.* uses \S*mul",
    "vit_tiny_patch16_224": r"blocks\.0\.attn\b.* uses scaled_dot_product_attention",
}
"""Models that multiply activations with each other: in which module, and how."""


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def how(name: str) -> str:
    """What must be done about the BatchNorm of a model."""
    return next(batchnorm for known, batchnorm in KEPT if known == name)


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    def length(of: Callable[[str], Tensor]) -> float:
        return float(torch.stack([of(name).double().norm() for name in expected]).norm())

    assert found.keys() == expected.keys()
    return length(lambda name: found[name].double() - expected[name].double()) / length(expected.__getitem__)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, split in enumerate(("train", "test")):
        save_folder(tmp_path / "images" / split, *made_up(12, classes=len(CLASSES), seed=seed), CLASSES)
    return tmp_path / "images"


def trained(folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, Plan]:
    """Two private steps, and the plan of the engine that served them."""
    plans: dict[int, Plan] = {}
    write = RunDir.write_plans

    def keep(self: RunDir, some: Any) -> None:
        plans.update(some)
        write(self, some)

    monkeypatch.setattr(RunDir, "write_plans", keep)
    run = Run(
        data=Data(name="folder", dir=str(folder), size=32),
        model=model,
        mechanism=Mechanism(noise_multiplier=1.0, steps=2, batch_size=6, delta=1e-2),
        optim=Optim(lr=0.1),
        runtime=Runtime(device="cpu", threads=1, key="known to all"),
    )
    return train(run, folder.parent / "run"), plans[0]


@pytest.mark.parametrize("name", [name for name, batchnorm in KEPT if batchnorm == "group"])
def test_batchnorm_is_refused_with_the_ways_out(name: str) -> None:
    with pytest.raises(
        UsageError,
        match=r"mixes the examples of a batch; convert it \(--model.batchnorm group, or models.convert_batchnorm\) or freeze it",
    ):
        prepare(Model(name=f"timm:{name}"), SHAPE, 3)


@pytest.mark.parametrize(("name", "batchnorm"), KEPT)
def test_private_steps_by_an_engine_that_agrees_with_the_reference(
    name: str, batchnorm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    asked = Model(name=f"timm:{name}", batchnorm=batchnorm)
    result, plan = trained(folder, asked, monkeypatch)
    assert result.summary["steps"] == 2
    assert all(bool(t.isfinite().all()) for t in result.model.state_dict().values())
    model, _ = prepare(asked, SHAPE, len(CLASSES), seeded())
    images = torch.randn(4, *SHAPE, generator=seeded()).contiguous(memory_format=torch.channels_last)
    rows = Rows.make(images, torch.tensor([0, 1, 2, 2]))
    found = explain(model, cross_entropy, rows, plan=plan)
    assert {line.parameter for line in found.lines} == participating(model).keys()
    chosen = choose_engine("auto", model, cross_entropy, rows, plan=plan)
    assert chosen.name == found.engine == "fast"
    difference = relative(chosen(model, cross_entropy, rows, {}, 1.0), reference(model, cross_entropy, rows, {}, 1.0))
    record_property("engine", chosen.name)
    record_property("difference", difference)
    record_property("torch.func", sum("torch.func" in line.rule for line in found.lines))
    assert difference < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_timm_itself_with_another_head(name: str, tmp_path: Path) -> None:
    sizes = {"img_size": SHAPE[1:]} if name.startswith("vit") else {}
    public = timm.create_model(name, num_classes=7, **sizes)
    save_file({key: t.contiguous() for key, t in public.state_dict().items()}, tmp_path / "public.safetensors")
    asked = Model(name=f"timm:{name}", weights=str(tmp_path / "public.safetensors"), batchnorm=how(name), train="head")
    model, done = prepare(asked, SHAPE, 3, seeded())
    head = classifier_name(model)
    own = {f"{head}.weight", f"{head}.bias"}
    assert done.weights is not None
    assert set(done.weights.replaced) == set(done.trainable.trained) == own
    assert model.get_submodule(head) is model.get_classifier()
    given, expected = dict(model.named_parameters()), dict(public.named_parameters())
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[key], expected[key]) for key in given.keys() - own)
    features, last = split_head(model.eval())
    images = torch.randn(2, *SHAPE, generator=seeded())
    assert torch.equal(last(features(images)), model(images))


@pytest.mark.parametrize("name", NAMES)
def test_synflow_scores_it_or_names_the_module_that_is_not_linear(name: str) -> None:
    model, _ = prepare(Model(name=f"timm:{name}", batchnorm=how(name)), SHAPE, 3, seeded())
    layers = maskable_layers(model)
    weights = {layer.name: participating(model)[layer.name].abs() for layer in layers}
    network = Linearised(model, layers, SHAPE)
    if name in GATED:
        with pytest.raises(UsageError, match=f"SynFlow cannot linearise module {GATED[name]}"):
            network(weights)
    else:
        scores = network(weights)
        assert all(bool((s >= 0).all() and s.isfinite().all() and s.any()) for s in scores.values())


def test_a_grey_image_of_another_size_and_a_size_that_no_patch_divides() -> None:
    model = build(Model(name="timm:vit_tiny_patch16_224"), (1, 48, 32), 5, seeded())
    assert isinstance(model, nn.Module)
    assert model(torch.zeros(2, 1, 48, 32)).shape == (2, 5)
    with pytest.raises(UsageError, match=r"VisionTransformer cannot process images of 3 x 28 x 28 \(.*divisible by patch size"):
        prepare(Model(name="timm:vit_tiny_patch16_224"), (3, 28, 28), 5, seeded())


def test_an_unknown_name_brings_close_ones() -> None:
    with pytest.raises(UsageError, match="close ones are .*resnet"):
        build(Model(name="timm:resnet1"), SHAPE, 5)
