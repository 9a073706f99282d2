"""A finished run, read from its public folder: its configuration, its data and its model. The folder may come from anybody."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from sparsedp import data, disk, mask_files, models, rundir, statement
from sparsedp.apply_masks import prepare_for
from sparsedp.config import Model, Run
from sparsedp.data import DataSet
from sparsedp.data.augment import Augmentation
from sparsedp.errors import UsageError, require, told
from sparsedp.models.export import read_metadata
from sparsedp.models.weights import read_state

LARGEST = 4096  # pixels along a side of an image


def finished_run(path: Path, moved: str | None, average: bool) -> tuple[Run, DataSet, Augmentation, nn.Module]:
    """A finished run's configuration, data and model."""
    run, model, classes, shape = load_model(path, average)
    if moved is not None:
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, dir=moved))
    dataset = data.load(run.data)
    require(
        len(dataset.classes) == classes, "the number of classes", len(dataset.classes), f"the run was trained on {classes}",
        "point --dir to the data of the run",
    )  # fmt: skip
    return run, dataset, Augmentation(run.data.augment, dataset.normalisation, run.data.pad), model


def refuse_code(path: Path, named: str | None) -> None:
    """A folder may come from anybody: what it names as its model's function is called only if the user names it too."""
    name = rundir.run_of(disk.read_json(path / "public" / "config.json", "the run's configuration")).model.name
    if ":" in name and not name.startswith("timm:") and name != named:
        raise UsageError(
            f"The run in {path} has the model {told(name)}, which is code of its own; if you trust it, name it with --model."
        )


def load_model(path: Path, average: bool) -> tuple[Run, nn.Module, int, tuple[int, int, int]]:
    """A finished run's configuration and model, and its numbers of classes and shape, from public/ alone."""
    public = path / "public"
    run = rundir.recorded_run(path)
    weights = public / ("average.safetensors" if average else "model.safetensors")
    if average and (public / "model.safetensors").exists() and not weights.exists():
        raise UsageError(
            f"The run in {path} kept no moving average of its weights (optim.average_decay is none); leave out --average."
        )
    if not weights.exists():
        raise UsageError(f"{path} has no {weights.name}: the run is not finished; finish it with 'sparsedp train'.")
    statement.check(public)
    facts = facts_of(weights)
    classes, shape = len(facts["classes"]), (facts["shape"][0], facts["shape"][1], facts["shape"][2])
    asked = dataclasses.replace(run.model, weights=None)
    try:
        seen = augmentation_of(run, facts).out_shape(shape)
        _check_size(asked, seen, classes, weights)
        model, _ = models.prepare(asked, seen, classes)
        if (public / "mask.safetensors").exists():
            prepare_for(model, mask_files.load(public / "mask.safetensors", model).masks, run.sparsity.pruned_weights)
        model.load_state_dict(read_state(weights))
    except UsageError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise UsageError(
            f"The model in {public} is not the one that its config.json describes ({type(error).__name__}); restore the files."
        ) from error
    return run, model.eval(), classes, shape


def _check_size(asked: Model, shape: tuple[int, int, int], classes: int, weights: Path) -> None:
    """Refuse a configuration whose model is larger than the file of its weights, before any memory is taken for it."""
    if ":" in asked.name:  # code of somebody else's, which may need real tensors
        return
    with torch.device("meta"):
        needed = sum(parameter.numel() for parameter in models.build(asked, shape, classes).parameters())
    if needed > weights.stat().st_size:
        raise UsageError(f"{weights} has not the {needed} weights of the model {asked.name!r}; restore the run's files.")


def facts_of(weights: Path) -> dict[str, Any]:
    """What a weights file says about itself."""
    try:
        facts = {name: json.loads(value) for name, value in read_metadata(weights).items()}
        _check_facts(facts)
    except (OSError, ValueError, SafetensorError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{weights} cannot be read ({type(error).__name__}); restore it, or train again.") from error
    return facts


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError at what no run writes: classes without a name, images without a size."""
    channels, *sides = facts["shape"]
    named = isinstance(facts["classes"], list) and facts["classes"] and all(isinstance(name, str) for name in facts["classes"])
    sized = channels in (1, 3) and len(sides) == 2 and all(type(side) is int and 1 <= side <= LARGEST for side in sides)
    numbers = [facts["normalisation"][name] for name in ("mean", "std")]
    scaled = all(len(row) == channels and all(type(n) in (int, float) and abs(n) < 1e6 for n in row) for row in numbers)
    if not (named and sized and scaled and all(deviation > 0 for deviation in numbers[1])):
        raise ValueError("facts")


def augmentation_of(run: Run, facts: Mapping[str, Any]) -> Augmentation:
    """How the run's images were shown to its model, from what its weights file says."""
    shown = facts["normalisation"]
    return Augmentation(run.data.augment, data.Normalisation(tuple(shown["mean"]), tuple(shown["std"])), run.data.pad)
