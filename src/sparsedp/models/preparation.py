"""Whether a model can be trained privately, and making one ready: built, loaded, without BatchNorm, frozen where asked.

Privacy counts examples one by one, so no example may change what the network computes for another, and nothing that is
learnt from examples may by-pass clipping and noise. `check_model` looks for all known ways to break that, by kind and by
trial, before anything is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_leaves

from sparsedp.errors import UsageError, one_of, together
from sparsedp.models.batchnorm import BatchNormReport, convert_batchnorm, freeze_batchnorm
from sparsedp.models.registry import Shape, build
from sparsedp.models.trainable import TrainableReport, set_trainable
from sparsedp.models.weights import LoadReport, load_weights

if TYPE_CHECKING:
    from sparsedp.config import Model


@dataclass(frozen=True)
class Preparation:
    """What was done to a network before training, for the screen and the model card."""

    weights: LoadReport | None
    batchnorm: BatchNormReport | None
    trainable: TrainableReport

    def lines(self) -> list[str]:
        """One sentence for each thing that was done."""
        return [str(part) for part in (self.weights, self.batchnorm, self.trainable) if part is not None]


def prepare(
    model: Model, shape: Shape, classes: int, generator: torch.Generator | None = None
) -> tuple[nn.Module, Preparation]:
    """Build the network, load its weights, deal with BatchNorm, freeze what does not train, and check the result."""
    network = build(model, shape, classes, generator)
    loaded = None if model.weights is None else load_weights(network, model.weights)
    normed = None
    if one_of("batchnorm", model.batchnorm, ("refuse", "group", "freeze")) != "refuse":
        network, normed = (convert_batchnorm if model.batchnorm == "group" else freeze_batchnorm)(network)
    trained = set_trainable(network, model.train)
    check_model(network, shape)
    return network, Preparation(loaded, normed, trained)


def check_model(model: nn.Module, shape: Shape | None = None) -> None:
    """Raise one error that names everything about the model that private training cannot have.

    With the shape of an image, the model is also tried out on random images, in training mode: no row may change another
    row's output, and no buffer may change.
    """
    problems = [problem for path, module in model.named_modules() for problem in _problems(_named(path), module)]
    if not any(p.requires_grad for p in model.parameters()):
        problems.append("no parameter trains: all are frozen, or there are none; unfreeze some, as with train='all'.")
    if shape is not None and not problems:
        problems = list(_trial(model, shape))
    if problems:
        raise together("The model cannot be trained privately as it is:", problems)


def _problems(path: str, module: nn.Module) -> Iterator[str]:
    kind = type(module).__name__
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        yield (
            f"{path} is a {kind}, which mixes the examples of a batch; convert it (--model.batchnorm group, "
            "or models.convert_batchnorm) or freeze it (--model.batchnorm freeze)."
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats and module.training:
        yield f"{path} is a {kind} that collects statistics of the examples without noise; set track_running_stats=False."
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        yield f"{path} is a {kind} that has no size yet; run the model once on a blank image."
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and parameter.is_complex():
            yield f"{path}: {name} is complex, and clipping and noise are for real numbers; hold its two parts as real parameters."
    if _has_spectral_norm(module):
        yield f"{path} has spectral_norm, which changes a buffer at every pass; remove it, or use weight standardisation."


def _named(path: str) -> str:
    return f"layer {path!r}" if path else "the model"


def _has_spectral_norm(module: nn.Module) -> bool:
    if any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
        return True
    return type(module).__name__ == "_SpectralNorm"  # the parametrisation, a module of its own


def _trial(model: nn.Module, shape: Shape) -> Iterator[str]:
    """Two passes that differ in the last of three rows only: nothing may change for the others. Leaves the model as it was."""
    own = torch.Generator().manual_seed(0)
    first = torch.randn(3, *shape, generator=own)
    second = torch.cat([first[:2], torch.randn(1, *shape, generator=own)])
    device = next(model.parameters()).device
    modes = {module: module.training for module in model.modules()}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    try:
        one, other = (_outputs(model, images.to(device)) for images in (first, second))
        changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    except Exception as error:  # of whatever kind: the model may be code of the user's own
        if isinstance(error, UsageError):
            raise
        size, said = " x ".join(map(str, shape)), f"{type(error).__name__}: {error}".rstrip(": ")
        raise UsageError(
            f"{type(model).__name__} cannot process images of {size} ({said}); choose another model or size of image."
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    for name in changed:
        yield f"the buffer {name} changes in a forward pass, without clipping and noise; remove or freeze what updates it."
    if not _same(one, other, ""):
        path = next(path for path in one if not _same(one, other, path))
        where = f"{path}, a {type(model.get_submodule(path)).__name__}," if path else "the model"
        yield f"{where} lets one example of a batch change the output for another; replace it by something that does not."


def _outputs(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """What every module gave for the first two rows, in the order in which they finished, dropout drawn alike."""
    given: dict[str, Tensor] = {}

    def recorder(path: str) -> Callable[..., None]:
        def record(_module: nn.Module, _inputs: object, output: object) -> None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 3:
                    given.setdefault(path, leaf[:2].detach().clone())

        return record

    handles = [module.register_forward_hook(recorder(path)) for path, module in model.named_modules()]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(0)
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return given


def _same(one: dict[str, Tensor], other: dict[str, Tensor], path: str) -> bool:
    if path not in one or path not in other:
        return True
    return one[path].shape == other[path].shape and torch.allclose(one[path], other[path], rtol=1e-4, atol=1e-5, equal_nan=True)
