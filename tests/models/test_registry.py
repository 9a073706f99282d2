"""Names to networks, and initialisation that depends on the generator alone."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsedp.config import Model
from sparsedp.errors import UsageError
from sparsedp.models import build


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def with_classes(classes: int) -> nn.Module:
    return nn.Linear(2, classes)


def with_num_classes(num_classes: int = 1000, *, width: int = 3) -> nn.Module:
    return nn.Linear(width, num_classes)


def with_shape(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))


def with_nothing() -> nn.Module:
    return nn.Linear(4, 10)


class OwnNetwork(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(5, classes)


finished = nn.Linear(2, 2)


def fails(classes: int) -> nn.Module:
    raise KeyError("boom")


def not_a_model() -> int:
    return 3


HERE = __name__


@pytest.mark.parametrize("name", ["wrn_10_1", "small_cnn", f"{HERE}:with_classes"])
def test_initialisation_is_a_function_of_the_generator(name: str):
    first, second, other = (build(Model(name=name), (3, 16, 16), 5, torch.Generator().manual_seed(s)) for s in (7, 7, 8))
    assert torch.equal(values(first), values(second))
    assert not torch.equal(values(first), values(other))


def test_without_a_generator_two_networks_differ():
    first, second = (build(Model(name="small_cnn"), (1, 28, 28), 10) for _ in range(2))
    assert not torch.equal(values(first), values(second))


def test_the_global_generator_is_neither_used_nor_changed():
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        made.append(values(build(Model(name="wrn_10_1"), (3, 16, 16), 5, torch.Generator().manual_seed(0))))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(made[0], made[1])


def test_two_networks_from_one_generator_differ():
    generator = torch.Generator().manual_seed(0)
    first, second = (build(Model(name="wrn_10_1"), (3, 8, 8), 5, generator) for _ in range(2))
    assert not torch.equal(values(first), values(second))


def test_any_depth_and_width():
    assert build(Model(name="wrn_22_2"), (1, 8, 8), 3)(torch.zeros(1, 1, 8, 8)).shape == (1, 3)


@pytest.mark.parametrize("name", ["resnet18", "wrn_16", "WRN_16_4", ""])
def test_unknown_names_list_the_legal_ones(name: str):
    with pytest.raises(
        UsageError, match=r"choose one of nf_resnet50, norm_cnn, package\.module:function, small_cnn, timm:NAME, wrn_16_4"
    ):
        build(Model(name=name), (3, 32, 32), 10)


@pytest.mark.parametrize(
    ("function", "size"),
    [("with_classes", (6, 2)), ("with_num_classes", (6, 3)), ("with_nothing", (10, 4))],
)
def test_a_function_by_import_path_gets_the_classes_if_it_takes_them(function: str, size: tuple[int, int]):
    assert build(Model(name=f"{HERE}:{function}"), (1, 2, 2), 6).weight.shape == size


def test_a_function_may_ask_for_the_shape_and_a_class_is_called():
    assert build(Model(name=f"{HERE}:with_shape"), (3, 4, 5), 6)[1].weight.shape == (6, 60)
    assert build(Model(name=f"{HERE}:OwnNetwork"), (3, 4, 5), 6).last.weight.shape == (6, 5)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_package_x:model", "cannot be imported"),
        (f"{HERE}:absent", "cannot be imported"),
        (f"{HERE}:finished", "called anew for every run"),
        (f"{HERE}:HERE", "function or a class"),
        (f"{HERE}:fails", r"failed when it was called: KeyError: 'boom'; mend it, or give another --model\.name"),
        (f"{HERE}:not_a_model", r"'int', but a model is a torch\.nn\.Module"),
    ],
)
def test_import_paths_that_cannot_work(path: str, says: str):
    with pytest.raises(UsageError, match=says):
        build(Model(name=path), (3, 8, 8), 10)


@pytest.mark.parametrize(("code", "says"), [("1 +", "SyntaxError"), ("{}['x']", "KeyError: 'x'"), ("raise OSError", "OSError")])
def test_a_module_of_ones_own_that_fails_is_said_in_words(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken_module_of_mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=f"cannot be imported .{says}"):
        build(Model(name="broken_module_of_mine:model"), (3, 8, 8), 10)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A stand-in for timm, and what it was asked for. The real one is in test_timm.py."""
    found: dict[str, object] = {}

    def create_model(name: str, **settings: object) -> nn.Module:
        found.update(name=name, **settings)
        assert settings.get("img_size") != (30, 30), "30 is not a multiple of 16"
        return nn.Linear(3, 4)

    fake = types.ModuleType("timm")
    fake.create_model = create_model
    fake.is_model = lambda name: name in ("resnetv2_50", "vit", "own")
    fake.list_models = lambda pattern: ["resnetv2_50", "resnetv2_101"] if pattern == "*resnetv2*" else []
    known = {"vit": types.SimpleNamespace(fixed_input_size=True), "resnetv2_50": types.SimpleNamespace(fixed_input_size=False)}
    fake.get_pretrained_cfg = known.get
    monkeypatch.setitem(sys.modules, "timm", fake)
    return found


@pytest.mark.parametrize("name", ["resnetv2_50", "own"])
def test_timm_is_asked_for_fresh_weights_of_the_right_size(name: str, asked: dict[str, object]):
    first, second = (build(Model(name=f"timm:{name}"), (1, 32, 32), 4, torch.Generator().manual_seed(0)) for _ in range(2))
    assert asked == {"name": name, "pretrained": False, "num_classes": 4, "in_chans": 1}
    assert torch.equal(values(first), values(second))


def test_an_unknown_model_of_timm_is_refused_with_those_of_like_names(asked: dict[str, object]):
    with pytest.raises(UsageError, match=r"timm:resnetv2'.*close ones are resnetv2_50, resnetv2_101"):
        build(Model(name="timm:resnetv2"), (3, 32, 32), 4)
    assert not asked


def test_timm_is_told_the_size_where_the_model_has_one(asked: dict[str, object]):
    build(Model(name="timm:vit"), (3, 32, 48), 4)
    assert asked["img_size"] == (32, 48)
    with pytest.raises(UsageError, match=r"cannot build 'vit' for images of 3 x 30 x 30 and 4 classes \(30 is not a multiple"):
        build(Model(name="timm:vit"), (3, 30, 30), 4)


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"pip install 'sparsedp\[timm\]'"):
        build(Model(name="timm:resnet18"), (3, 32, 32), 10)


def test_no_classes_is_refused():
    with pytest.raises(UsageError, match="classes is 0"):
        build(Model(name="small_cnn"), (1, 28, 28), 0)


def test_a_stem_of_stride_two_leaves_the_parameters_and_a_quarter_of_the_positions() -> None:
    plain = build(Model(name="wrn_10_1"), (3, 32, 32), 10, torch.Generator().manual_seed(0))
    quick = build(Model(name="wrn_10_1_s2"), (3, 32, 32), 10, torch.Generator().manual_seed(0))
    assert plain.state_dict().keys() == quick.state_dict().keys()
    image = torch.zeros(1, 3, 32, 32)
    assert plain.stem(image).shape == (1, 16, 32, 32)
    assert quick.stem(image).shape == (1, 16, 16, 16)
    assert quick(image).shape == (1, 10)
