"""What becomes of pruned weights: `keep` leaves them where they are, `zero` takes them out of the function.

Under `keep` nothing is done to the model: the masks go to the private step, which never moves a pruned weight. Under `zero`
a plain layer's weight is set to zero there (and stays, for the same reason); a weight-standardised convolution gets its
`kept` buffer, because a zero before standardisation is not one after it; a parametrised weight gets one more parametrisation
at the end of its chain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparsedp.dp.masks import Masks, expand, participating, raw_weight
from sparsedp.errors import UsageError, one_of, together, wrong
from sparsedp.models.layers import SameConv2d

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLAIN_FORWARDS = {getattr(kind, "forward") for kind in (*_CONVOLUTIONS, nn.Linear, SameConv2d)}  # noqa: B009
_PLAIN_INNER = {kind._conv_forward for kind in _CONVOLUTIONS}


class Kept(nn.Module):
    """The last parametrisation of a pruned weight: exact zeros where it was pruned."""

    kept: Tensor

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept.detach().clone())

    def forward(self, weight: Tensor) -> Tensor:
        return torch.where(expand(self.kept, weight.shape), weight, weight.new_zeros(()))


def prepare_for(model: nn.Module, masks: Masks, pruned_weights: str) -> nn.Module:
    """Make the model what it is under these masks, in place. A fresh model needs it before it loads a pruned state_dict."""
    one_of("pruned_weights", pruned_weights, ("keep", "zero"))
    check_fit(model, masks)
    if pruned_weights == "zero":
        _zero(model, beside(masks, model))
    return model


def beside(masks: Masks, model: nn.Module) -> dict[str, Tensor]:
    """The masks, each on the device of its parameter."""
    trained = participating(model)
    return {name: mask.to(trained[name].device) for name, mask in masks.items()}


def check_fit(model: nn.Module, masks: Masks) -> None:
    """Refuse masks for parameters that the model has not, or of another shape, by name."""
    trained = participating(model)
    for name, mask in masks.items():
        if name not in trained:
            raise UsageError(
                f"The mask is for {name!r}, which is no trained parameter of this model; make a mask for this model."
            )
        shape = tuple(trained[name].shape)
        if tuple(mask.shape) not in (shape, shape[:1]):
            raise wrong(
                f"the mask's shape for {name}", tuple(mask.shape), f"the parameter takes {shape} or {shape[:1]}",
                "make the mask for this model",
            )  # fmt: skip


def _zero(model: nn.Module, masks: Masks) -> None:
    names = {id(p): name for name, p in participating(model).items() if name in masks}
    users = [(module, names[id(raw_weight(module))]) for module in model.modules() if id(raw_weight(module)) in names]
    _refuse_hidden(users)
    for module, name in users:
        if callable(getattr(module, "effective_weight", None)):
            module.prune(masks[name])  # type: ignore[operator]
        elif parametrize.is_parametrized(module, "weight"):
            parametrize.register_parametrization(module, "weight", Kept(masks[name]))
    standardised = {name for module, name in users if callable(getattr(module, "effective_weight", None))}
    with torch.no_grad():
        for name, parameter in participating(model).items():
            if name in masks and name not in standardised:
                parameter.masked_fill_(~expand(masks[name], parameter.shape), 0.0)


def _refuse_hidden(users: Sequence[tuple[nn.Module, str]]) -> None:
    """A layer with a forward pass of its own may compute its weight there, where no mask of ours reaches it."""
    problems = []
    for module, name in users:
        inner = getattr(type(module), "_conv_forward", None)
        plain = type(module).forward in _PLAIN_FORWARDS and (inner is None or inner in _PLAIN_INNER)
        parametrised = parametrize.is_parametrized(module, "weight")
        if not plain and not parametrised and not callable(getattr(module, "effective_weight", None)):
            problems.append(
                f"pruned_weights 'zero' cannot be promised for {name}, because {type(module).__name__} has a forward pass of its own; "
                "use 'keep', or give it methods prune(kept) and effective_weight() as WSConv2d has them."
            )
    if problems:
        raise together("Some pruned weights cannot be taken out:", problems)
