"""The linearised copy of a model, for SynFlow: every weight by its magnitude, no activation, no normalisation, no bias.

The copy runs the model's own forward pass on an activation of the type `Flow`, which reinterprets every operator that
touches it (`flow_operators`), so functional activations, residual branches and users' own modules need no rewriting. A
convolution or linear layer is applied with the raw weight that a mask would act on, also where the layer standardises or
otherwise reparametrises it first. Max-pooling stays what it is: on non-negative flows it is positively homogeneous, so that
the conservation law holds with it as with averaging, and it is what the network does.

Numbers cannot overflow: an activation carries a binary exponent beside its tensor, and is brought back to size whenever it
strays. Additions align exponents, so that all scores come out up to *one* common factor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sparsedp.dp.masks import Layer, raw_weight
from sparsedp.errors import UsageError, require
from sparsedp.flow_operators import CARDINAL_BIAS, CONTRACTS, FACTS, JOINS, MERGES, PASSES, SCALES, SHAPES

STRAY = 16  # an activation is rescaled when its largest entry leaves [2^-16, 2^16]
Observe = Callable[[str, Tensor, int], None]
"""(layer, what it put out, the dimension of its output channels) at every use of a maskable layer."""


class Linearised:
    """Call it with non-negative weights by layer name; it returns weight * dR/dweight, up to one common factor.

    R is the sum of all outputs for one all-ones input of `input_shape` (without the batch dimension).
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], input_shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        require(len(input_shape) > 0, "input_shape", tuple(input_shape), "one input has at least one dimension", "(3, 32, 32)")
        self._model = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
        parameters = dict(self._model.named_parameters())
        self._names = {id(parameters[layer.name]): layer.name for layer in layers}
        self._shape, self._dtype = tuple(input_shape), dtype
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._inside: list[tuple[str, nn.Module]] = []
        self._weights: Mapping[str, Tensor] = {}
        self._observe: Observe | None = None
        for name, module in self._model.named_modules():
            module.register_forward_pre_hook(lambda m, _, name=name: self._inside.append((name, m)))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)
            if callable(getattr(module, "effective_weight", None)):
                module.effective_weight = lambda m=module: m.weight  # spare the standardisation, whose result is not used

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The SynFlow scores of all layers."""
        leaves = {name: w.detach().to(self._device, self._dtype).requires_grad_() for name, w in weights.items()}
        total = self._total(self.outputs(leaves))
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        idle = [name for name, g in zip(leaves, gradients, strict=True) if g is None]
        if idle:
            raise UsageError(
                f"SynFlow cannot score {idle[0]}, because the linearised network does not pass through it; leave it out of "
                "the maskable parameters, or prune by another criterion."
            )
        return {name: g.mul_(leaves[name].detach()) for name, g in zip(leaves, gradients, strict=True)}

    def outputs(self, weights: Mapping[str, Tensor], observe: Observe | None = None) -> list[Flow]:
        """All outputs of the linearised network for the all-ones input."""
        self._weights, self._observe = weights, observe
        ones = torch.ones(1, *self._shape, dtype=self._dtype, device=self._device)
        try:
            found = self._model(Flow.of(ones, 0, self))
        finally:
            self._inside.clear()
            self._weights, self._observe = {}, None
        outputs = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Flow)]
        if not outputs:
            raise UsageError("SynFlow found no output that depends on the model's input; prune by another criterion.")
        return outputs

    @property
    def where(self) -> str:
        """The module that is running, for error messages."""
        if not self._inside:
            return "the model"
        name, module = self._inside[-1]
        return f"module {name or 'at the top'} ({type(module).__name__})"

    def magnitude(self, constant: Any, like: Tensor | None = None) -> Any:
        """|constant|; a maskable weight by the value it has in this pass. `like`: it is the weight of a layer of that shape."""
        if not isinstance(constant, Tensor):
            return abs(constant)
        name = self.layer_of(constant, like is not None)
        if name is not None:
            return self._weights[name]
        return constant.detach().to(self._dtype).abs()

    def layer_of(self, constant: Tensor, as_weight: bool) -> str | None:
        """The maskable layer whose raw weight this is, or, within the running module, is made from."""
        if id(constant) in self._names:
            return self._names[id(constant)]
        raw = raw_weight(self._inside[-1][1]) if as_weight and self._inside else None
        if raw is not None and raw.shape == constant.shape:
            return self._names.get(id(raw))
        return None

    def seen(self, constant: Any, value: Tensor, channel: int) -> None:
        """Tell the observer what a maskable layer put out."""
        name = self.layer_of(constant, as_weight=True) if self._observe and isinstance(constant, Tensor) else None
        if name is not None and self._observe is not None:
            self._observe(name, value, channel)

    def _leave(self) -> None:
        self._inside.pop()

    @staticmethod
    def _total(outputs: Sequence[Flow]) -> Tensor:
        highest = max(out.exponent for out in outputs)
        return torch.stack([out.value.sum() * 2.0 ** (out.exponent - highest) for out in outputs]).sum()


class Flow(Tensor):
    """A non-negative activation of a linearised network, truly `value` times 2**exponent. Operators on it are reinterpreted."""

    value: Tensor
    exponent: int
    network: Linearised

    @staticmethod
    def of(value: Tensor, exponent: int, network: Linearised) -> Flow:
        """The activation `value` times 2**exponent."""
        flow: Flow = Tensor._make_subclass(Flow, value.detach())
        flow.value, flow.exponent, flow.network = value, exponent, network
        return flow

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        flow = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Flow))
        for kinds, rule in _RULES:
            if name in kinds:
                return rule(flow.network, name, func, args, kwargs)
        raise _refused(flow.network, name, "an operator that it does not know to be linear or an activation")


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property: Tensor.shape and the like
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return {"fn": "max_pool", "boolean_dispatch": "max_pool"}.get(name, name)


def _refused(network: Linearised, operator: str, why: str) -> UsageError:
    return UsageError(
        f"SynFlow cannot linearise {network.where}: it uses {operator}, {why}; prune by 'random' or 'dp-snip', or give a "
        "criterion of your own."
    )


def _balanced(value: Tensor, exponent: int, network: Linearised) -> Flow:
    """The same activation, brought back to size if its largest entry strayed."""
    peak = float(value.detach().amax()) if value.numel() else 0.0
    if not math.isfinite(peak):
        raise _refused(network, "weights", "of which some are not finite or too large for the number format")
    shift = math.frexp(peak)[1] if peak > 0 else 0
    if abs(shift) <= STRAY:
        return Flow.of(value, exponent, network)
    return Flow.of(value * 2.0**-shift, exponent + shift, network)


def _plain(tree: Any) -> Any:
    return tree_map_only(Flow, lambda flow: flow.value, tree)


def _passes(network: Linearised, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    flow = args[0] if args else kwargs["input"]
    if not isinstance(flow, Flow):
        raise _refused(network, name, "with an activation where a constant belongs")
    return flow


def _shapes(network: Linearised, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    flow = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Flow))
    found = func(*_plain(args), **_plain(kwargs))

    def wrapped(t: Tensor) -> Tensor:
        return _balanced(t, flow.exponent, network) if t.is_floating_point() else t

    return tree_map_only(Tensor, wrapped, found)


def _pads(network: Linearised, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Padding with a constant is padding with zero: a constant is a bias."""
    flow, pads, *rest = args
    mode = kwargs.get("mode", rest[0] if rest else "constant")
    return Flow.of(torch.nn.functional.pad(flow.value, pads, mode), flow.exponent, network)


