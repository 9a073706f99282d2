"""Real data through the shipped recipes: killed and taken up again, a run ends with the bytes of one that was left alone.

SPARSEDP_TEST_CIFAR names a folder that holds cifar-10-batches-bin; without it, only MNIST is tried.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparsedp import data
from sparsedp.config import Data, Run
from sparsedp.recipes import recipe
from tests.data.pictures import save_folder
from tests.whole_runs import die_after, go, in_a_child, same_public

CIFAR = os.environ.get("SPARSEDP_TEST_CIFAR")
needs_cifar = pytest.mark.skipif(not CIFAR, reason="SPARSEDP_TEST_CIFAR names no folder with CIFAR-10")
STEPS, KILLED_AT = 6, 4


def short(name: str, **where: object) -> Run:
    """A recipe of six steps, with a checkpoint after every second and a key that is known."""
    run = recipe(name)
    return replace(
        run,
        data=replace(run.data, **where),
        mechanism=replace(run.mechanism, steps=STEPS, batch_size=min(run.mechanism.batch_size, 512)),
        runtime=replace(run.runtime, key="known to all", checkpoint_every=2, evaluate_every=0),
    )


def as_folder(place: Path, count: int = 600) -> Path:
    """The first images of CIFAR-10 as PNG files: place/train/CLASS, place/test/CLASS."""
    whole = data.load(Data(name="cifar10", dir=CIFAR))
    for split, images in (("train", whole.train), ("test", whole.evaluation)):
        assert images is not None
        batch = images.read(torch.arange(count))
        save_folder(place / split, batch.pixels.numpy(), batch.labels.numpy(), tuple(whole.classes))
    return place


@pytest.mark.release
@pytest.mark.parametrize(
    "name", ["mnist", pytest.param("cifar10", marks=needs_cifar), pytest.param("folder", marks=needs_cifar)]
)
def test_a_run_that_was_killed_ends_as_one_that_was_not(name: str, tmp_path: Path) -> None:
    if name == "folder":
        run = short(name, dir=str(as_folder(tmp_path / "images")), size=32)
    else:
        run = short(name, dir=CIFAR if name == "cifar10" else None)
    go(run, tmp_path / "whole")
    how = in_a_child(lambda: go(run, tmp_path / "killed", stop=die_after(KILLED_AT)))
    assert os.WIFSIGNALED(how)
    go(run, tmp_path / "killed")
    same_public(tmp_path / "whole", tmp_path / "killed")
