"""Opacus, in its three modes, on the shipped model. Runs in an environment of its own.

Opacus does not know weight-standardised convolutions, so it is given a rule for them, as its users would write it: Opacus' own
arithmetic for convolutions (unfold, one product per example) on the effective weight, pulled back through the standardisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping, register_grad_sampler
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.nn import functional

from bench.workers.common import LEARNING_RATE, Data, cross_entropy, finish, made_up, shipped_model
from bench.workers.common import device_memory as device_memory
from bench.workers.serve import Took
from sparsedp.models.layers import FLOOR, WSConv2d


@register_grad_sampler(WSConv2d)
def standardised_convolution(layer: WSConv2d, activations: list[Tensor], dy: Tensor) -> dict[nn.Parameter, Tensor]:
    """Per-example gradients of weight, gain and bias."""
    x = functional.pad(activations[0], layer.pads(*activations[0].shape[-2:]))
    columns = functional.unfold(x, layer.kernel_size, layer.dilation, 0, layer.stride)
    dy = dy.reshape(len(dy), layer.out_channels, -1)
    by_effective = torch.einsum("noq,npq->nop", dy, columns)
    centred = layer.weight.detach() - layer.weight.detach().mean((1, 2, 3), keepdim=True)
    centred = centred.flatten(1)
    squares = (centred * centred).sum(1)
    length = squares.clamp_min(FLOOR).sqrt()
    direction = centred / length[:, None]
    by_gain = torch.einsum("nop,op->no", by_effective, direction)
    along = torch.where(squares > FLOOR, by_gain, torch.zeros_like(by_gain))
    by_raw = by_effective - by_effective.mean(2, keepdim=True) - along[:, :, None] * direction
    by_raw *= (layer.gain.detach() / length)[:, None]
    return {layer.weight: by_raw.unflatten(2, layer.weight.shape[1:]), layer.gain: by_gain, layer.bias: dy.sum(2)}


def load(spec: dict[str, Any]) -> Data:
    return made_up(spec)


def build(spec: dict[str, Any], data: Data) -> Callable[[], Took]:
    model = shipped_model(spec)
    plain = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": spec["batch"]}
    if spec["mode"] == "ghost":
        return ghost(spec, data, GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True),
                     DPOptimizerFastGradientClipping(plain, **options))  # fmt: skip
    wrapped = GradSampleModule(model, force_functorch=spec["mode"] == "functorch")
    return materialised(spec, data, wrapped, DPOptimizer(plain, **options))


def materialised(spec: dict[str, Any], data: Data, model: nn.Module, optimizer: DPOptimizer) -> Callable[[], Took]:
    """Per-example gradients from hooks; those of an example's views are averaged by hand."""
    images, labels = data

    def step() -> Took:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).mean().backward()
        if spec["views"] > 1:
            for p in optimizer.params:
                p.grad_sample = p.grad_sample.unflatten(0, (-1, spec["views"])).mean(1)
        optimizer.step()
        finish(spec)
        return Took(len(images))

    return step


def ghost(spec: dict[str, Any], data: Data, model: Any, optimizer: DPOptimizerFastGradientClipping) -> Callable[[], Took]:
    """Norms first, then a second backward pass of the reweighted loss. Views cannot be averaged this way."""
    images, labels = data

    def step() -> Took:
        optimizer.zero_grad()
        losses = cross_entropy(model(images), labels)
        DPTensorFastGradientClipping(model, optimizer, losses, "mean").backward()
        optimizer.step()
        finish(spec)
        return Took(len(images))

    return step
