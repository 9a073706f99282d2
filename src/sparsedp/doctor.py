"""Why is accuracy low? A look at a run's private data from outside the guarantee, for the operator's eyes only."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp import disk, keys, mask_files
from sparsedp.assembly import Parts
from sparsedp.beginning import step_settings
from sparsedp.config import Run
from sparsedp.dp.clipping import Loss, Rows, reference, selected
from sparsedp.dp.masks import Masks, participating
from sparsedp.dp.randomness import Key, uniform
from sparsedp.dp.selection import select
from sparsedp.dp.values import public
from sparsedp.environment import pick_device
from sparsedp.errors import require
from sparsedp.finished import finished_run, refuse_code
from sparsedp.planning import Budget, budget
from sparsedp.prune_run import before_training


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was seen on a random sample of training examples, at the final weights."""

    examples: int
    clipped_fraction: float
    """Share of examples whose gradient is longer than the clipping norm."""
    median_norm: float
    signal: float
    """Length of the average clipped gradient."""
    noise: float
    """Expected length of the noise on the average of one step."""
    train_accuracy: float
    evaluation_accuracy: float | None
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, stamped."""
        return {"stamp": "NOT PRIVATE: computed from training data without noise; do not publish", **asdict(self)}

    def text(self) -> str:
        """For a screen."""
        rows = [
            "NOT PRIVATE: computed from training data without noise; for the operator only",
            f"examples looked at   {self.examples}",
            f"clipped              {100 * self.clipped_fraction:.1f} % (median gradient norm {self.median_norm:.3g})",
            f"signal to noise      {self.signal / self.noise if self.noise else math.inf:.3g} per step (average clipped gradient {self.signal:.3g} long, noise of "
            f"one step {self.noise:.3g})",
            f"accuracy             {100 * self.train_accuracy:.1f} % on training images"
            + ("" if self.evaluation_accuracy is None else f", {100 * self.evaluation_accuracy:.1f} % on evaluation images"),
        ]
        return "\n".join([*rows, *(f"- {line}" for line in self.advice)])


def examine(path: Path, moved: str | None, examples: int, named: str | None = None) -> Findings:
    """Look at a finished run. `named`: its model, if that is code which may be run."""
    require(examples >= 2, "examples", examples, "a sample has at least two", "256 is enough")
    refuse_code(path, named)
    run, dataset, spec, model = finished_run(path, moved, average=False)
    accuracy = disk.read_number(path / "public" / "summary.json", "the run's summary", "accuracy", or_null=True)
    device = pick_device(run.runtime.device)
    plan = budget(run, dataset.train.num_units, before_training(run))
    from sparsedp.assembly import multilabel_loss, single_label_loss

    loss = multilabel_loss if dataset.multilabel else single_label_loss
    parts = Parts(run, dataset, spec, device, model.to(device), loss, ())
    key = keys.fresh()
    count = min(examples, dataset.train.num_units)
    units = torch.argsort(uniform(key, dataset.train.num_units, "doctor"))[:count].sort().values
    rows = parts.source(key, plain=True).read(units, 0)
    masks = _masks(path, run, plan, model, key)
    norms, average = _gradients(model, loss, rows, masks, run.mechanism.clip)
    dimensions = selected(participating(model), masks)
    noise = plan.noise_multiplier * run.mechanism.clip / plan.batch_size * math.sqrt(dimensions)
    found = Findings(
        examples=count, clipped_fraction=float((norms > run.mechanism.clip).double().mean()), median_norm=float(norms.median()),
        signal=average, noise=noise, train_accuracy=_accuracy(model, rows), evaluation_accuracy=accuracy, advice=(),
    )  # fmt: skip
    found = Findings(**{**asdict(found), "advice": _advice(found, run.optim.lr)})
    disk.write_json(disk.make_folder(path / "private", 0o700) / "doctor.json", found.to_json(), mode=0o600)
    return found


def _masks(path: Path, run: Run, plan: Budget, model: nn.Module, key: Key) -> Masks:
    """The coordinates that a step of the run would take: gradients are clipped, and noised, on those alone."""
    kept = path / "public" / "mask.safetensors"
    settings = step_settings(run, plan, mask_files.load(kept, model) if kept.exists() else None, model)
    weights = public(participating(model), "the final weights are released")
    return select(settings.layers, settings.drop, settings.drop_rate, settings.pruned, weights, key, 0)


def _gradients(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> tuple[Tensor, float]:
    """Every unit's gradient norm, and the norm of the average clipped gradient."""
    norms, total = [], {name: torch.zeros_like(p) for name, p in participating(model).items()}
    for inputs, targets in rows.of_each_unit():
        one = Rows(inputs, targets, torch.zeros(len(inputs), dtype=torch.int64), 1)
        own = reference(model, loss, one, masks, float("inf"))
        norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in own.values()))
        norms.append(norm)
        for name, g in own.items():
            total[name] += g * min(1.0, clip / max(norm, 1e-30))
    length = math.sqrt(sum(float(g.double().pow(2).sum()) for g in total.values()))
    return torch.tensor(norms), length / rows.units


def _accuracy(model: nn.Module, rows: Rows) -> float:
    with torch.no_grad():
        output = model(rows.inputs)
    guess = (output > 0).float() if rows.targets.ndim == 2 else output.argmax(1)
    return float((guess == rows.targets).double().mean())


def _advice(found: Findings, lr: float) -> tuple[str, ...]:
    said = []
    ratio = found.signal / found.noise if found.noise else math.inf
    if found.clipped_fraction < 0.2:
        said.append(
            f"few examples are clipped: a smaller clip (about {found.median_norm:.2g}) lowers the noise at no cost in signal."
        )
    if ratio < 0.05:
        said.append(
            "noise drowns the signal: a larger batch, fewer steps, or fewer trained parameters (head, norm-bias, pruning) help most."
        )
    if found.evaluation_accuracy is not None and found.train_accuracy - found.evaluation_accuracy > 0.1:
        said.append(
            "training images are known better than others: rare under privacy; check that evaluation data are of the same kind."
        )
    if ratio > 0.5:
        said.append(f"there is signal left: more steps, or a learning rate above {lr:g}, may help.")
    return tuple(said) or ("nothing stands out; try a larger batch with the same epsilon, or an average over more steps.",)
