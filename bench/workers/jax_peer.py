"""JAX-Privacy: the same wide residual network in JAX, its gradients clipped by `jax_privacy.clipping.clipped_grad`, jitted.

Runs in an environment of its own. With `mode` "plain" it is plain SGD in JAX, to show what of the difference is the framework's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.clipping import clipped_grad

from bench.workers.serve import Took

Params = dict[str, Any]
CLASSES, GROUPS = 10, 16


def conv_params(key: jax.Array, before: int, after: int, kernel: int) -> Params:
    weight = jax.random.normal(key, (kernel, kernel, before, after)) / np.sqrt(kernel * kernel * before)
    return {"weight": weight, "gain": jnp.ones(after), "bias": jnp.zeros(after)}


def norm_params(channels: int) -> Params:
    return {"weight": jnp.ones(channels), "bias": jnp.zeros(channels)}


def conv(params: Params, x: jax.Array, stride: int = 1) -> jax.Array:
    """A weight-standardised convolution; images are [rows, height, width, channels]."""
    weight = params["weight"]
    fan_in = weight[..., 0].size
    scale = params["gain"] * jax.lax.rsqrt(jnp.maximum(weight.var((0, 1, 2)) * fan_in, 1e-4))
    weight = (weight - weight.mean((0, 1, 2))) * scale
    return (
        jax.lax.conv_general_dilated(x, weight, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        + params["bias"]
    )


def norm(params: Params, x: jax.Array) -> jax.Array:
    grouped = x.reshape(len(x), -1, GROUPS, x.shape[-1] // GROUPS)
    mean, variance = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    return ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * params["weight"] + params["bias"]


def initial(depth: int, width: int, channels: int) -> Params:
    """The parameters of WRN-depth-width."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * depth))
    params: Params = {"stem": conv_params(next(keys), channels, 16, 3), "blocks": []}
    last = 16
    for wide in (16 * width, 32 * width, 64 * width):
        for block in range((depth - 4) // 6):
            made = {"norm1": norm_params(last), "conv1": conv_params(next(keys), last, wide, 3)}
            made |= {"norm2": norm_params(wide), "conv2": conv_params(next(keys), wide, wide, 3)}
            if block == 0:
                made |= {"skip_norm": norm_params(last), "skip_conv": conv_params(next(keys), last, wide, 1)}
            params["blocks"].append(made)
            last = wide
    head = {"weight": jax.random.normal(next(keys), (last, CLASSES)) / np.sqrt(last), "bias": jnp.zeros(CLASSES)}
    return params | {"norm": norm_params(last), "classifier": head}


def logits(params: Params, images: jax.Array, per_group: int) -> jax.Array:
    """The network. The first block of every group but the first halves the side."""
    x = conv(params["stem"], images)
    for number, block in enumerate(params["blocks"]):
        stride = 2 if number and number % per_group == 0 else 1
        skip = conv(block["skip_conv"], norm(block["skip_norm"], jax.nn.relu(x)), stride) if "skip_conv" in block else x
        out = conv(block["conv1"], norm(block["norm1"], jax.nn.relu(x)), stride)
        x = conv(block["conv2"], norm(block["norm2"], jax.nn.relu(out))) + skip
    pooled = norm(params["norm"], jax.nn.relu(x)).mean((1, 2))
    return pooled @ params["classifier"]["weight"] + params["classifier"]["bias"]


def load(spec: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """[examples, views, height, width, channels] and labels."""
    draw = np.random.default_rng(0)
    channels, height, width = spec["shape"]
    shape = (spec["batch"], spec["views"])
    images = draw.standard_normal((*shape, height, width, channels), dtype=np.float32)
    return jnp.asarray(images), jnp.asarray(draw.integers(0, CLASSES, shape))


def build(spec: dict[str, Any], data: tuple[jax.Array, jax.Array]) -> Callable[[], Took]:
    """One jitted step: the loss of an example is the mean over its views, then clip, sum, average, update."""
    depth, width = (int(n) for n in spec["model"].removeprefix("wrn_").split("_"))
    params = initial(depth, width, spec["shape"][0])
    optimizer = optax.sgd(1e-3)
    state = optimizer.init(params)

    def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        out = logits(params, images, (depth - 4) // 6)
        return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()

    if spec["mode"] == "plain":
        gradient = jax.grad(loss)
        data = (data[0].reshape(-1, *data[0].shape[2:]), data[1].reshape(-1))
    else:
        gradient = clipped_grad(
            loss, l2_clip_norm=1.0, batch_argnums=(1, 2), keep_batch_dim=False, normalize_by=spec["batch"],
            microbatch_size=spec.get("micro_batch"),
        )  # fmt: skip

    def update(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Params, Any]:
        change, state = optimizer.update(gradient(params, images, labels), state)
        return optax.apply_updates(params, change), state

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def step() -> Took:
        nonlocal params, state
        params, state = jax.block_until_ready(compiled(params, state, *data))
        return Took(spec["batch"] * spec["views"])

    return step
