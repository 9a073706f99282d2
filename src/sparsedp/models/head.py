"""The classifier of a network: which module it is, and how to compute once what comes before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.errors import UsageError


def classifier_name(model: nn.Module) -> str:
    """The path of the classifier: `model.classifier` if that is a linear layer, timm's own answer, else the last linear layer."""
    names = {id(module): name for name, module in model.named_modules()}
    own = getattr(model, "classifier", None)
    if isinstance(own, nn.Linear):
        return names[id(own)]
    ask = getattr(model, "get_classifier", None)
    answer = ask() if callable(ask) else None
    if isinstance(answer, nn.Linear) and id(answer) in names:
        return names[id(answer)]
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UsageError(
            f"the model {type(model).__name__} has no linear layer, so it is not known which part of it is the classifier; "
            "name the parameters that train by patterns instead."
        )
    return linear[-1]


def split_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(features, head), such that head(features(x)) is model(x). Both share the model's modules; the model stays as it is.

    With everything but the head frozen, and in evaluation mode, features can be computed once and kept.
    """
    name = classifier_name(model)
    head = model.get_submodule(name)
    return (Features(model, name), head) if name else (nn.Identity(), head)


class _Reached(Exception):
    """The forward pass has come to the head; the rest of it is not needed."""


class Features(nn.Module):
    """What the head of a model is given. The first call checks that the head's output is the model's output."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name
        self.checked = False

    def forward(self, *inputs: Any) -> Tensor:
        head = self.model.get_submodule(self.name)
        seen: list[Tensor] = []
        handle = head.register_forward_pre_hook(self._stop(seen))
        try:
            output = self.model(*inputs)
        except _Reached:
            output = None
        finally:
            handle.remove()
        if not self.checked:
            self._check(head, seen, output)
        return seen[0]

    def _stop(self, seen: list[Tensor]) -> Any:
        def keep(_head: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen.append(given[0])
            if self.checked:
                raise _Reached

        return keep

    def _check(self, head: nn.Module, seen: list[Tensor], output: Any) -> None:
        with torch.no_grad():
            same = len(seen) == 1 and isinstance(output, Tensor) and torch.equal(head(seen[0]), output)
        if not same:
            raise UsageError(
                f"the layer {self.name!r} is not the last thing that {type(self.model).__name__} computes, so features before it "
                "cannot be kept; train by patterns of parameter names instead of 'head'."
            )
        self.checked = True
