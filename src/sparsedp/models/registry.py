"""From a name to a network: our own by name, timm's by `timm:NAME`, anyone's by `package.module:function_or_class`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparsedp.errors import UsageError, missing_extra, out_of_memory, require, unknown, wrong
from sparsedp.models.cnn import NormCNN, SmallCNN
from sparsedp.models.nf_resnet import NFResNet50
from sparsedp.models.wrn import WideResNet

if TYPE_CHECKING:
    from sparsedp.config import Model

Shape = tuple[int, int, int]
Factory = Callable[[Shape, int], nn.Module]


def _wrn(depth: int, width: int, shape: Shape, classes: int, stem_stride: int = 1) -> nn.Module:
    return WideResNet(depth, width, classes, shape[0], stem_stride)


OWN: dict[str, Factory] = {
    "small_cnn": SmallCNN,
    "norm_cnn": NormCNN,
    "wrn_16_4": partial(_wrn, 16, 4),
    "wrn_28_10": partial(_wrn, 28, 10),
    "wrn_40_4": partial(_wrn, 40, 4),
    "nf_resnet50": lambda shape, classes: NFResNet50(classes, shape[0]),
}


def build(model: Model, shape: Shape, classes: int, generator: torch.Generator | None = None) -> nn.Module:
    """The network that `model` names, for images of `shape` (channels, height, width), freshly initialised.

    Initial values are a function of the generator alone; without one they come from the operating system's randomness.
    Torch's global generator is neither consumed nor changed. Weights, BatchNorm and what trains are `prepare`'s.
    """
    require(classes >= 1, "classes", classes, "a classifier has at least one output", "check the data set")
    factory = _factory(model.name)
    with _drawing_from(generator):
        network = factory(shape, classes)
    if not isinstance(network, nn.Module):
        raise wrong(f"what {model.name} returned", type(network).__name__, "a model is a torch.nn.Module", "return one")
    return network


def _factory(name: str) -> Factory:
    if name in OWN:
        return OWN[name]
    if numbers := re.fullmatch(r"wrn_(\d{1,4})_(\d{1,3})(_s2)?", name, re.ASCII):
        return partial(_wrn, int(numbers[1]), int(numbers[2]), stem_stride=2 if numbers[3] else 1)
    if name.startswith("timm:"):
        return partial(_timm, name.removeprefix("timm:"))
    if ":" in name:
        return partial(_imported, name)
    raise unknown("model", name, [*OWN, "wrn_DEPTH_WIDTH", "wrn_DEPTH_WIDTH_s2", "timm:NAME", "package.module:function"])


@contextmanager
def _drawing_from(generator: torch.Generator | None) -> Iterator[None]:
    """Torch's default CPU generator stands in for `generator`, and is as before afterwards."""
    source = generator if generator is not None else torch.Generator()
    if generator is None:
        source.seed()
    seed = int(torch.randint(2**63 - 1, (), generator=source, device=source.device))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _imported(path: str, shape: Shape, classes: int) -> nn.Module:
    """Call what `path` names with those of `classes` and `shape` that it takes by name."""
    module_name, _, attribute = path.partition(":")
    try:
        factory: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except Exception as error:  # it is code of the user's own, which may fail in any way
        why = error if isinstance(error, ImportError | AttributeError) else _in_words(error)
        raise UsageError(
            f"model is {path!r}, but it cannot be imported ({why}); give package.module:function, with the package "
            "installed or in the current folder."
        ) from error
    if isinstance(factory, nn.Module) or not callable(factory):
        kind = type(factory).__name__
        raise wrong(
            f"model {path}",
            kind,
            "it must be a function or a class, called anew for every run",
            "name one that returns a module",
        )
    takes = _keywords(factory)
    offered = {"classes": classes, "num_classes": classes, "shape": shape}
    if "classes" in takes:
        del offered["num_classes"]
    try:
        return factory(**{key: value for key, value in offered.items() if key in takes})
    except UsageError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise UsageError(f"model is {path!r}, but it failed when it was called: {_in_words(error)}; mend it, or give another "
                         "--model.name.") from error  # fmt: skip


def _in_words(error: Exception) -> str:
    """An error of the user's own code: its kind, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def _keywords(factory: Callable[..., Any]) -> set[str]:
    """The names of the arguments that can be given by keyword."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # written in C, without a signature
        return set()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _timm(name: str, shape: Shape, classes: int) -> nn.Module:
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise missing_extra("timm", "timm", f"the model timm:{name}") from error
    if not timm.is_model(name):
        close = ", ".join(timm.list_models(f"*{name}*")[:5])
        remedy = f"close ones are {close}" if close else "see timm.list_models()"
        raise wrong("model", f"timm:{name}", "timm has no such model", remedy)
    settings: dict[str, Any] = {"num_classes": classes, "in_chans": shape[0]}
    if getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False):  # such as transformers with a position per patch
        settings["img_size"] = shape[1:]
    try:
        return timm.create_model(name, pretrained=False, **settings)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"timm cannot build {name!r} for images of {' x '.join(map(str, shape))} and {classes} classes "
            f"({error or type(error).__name__}); choose another model or size of image."
        ) from error
