"""What of a network trains: all, the head, norms and biases, or parameters by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from sparsedp.errors import UsageError, wrong
from sparsedp.models.head import classifier_name
from sparsedp.models.layers import WSConv2d


@dataclass(frozen=True)
class TrainableReport:
    """Names of the parameters that train and of those that do not, and how many numbers the first are."""

    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    count: int

    def __str__(self) -> str:
        tensors = len(self.trained) + len(self.frozen)
        return f"{self.count:,} parameters in {len(self.trained)} of {tensors} tensors train"


def set_trainable(model: nn.Module, spec: str) -> TrainableReport:
    """Freeze what `spec` leaves out; what the user froze stays frozen.

    `all` freezes nothing. `head` leaves the classifier. `norm-bias` leaves the parameters of normalisation (the gains of
    weight standardisation too), every bias, and the classifier, which for a new task is new. Anything else is a list of
    shell patterns of parameter names, separated by commas, each of which must match something.
    """
    parameters = dict(model.named_parameters())
    chosen = _chosen(model, spec, list(parameters))
    for name, parameter in parameters.items():
        if name not in chosen:
            parameter.requires_grad_(False)
    trained = tuple(name for name, p in parameters.items() if p.requires_grad)
    if not trained:
        raise wrong("train", spec, "it leaves no parameter that trains (what was frozen before stays frozen)", "choose more")
    frozen = tuple(name for name in parameters if name not in trained)
    return TrainableReport(trained, frozen, sum(parameters[name].numel() for name in trained))


def _chosen(model: nn.Module, spec: str, names: Sequence[str]) -> set[str]:
    if spec == "all":
        return set(names)
    if spec == "head":
        return _below(model, classifier_name(model))
    if spec == "norm-bias":
        return _norms_and_biases(model) | _below(model, classifier_name(model))
    patterns = [pattern.strip() for pattern in spec.split(",") if pattern.strip()]
    idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if idle or not patterns:
        raise UsageError(
            f"train is {spec!r}, but {', '.join(map(repr, idle)) or 'it'} matches no parameter; use all, head, norm-bias, or "
            f"shell patterns of names such as {names[0]!r}."
        )
    return {name for name in names if any(fnmatchcase(name, p) for p in patterns)}


def _below(model: nn.Module, path: str) -> set[str]:
    """Names of a submodule's parameters, as the model lists them (a tied parameter is listed once)."""
    own = {id(p) for p in model.get_submodule(path).parameters()}
    return {name for name, p in model.named_parameters() if id(p) in own}


def _norms_and_biases(model: nn.Module) -> set[str]:
    wanted: set[int] = set()
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            wanted.update(id(p) for p in module.parameters(recurse=False))
        if isinstance(module, WSConv2d):
            wanted.add(id(module.gain))
        wanted.update(id(p) for name, p in module.named_parameters(recurse=False) if name == "bias" or name.endswith("_bias"))
    return {name for name, p in model.named_parameters() if id(p) in wanted}
