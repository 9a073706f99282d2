"""What `--try` says: words into values of the setting's kind, every candidate once, and clear refusals."""

from __future__ import annotations

import pytest

from sparsedp.config import Data, Mechanism, Run, Sparsity
from sparsedp.errors import UsageError
from sparsedp.grid import MOST, grid_of

RUN = Run(mechanism=Mechanism(noise_multiplier=1.0, steps=3), sparsity=Sparsity(prune="random", prune_rate=0.3))


@pytest.mark.parametrize(
    ("said", "values"),
    [
        ("optim.lr=1,2,0.5", (1.0, 2.0, 0.5)),
        ("optim.lr= 1e-3 , 2", (0.001, 2.0)),
        ("optim.warmup=0,10", (0, 10)),
        ("optim.weight-decay=0,0.1", (0.0, 0.1)),
        ("optim.average_decay=none,0.9", (None, 0.9)),
        ("optim.schedule=constant,cosine", ("constant", "cosine")),
        ("optim.name=SGD,Adam", ("SGD", "Adam")),
        ("model.batchnorm=group,freeze", ("group", "freeze")),
        ("mechanism.unit_norm=true,False", (True, False)),
        ("mechanism.clip=0.5,1", (0.5, 1.0)),
        ("sparsity.mask_file=None,a.safetensors", (None, "a.safetensors")),
        ("data.pad=2", (2,)),
    ],
)
def test_words_become_values_of_the_settings_kind(said: str, values: tuple[object, ...]) -> None:
    grid = grid_of(RUN, [said])
    (found,) = grid.values.values()
    assert found == values and [type(v) for v in found] == [type(v) for v in values]


def test_every_combination_is_a_candidate_once_and_nothing_else_changes() -> None:
    grid = grid_of(RUN, ["optim.lr=1,2,3", "optim.momentum=0,0.9", "sparsity.drop=none,magnitude"])
    found = list(grid.candidates(RUN))
    assert len(grid) == len(found) == len(set(found)) == 12
    seen = {(c.optim.lr, c.optim.momentum, c.sparsity.drop) for c in found}
    assert seen == {(lr, m, d) for lr in (1.0, 2.0, 3.0) for m in (0.0, 0.9) for d in ("none", "magnitude")}
    assert all((c.mechanism, c.data, c.model, c.runtime) == (RUN.mechanism, RUN.data, RUN.model, RUN.runtime) for c in found)
    assert all((c.optim.name, c.sparsity.prune_rate) == ("SGD", 0.3) for c in found)
    assert grid.to_json() == {"optim.lr": [1.0, 2.0, 3.0], "optim.momentum": [0.0, 0.9], "sparsity.drop": ["none", "magnitude"]}


REFUSED = {
    "nothing": ([], "--try optim.lr=1,2,4"),
    "no values": (["optim.lr"], "'optim.lr', but it has the form SECTION.FIELD=VALUE,VALUE"),
    "empty": (["optim.lr="], "it has the form"),
    "an empty value": (["optim.lr=1,,2"], "a value of --try optim.lr is ''.*a number"),
    "no number": (["optim.lr=fast"], "'fast', but it must be one of: a number"),
    "not whole": (["optim.warmup=1.5"], "'1.5', but it must be one of: a whole number"),
    "not a number": (["optim.lr=1,nan"], "'nan'"),
    "infinite": (["optim.lr=inf"], "'inf'"),
    "no choice": (["optim.schedule=steep"], "'steep', but it must be one of: constant, cosine, linear"),
    "not yes or no": (["mechanism.unit_norm=1"], "true, false"),
    "a list": (["sparsity.maskable=a"], "lists cannot be tried"),
    "twice a value": (["optim.lr=1,1.0"], "a value is there twice"),
    "twice a setting": (["optim.lr=1", "optim.lr=2"], "optim.lr is tried already"),
    "twice, with a dash": (["optim.weight-decay=0", "optim.weight_decay=1"], "is tried already"),
    "no section": (["speed=1"], "'speed', which is no setting; choose one of data.FIELD, .*runtime.FIELD"),
    "a section alone": (["optim=1"], "which is no setting; choose one of optim.name, optim.lr"),
    "no such field": (["optim.rate=1"], "'optim.rate', which is no setting; .*optim.lr"),
    "a field of a field": (["optim.lr.x=1"], "which is no setting"),
    "steps": (["mechanism.steps=1,2"], "would change what a trial costs.*mechanism.clip"),
    "noise": (["mechanism.noise-multiplier=1,2"], "would change what a trial costs"),
    "batch": (["mechanism.batch_size=1,2"], "would change what a trial costs"),
    "the data": (["data.name=mnist,cifar10"], "which data it reads"),
    "fewer data": (["data.limit=10,20"], "which data it reads"),
    "the key": (["runtime.key=a,b"], "nothing that a score can tell"),
    "too many": ([f"optim.lr={','.join(map(str, range(1, 102)))}", f"optim.warmup={','.join(map(str, range(100)))}"], f"at most {MOST}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_tried_is_refused_in_a_sentence(kind: str) -> None:
    tried, words = REFUSED[kind]
    with pytest.raises(UsageError, match=words) as caught:
        grid_of(RUN, tried)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("tried", "words"),
    [("optim.lr=1,-2", "lr is -2.0"), ("data.views=1,4", "several views need an augmentation"), ("sparsity.prune=none", "prune_rate is 0.3")],
)  # fmt: skip
def test_a_candidate_that_breaks_a_rule_of_its_own_is_refused(tried: str, words: str) -> None:
    grid = grid_of(RUN, [tried])
    with pytest.raises(UsageError, match=words):
        list(grid.candidates(RUN))


def test_of_paths_only_the_ends_are_told() -> None:
    grid = grid_of(RUN, ["sparsity.mask_file=none,/home/jane/oncology/mask.safetensors", "model.name=a/b"])
    assert grid.to_json() == {"sparsity.mask_file": [None, "mask.safetensors"], "model.name": ["a/b"]}


def test_together_settings_can_be_right_that_alone_are_wrong() -> None:
    grid = grid_of(RUN, ["data.views=4", "data.augment=crop,crop-flip"])
    assert [c.data for c in grid.candidates(RUN)] == [Data(views=4, augment="crop"), Data(views=4, augment="crop-flip")]
