"""The target: a pre-norm decoder, run as a function of (spec, weights, cache, tokens), a row after another."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from dflash_fn.config import DecoderSpec, LayerKind, TargetSpec
from dflash_fn.port import TargetPass
from dflash_fn.records import Model
from dflash_fn.rope import rope_tables
from dflash_fn_jax import cache as kv
from dflash_fn_jax.attention import Reach, attend, spans
from dflash_fn_jax.ops import Norm, Projection, each, gated_mlp, own, padded, product, project, rms_norm, rotate, scope

__all__ = ["Chunk", "LayerWeights", "TargetWeights", "chunk_at", "embed", "layer_pass", "target_pass"]

NOWHERE = 2**30
"""Position of padding, beyond every cache: what is written there is dropped."""


class LayerWeights(eqx.Module):
    """Weights of one attention and MLP layer, as checkpoints have them; `q_norm` and `k_norm` are of one head."""

    input_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    out: Projection
    post_norm: Norm
    gate: Projection
    up: Projection
    down: Projection


class TargetWeights(eqx.Module):
    """Weights of a target; `head` is `embedding` where the checkpoint ties them."""

    embedding: Array
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Array


class Chunk(eqx.Module):
    """Where the tokens of a pass stand.

    Attributes:
        count: how many there are; the rest of the arrays is padding.
        positions: [tokens].
        cos: [tokens, dim / 2].
        sin: the same.
    """

    count: Int[Array, ""]
    positions: Int[Array, " tokens"]
    cos: Float[Array, "tokens half"]
    sin: Float[Array, "tokens half"]


def chunk_at(spec: DecoderSpec, positions: Int[np.ndarray, " slots"], dtype: str) -> Chunk:
    """Prepare a pass at these positions."""
    cos, sin = (own(padded(table), dtype) for table in rope_tables(spec.rope, positions))
    return Chunk(jnp.int32(len(positions)), own(padded(positions, NOWHERE), jnp.int32), cos, sin)


@eqx.filter_jit
def embed(embedding: Float[Array, "vocabulary hidden"], tokens: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
    """Look tokens up."""
    return embedding[tokens]


@eqx.filter_jit
def layer_pass(
    weights: LayerWeights,
    chunk: Chunk,
    span: Int[Array, "tokens 2"],
    x: Float[Array, "tokens hidden"],
    keys: Float[Array, "capacity kv_heads dim"],
    values: Float[Array, "capacity kv_heads dim"],
) -> tuple[Float[Array, "tokens hidden"], Array, Array]:
    """Run one layer over a chunk: first every token's K and V, then what each token makes of those in its span.

    Returns:
        the layer's output, and its keys and values with the chunk's own at their positions.
    """

    def heads(x, cos, sin):
        h = rms_norm(weights.input_norm, x)
        return turned_heads(weights.q, weights.q_norm, h, cos, sin), *context_heads(weights, h, cos, sin)

    q, k, v = each(heads, chunk.count, x, chunk.cos, chunk.sin)
    keys, values = write(keys, chunk, k), write(values, chunk, v)

    def mixed(x, q, span):
        x = x + project(weights.out, attend(q, keys, values, span))
        return x + gated_mlp(weights.gate, weights.up, weights.down, rms_norm(weights.post_norm, x))

    return each(mixed, chunk.count, x, q, span), keys, values


def turned_heads(
    projection: Projection, norm: Norm | None, h: Float[Array, " hidden"], cos: Array, sin: Array
) -> Float[Array, "heads dim"]:
    """Project a token onto queries or keys, normalise them where the model does that, and turn them."""
    y = project(projection, h).reshape(-1, 2 * cos.size)
    return rotate(y if norm is None else rms_norm(norm, y), cos, sin)


def context_heads(
    weights: LayerWeights, h: Float[Array, " hidden"], cos: Array, sin: Array
) -> tuple[Float[Array, "kv_heads dim"], Float[Array, "kv_heads dim"]]:
    """Return the K and V of a token."""
    k = turned_heads(weights.k, weights.k_norm, h, cos, sin)
    return k, project(weights.v, h).reshape(k.shape)


def write(
    store: Float[Array, "capacity kv_heads dim"], chunk: Chunk, new: Float[Array, "tokens kv_heads dim"]
) -> Float[Array, "capacity kv_heads dim"]:
    """Return a store with the chunk's tokens at their positions."""
    return store.at[chunk.positions].set(new, mode="drop")


@eqx.filter_jit
def normed(norm: Norm, chunk: Chunk, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
    """Apply the last norm."""
    return each(lambda token: rms_norm(norm, token), chunk.count, x)


@eqx.filter_jit
def head_pass(
    head: Float[Array, "vocabulary hidden"], chunk: Chunk, x: Float[Array, "tokens hidden"]
) -> Float[Array, "tokens vocabulary"]:
    """Apply the head."""
    return each(lambda token: product(head, token), chunk.count, x)


def target_reach(spec: DecoderSpec, kind: LayerKind) -> Reach:
    """What a target's layer of this kind sees."""
    return Reach(causal=True, window=spec.sliding_window if kind is LayerKind.SLIDING else None)


def target_pass(
    target: Model[TargetSpec],
    cache: kv.Cache,
    tokens: Integer[np.ndarray, "rows slots"],
    *,
    taps: tuple[int, ...],
    head: bool,
) -> TargetPass:
    """Run the target over a chunk; see `dflash_fn.port.Port.target_pass`."""
    with scope(target.dtype):
        made = [row_pass(target, row, ids, taps, head) for row, ids in zip(cache, tokens, strict=True)]
    rows, logits, features = zip(*made, strict=True)
    return TargetPass(np.stack(logits) if head else None, np.stack(features) if taps else None, kv.Family(cache, rows))


def row_pass(
    target: Model[TargetSpec], row: kv.Row, tokens: Integer[np.ndarray, " slots"], taps: tuple[int, ...], head: bool
) -> tuple[kv.Row, np.ndarray | None, np.ndarray | None]:
    """Return a row after these tokens, with logits and features where they are wanted."""
    spec: TargetSpec = target.spec
    weights: TargetWeights = target.weights
    row, count = kv.reserve(row, row.length + len(tokens)), len(tokens)
    positions = np.arange(row.length, row.length + count)
    chunk = chunk_at(spec, positions, target.dtype)
    keys, values, outputs = list(row.keys), list(row.values), []
    x = embed(weights.embedding, own(padded(tokens), jnp.int32))
    for i, kind in enumerate(spec.layer_kinds):
        span = own(padded(spans(target_reach(spec, kind), positions)), jnp.int32)
        x, keys[i], values[i] = layer_pass(weights.layers[i], chunk, span, x, keys[i], values[i])
        outputs.append(x)
    outputs[-1] = normed(weights.norm, chunk, x)
    logits = np.asarray(head_pass(weights.head, chunk, outputs[-1]))[:count] if head else None
    features = np.concatenate([np.asarray(outputs[i])[:count] for i in taps], axis=-1) if taps else None
    return kv.append(row, count, keys, values), logits, features
