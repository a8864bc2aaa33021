"""The few operations that layers are made of, each for one token.

A chunk is computed by `each`: the same compiled code for one token after another. So no token's bits can depend on
its slot, on how many tokens there are, or on its neighbours: there is no shape for a kernel to choose an order by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

__all__ = ["Projection", "each", "gated_mlp", "own", "product", "project", "rms_norm", "rotate", "scope", "wide"]


class Projection(eqx.Module):
    """A weight matrix, [out, in], and a bias, [out] or None."""

    weight: Array
    bias: Array | None = None


@contextmanager
def scope(dtype: str) -> Iterator[None]:
    """Run jax on the CPU, with 64-bit types exactly where `dtype` is one; on leaving, both are as they were.

    Both settings belong to the thread, so that nobody else's jax sees them.
    """
    with jax.enable_x64(dtype == "float64"), jax.default_device(jax.devices("cpu")[0]):
        yield


def own(values: np.ndarray, dtype: Any = None) -> Array:
    """Copy numpy's array: jax would share its memory, and that may be a mapped file or the caller's to change."""
    return jnp.array(values, dtype=dtype, copy=True)


def wide(dtype: Any) -> Any:
    """Return the dtype to add up in: float32, or float64 for itself."""
    return jnp.promote_types(dtype, jnp.float32)


def each(function: Callable[[Any], Any], tokens: Any) -> Any:
    """Apply a function of one token to every token of arrays [tokens, ...], in turn."""
    return jax.lax.map(function, tokens)


def product(weight: Float[Array, "outputs inputs"], x: Float[Array, " inputs"]) -> Float[Array, " outputs"]:
    """Return weight @ x, added up in `wide` and rounded once."""
    y = jnp.matmul(weight, x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide(x.dtype))
    return y.astype(x.dtype)


def project(projection: Projection, x: Float[Array, " inputs"]) -> Float[Array, " outputs"]:
    """Apply a projection."""
    y = product(projection.weight, x)
    return y if projection.bias is None else y + projection.bias


def rms_norm(x: Float[Array, "*parts size"], weight: Float[Array, " size"], eps: float) -> Float[Array, "*parts size"]:
    """Return x / sqrt(mean(x^2) + eps) * weight, the mean in `wide`, the weight applied in x's dtype as Llama does."""
    h = x.astype(wide(x.dtype))
    h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + eps)
    return h.astype(x.dtype) * weight


def rotate(
    x: Float[Array, "heads dim"], cos: Float[Array, " half"], sin: Float[Array, " half"]
) -> Float[Array, "heads dim"]:
    """Turn each pair (x[i], x[i + dim / 2]) by its angle."""
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def gated_mlp(
    gate: Projection, up: Projection, down: Projection, x: Float[Array, " hidden"]
) -> Float[Array, " hidden"]:
    """Return down(silu(gate(x)) * up(x))."""
    return project(down, jax.nn.silu(project(gate, x)) * project(up, x))
