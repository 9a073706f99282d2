"""How a forward pass uses its parameters: operators are intercepted, not modules.

A use is one call of a known operator whose weight and bias are parameters, or are computed from parameters alone (weight
standardisation, parametrisations, views). During an ordinary forward pass every use runs on detached weights, and a tap on its
output catches the output's gradient in the one backward pass. Autograd therefore computes no weight gradients, and whatever
parameter the loss still reaches afterwards has been used in some other way: that is how nothing is ever left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsedp.engines.operators import OPERATORS, Call
from sparsedp.engines.precision import made_in_full
from sparsedp.engines.units import Units, channels_last


@dataclass(eq=False)
class Use:
    """One call of an operator with trained weights; `gradient` arrives in the backward pass."""

    key: str
    call: Call
    weight: Tensor | None
    """As given, with the graph that computed it from `leaves`; None where it does not train."""
    bias: Tensor | None
    leaves: tuple[str, ...]
    """The parameters that weight and bias are, or are computed from."""
    multiple: int
    """Leading entries of the input per row."""
    output: Tensor | None = None
    output_version: int = 0
    vectors: tuple[Tensor, Tensor] | None = None
    """A norm's gradients per unit by weight and bias, where its own backward pass found them."""

    def intact_output(self) -> Tensor | None:
        """The output, unless something wrote into it since."""
        return self.output if self.output is not None and self.output._version == self.output_version else None


OnGradient = Callable[[Use, Tensor, Tensor], None]
"""(use, the operator's input, its output's gradient)"""


class _Tap(torch.autograd.Function):
    """The identity, in place; its backward pass hands the gradient over."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, source: Tensor, use: Use, receive: OnGradient) -> Tensor:
        ctx.mark_dirty(output)
        ctx.save_for_backward(source)
        ctx.use, ctx.receive = use, receive
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (source,) = ctx.saved_tensors
        ctx.receive(ctx.use, source, gradients[0])
        ctx.use = ctx.receive = None
        return gradients[0], None, None, None, None


class _UnitwiseGroupNorm(torch.autograd.Function):
    """Group norm whose backward pass goes unit by unit, which gives the affine parameters' gradients per unit for nothing."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor, weight: Tensor, bias: Tensor, use: Use, receive: OnGradient, units: Units
    ) -> Tensor:
        call = use.call
        call.input = x
        output = call.run(weight, bias)
        call.input = None
        assert call.statistics is not None
        ctx.save_for_backward(x, weight, *call.statistics)
        ctx.work = use, receive, units
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        use, receive, units = ctx.work
        dy = gradients[0].contiguous(memory_format=torch.channels_last) if channels_last(x) else gradients[0].contiguous()
        rows, positions = x.shape[0], math.prod(x.shape[2:])
        parts = [
            torch.ops.aten.native_group_norm_backward(
                dy[s], x[s], mean[s], scale[s], weight, s.stop - s.start, x.shape[1], positions, use.call.settings[0], (True, True, True)
            )
            for s in units.spans()
        ]  # fmt: skip
        assert rows == units.rows
        by_x, by_weight, by_bias = zip(*parts, strict=True)
        use.vectors = torch.stack(by_weight), torch.stack(by_bias)
        receive(use, x, dy)
        ctx.work = None
        return (torch.cat(by_x), *[None] * 6)


UNITWISE = 2**18
"""Units of at least so many numbers are worth a call of their own."""


@dataclass(eq=False)
class Tracer(TorchFunctionMode):
    """Records the uses of `trained` while active. `only_known` are keys from a plan: a use outside it is left to autograd."""

    trained: Mapping[str, nn.Parameter]
    rows: int
    receive: OnGradient
    excluded: frozenset[str] = frozenset()
    """Parameters whose uses are left to autograd."""
    keep_outputs: frozenset[str] = frozenset()
    """Keys of uses whose outputs are to be remembered, where they have their full precision."""
    units: Units | None = None
    """Whose gradients are wanted; not needed to find out how parameters are used."""
    uses: list[Use] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in self.trained.items()}
        self._seen: dict[str, int] = {}
        self.token = torch.zeros((), requires_grad=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = OPERATORS.get(func)
        if operator is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        call = operator(*args, **kwargs)
        use = self._use(call) if call is not None else None
        if call is None or use is None:
            return func(*args, **kwargs)
        weight = call.weight.detach() if call.weight is not None else None
        bias = call.bias.detach() if call.bias is not None else None
        self.uses.append(use)
        if self._unitwise(call, weight, bias):
            source, call.weight, call.bias = call.input, weight, bias
            result: Tensor = _UnitwiseGroupNorm.apply(source, self.token, weight, bias, use, self.receive, self.units)
            return result
        output = call.run(weight, bias)
        if output._is_view():
            output = output.clone()
        call.weight, call.bias = weight, bias
        source, call.input = call.input, None
        output = _Tap.apply(output, self.token, source.detach(), use, self.receive)
        if use.key in self.keep_outputs and made_in_full(output):
            use.output, use.output_version = output.detach(), output._version
        return output

    def _unitwise(self, call: Call, weight: Tensor | None, bias: Tensor | None) -> bool:
        x, units = call.input, self.units
        return (
            call.kind == "group_norm" and units is not None and weight is not None and bias is not None and len(x) == units.rows
            and x.numel() >= UNITWISE * units.count and x.dtype == weight.dtype == bias.dtype and x.device.type == "cpu"
            and not torch.is_autocast_enabled("cpu")
        )  # fmt: skip

    def _use(self, call: Call) -> Use | None:
        rows = len(call.input) if call.input.ndim else 0
        trained = [t for t in (call.weight, call.bias) if t is not None and t.requires_grad]
        if not trained or rows == 0 or rows % self.rows:
            return None
        leaves: dict[str, None] = {}
        for tensor in trained:
            found = self._leaves(tensor)
            if found is None:
                return None
            leaves |= found
        if not self.excluded.isdisjoint(leaves):
            return None
        shape = trained[0].shape
        names = sorted(leaves, key=lambda name: self.trained[name].shape != shape)
        first = names[0]
        self._seen[first] = self._seen.get(first, 0) + 1
        key = first if self._seen[first] == 1 else f"{first}#{self._seen[first]}"
        weight = call.weight if call.weight is not None and call.weight.requires_grad else None
        bias = call.bias if call.bias is not None and call.bias.requires_grad else None
        return Use(key, call, weight, bias, tuple(names), rows // self.rows)

    def _leaves(self, tensor: Tensor) -> dict[str, None] | None:
        """The trained parameters that a tensor is computed from; None if it is computed from anything else that trains."""
        if tensor.grad_fn is None:
            name = self._names.get(id(tensor))
            return {name: None} if name is not None else None
        leaves: dict[str, None] = {}
        for node in graph_nodes(tensor.grad_fn):
            if type(node).__name__ in _TAP_NODES:
                return None
            variable = getattr(node, "variable", None)
            if variable is not None:
                name = self._names.get(id(variable))
                if name is None:
                    return None
                leaves[name] = None
        return leaves

    def reached(self, losses: Tensor) -> frozenset[str]:
        """The parameters that the losses still depend on through autograd: those that were used in some other way."""
        variables = (getattr(node, "variable", None) for node in graph_nodes(losses.grad_fn))
        return frozenset(self._names[id(v)] for v in variables if v is not None and id(v) in self._names)


_TAP_NODES = ("_TapBackward", "_UnitwiseGroupNormBackward")


def graph_nodes(root: Any) -> Iterator[Any]:
    """Every node of an autograd graph, once."""
    pending, seen = [root] if root is not None else [], {root}
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