def _merges(network: Linearised, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Sums; a difference too, as all coefficients count by their magnitude. Constants are biases."""
    terms = [term for term in args[:2] if isinstance(term, Flow)]
    if "other" in kwargs and isinstance(kwargs["other"], Flow):
        terms.append(kwargs["other"])
    weight = abs(kwargs.get("alpha", 1))
    if len(terms) == 1:
        constant = next((c for c in args[:2] if isinstance(c, Tensor) and not isinstance(c, Flow)), None)
        shape = terms[0].shape if constant is None else torch.broadcast_shapes(terms[0].shape, constant.shape)
        found = Flow.of(terms[0].value.expand(shape), terms[0].exponent, network)
    else:
        first, second = terms
        highest = max(first.exponent, second.exponent)
        left, right = (term.value * 2.0 ** (term.exponent - highest) for term in terms)
        found = _balanced(left + weight * right, highest, network)
    return _stored(name, args[0], found)


def _stored(name: str, target: Any, found: Flow) -> Flow:
    """In-place operators change the activation they were called on."""
    if isinstance(target, Flow) and name.endswith("_") and (not name.startswith("__") or name.startswith("__i")):
        target.value, target.exponent = found.value, found.exponent
        return target
    return found


def _joins(network: Linearised, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    parts = list(args[0] if args else kwargs["tensors"])
    highest = max(part.exponent for part in parts if isinstance(part, Flow))
    values = [
        part.value * 2.0 ** (part.exponent - highest)
        if isinstance(part, Flow)
        else torch.zeros_like(part, dtype=network._dtype)
        for part in parts
    ]
    rest = {key: value for key, value in kwargs.items() if key != "tensors"}
    return Flow.of(func(values, *args[1:], **rest), highest, network)


def _scales(network: Linearised, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    left, right = (*args, *kwargs.values())[:2]
    if isinstance(left, Flow) and isinstance(right, Flow):
        raise _refused(network, name, "of two activations, so its output is not linear in its input")
    flow, constant = (left, right) if isinstance(left, Flow) else (right, left)
    if flow is right and "div" in name:
        raise _refused(network, name, "by an activation")
    factor = network.magnitude(constant)
    value = flow.value / factor if "div" in name else flow.value * factor
    return _stored(name, left, _balanced(value, flow.exponent, network))


def _contracts(network: Linearised, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Flow)]
    if len(operands) > 1:
        raise _refused(network, name, "of two activations, so its output is not linear in its input")
    flow = operands[0]
    if name not in CARDINAL_BIAS:
        plain = tree_map_only(Tensor, lambda t: t.value if isinstance(t, Flow) else network.magnitude(t), (args, kwargs))
        return _balanced(func(*plain[0], **plain[1]), flow.exponent, network)
    given = dict(zip(("input", "weight", "bias"), args[:3], strict=False)) | kwargs
    weight = given["weight"]
    if given["input"] is not flow:
        raise _refused(network, name, "with an activation where the weight belongs")
    rest = {key: value for key, value in kwargs.items() if key not in ("input", "weight", "bias")}
    used = network.magnitude(weight, like=weight)
    found = func(flow.value, used, None, *args[3:], **rest)
    network.seen(weight, found, -1 if name == "linear" else found.ndim - (used.ndim - 1))
    return _balanced(found, flow.exponent, network)


_RULES: tuple[tuple[frozenset[str], Callable[..., Any]], ...] = (
    (PASSES, _passes), (SHAPES, _shapes), (frozenset({"pad"}), _pads), (MERGES, _merges), (JOINS, _joins),
    (SCALES, _scales), (CONTRACTS, _contracts),
)  # fmt: skip
