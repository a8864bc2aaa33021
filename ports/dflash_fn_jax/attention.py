"""Attention of one token over keys and values that already hold the chunk's own."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_fn_jax.ops import wide

__all__ = ["BLOCK", "Reach", "attend", "spans"]

BLOCK = 128
"""Keys are walked in blocks of this many, from multiples of it, however large the cache is."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys a layer's queries see.

    Attributes:
        causal: only keys at or before the query's position.
        window: only keys less than this many positions away; None for no limit.
    """

    causal: bool
    window: int | None


def spans(reach: Reach, positions: Int[np.ndarray, " slots"]) -> Int[np.ndarray, "slots 2"]:
    """Return the first key that each query of a chunk sees, and the one after the last.

    Args:
        reach: what the layer lets them see.
        positions: of the queries, one after another; the last is the last key that there is.
    """
    end = positions[-1] + 1
    window = reach.window or end
    first = np.maximum(positions - window + 1, 0)
    return np.stack([first, np.minimum(positions + (1 if reach.causal else window), end)], axis=-1)


def attend(
    q: Float[Array, "heads dim"],
    keys: Float[Array, "capacity kv_heads dim"],
    values: Float[Array, "capacity kv_heads dim"],
    span: Int[Array, " 2"],
) -> Float[Array, " heads*dim"]:
    """Return softmax(q k / sqrt(dim)) v over the keys of a span.

    A block of keys at a time, with the running maximum and sum of Milakov and Gimelshein 1805.02867, so that the
    order of the sums depends on the keys' positions and on nothing else.
    """
    heads, dim = q.shape
    kv_heads, high = keys.shape[1], jax.lax.Precision.HIGHEST
    q = q.reshape(kv_heads, heads // kv_heads, dim).astype(wide(q.dtype))

    def block(index, carry):
        peak, total, mixed = carry
        places = index * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        seen = (places >= span[0]) & (places < span[1])
        k, v = (jax.lax.dynamic_slice_in_dim(store, index * BLOCK, BLOCK).astype(q.dtype) for store in (keys, values))
        scores = jnp.einsum("hgd,nhd->hgn", q, k, precision=high) * dim**-0.5
        scores = jnp.where(seen, scores, -jnp.inf)
        v = jnp.where(seen[:, None, None], v, 0)  # what lies beyond may be NaN, and 0 * NaN is NaN
        top = jnp.maximum(peak, jnp.max(scores, axis=-1))
        shrink, weights = jnp.exp(peak - top), jnp.exp(scores - top[..., None])
        added = jnp.einsum("hgn,nhd->hgd", weights, v, precision=high)
        return top, total * shrink + jnp.sum(weights, axis=-1), mixed * shrink[..., None] + added

    zeros = jnp.zeros(q.shape[:2], q.dtype)
    start = (zeros - jnp.inf, zeros, jnp.zeros_like(q))
    _, total, mixed = jax.lax.fori_loop(span[0] // BLOCK, (span[1] + BLOCK - 1) // BLOCK, block, start)
    return (mixed / total[..., None]).astype(keys.dtype).reshape(heads * dim)
