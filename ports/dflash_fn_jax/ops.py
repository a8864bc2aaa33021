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
from jaxtyping import Array, Float, Int

from dflash_fn.container import Bits

__all__ = [
    "Norm",
    "Projection",
    "each",
    "from_bits",
    "gated_mlp",
    "own",
    "padded",
    "product",
    "project",
    "rms_norm",
    "rotate",
    "scope",
    "to_bits",
    "wide",
]

STRIDE = 64
"""Chunks are padded to multiples of this, so that one compilation serves all widths; padding is not computed."""


class Projection(eqx.Module):
    """A weight matrix, [out, in], and a bias, [out] or None."""

    weight: Array
    bias: Array | None = None


class Norm(eqx.Module):
    """The weight of an RMS norm, [size], and its epsilon."""

    weight: Array
    eps: float = eqx.field(static=True)


@contextmanager
def scope(dtype: str) -> Iterator[None]:
    """Run jax on the CPU, with 64-bit types exactly where `dtype` is one; on leaving, both are as they were.

    Both settings belong to the thread, so that nobody else's jax sees them.
    """
    with jax.enable_x64(dtype == "float64"), jax.default_device(jax.devices("cpu")[0]):
        yield


def own(values: np.ndarray, dtype: Any = None) -> Array:
    """Copy numpy's array: jax would share its memory, and that may be a mapped file or the caller's to change."""
    with np.errstate(over="ignore"):  # what a dtype cannot hold is infinite, and whoever sees the logits says so
        return jnp.array(values, dtype=dtype, copy=True)


def to_bits(array: Any) -> Bits:
    """Hand an array out as files hold it."""
    values = np.asarray(array)
    name = values.dtype.name
    return Bits(name, values.view(np.uint16) if name == "bfloat16" else values)


def from_bits(bits: Bits) -> np.ndarray:
    """Undo `to_bits`."""
    return np.asarray(bits.values).view(bits.dtype)


def padded(values: np.ndarray, fill: int = 0) -> np.ndarray:
    """Fill the first axis up to a multiple of the stride."""
    extra = -len(values) % STRIDE
    return np.pad(values, [(0, extra)] + [(0, 0)] * (values.ndim - 1), constant_values=fill)


def wide(dtype: Any) -> Any:
    """Return the dtype to add up in: float32, or float64 for itself."""
    return jnp.promote_types(dtype, jnp.float32)


def each(function: Callable[..., Any], count: Int[Array, ""], *tokens: Array) -> Any:
    """Apply a function of one token to the first `count` rows of arrays [tokens, ...], in turn; the rest are zeros."""

    def one(index):
        return function(*(array[index] for array in tokens))

    def put(index, made):
        return jax.tree.map(lambda rows, row: rows.at[index].set(row), made, one(index))

    shapes = jax.eval_shape(one, jnp.zeros_like(count))
    zeros = jax.tree.map(lambda row: jnp.zeros((len(tokens[0]), *row.shape), row.dtype), shapes)
    return jax.lax.fori_loop(jnp.zeros_like(count), count, put, zeros)


def product(weight: Float[Array, "outputs inputs"], x: Float[Array, " inputs"]) -> Float[Array, " outputs"]:
    """Return weight @ x, added up in `wide` and rounded once."""
    y = jnp.matmul(weight, x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide(x.dtype))
    return y.astype(x.dtype)


def project(projection: Projection, x: Float[Array, " inputs"]) -> Float[Array, " outputs"]:
    """Apply a projection."""
    y = product(projection.weight, x)
    return y if projection.bias is None else y + projection.bias


def rms_norm(norm: Norm, x: Float[Array, "*parts size"]) -> Float[Array, "*parts size"]:
    """Return x / sqrt(mean(x^2) + eps) * weight, the mean in `wide`.

    The weight is applied in its own dtype: in x's as Llama does it, or in `wide` as Qwen3.5 does.
    """
    h = x.astype(wide(x.dtype))
    h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + norm.eps)
    return (h.astype(norm.weight.dtype) * norm.weight).astype(x.dtype)


def rotate(
    x: Float[Array, "heads dim"], cos: Float[Array, " half"], sin: Float[Array, " half"]
) -> Float[Array, "heads dim"]:
    """Turn each pair (x[i], x[i + half]) by its angle; what is beyond the pairs stays as it is."""
    left, right, rest = jnp.split(x, [cos.size, 2 * cos.size], axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1)


def gated_mlp(
    gate: Projection, up: Projection, down: Projection, x: Float[Array, " hidden"]
) -> Float[Array, " hidden"]:
    """Return down(silu(gate(x)) * up(x))."""
    return project(down, jax.nn.silu(project(gate, x)) * project(up, x))
