"""The target: a pre-norm decoder, run as a function of (spec, weights, cache, tokens), a row after another."""

from __future__ import annotations

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from dflash_fn.config import DecoderSpec, LayerKind, TargetSpec
from dflash_fn.port import TargetPass
from dflash_fn.records import Model
from dflash_fn.rope import rope_tables
from dflash_fn_jax import cache as kv
from dflash_fn_jax import gated_delta
from dflash_fn_jax.attention import Reach, attend, spans
from dflash_fn_jax.cache import Attention, Held
from dflash_fn_jax.gated_delta import DeltaNet, Tape
from dflash_fn_jax.ops import Norm, Projection, each, gated_mlp, own, padded, product, project, rms_norm, rotate, scope

__all__ = ["Chunk", "LayerWeights", "TargetWeights", "chunk_at", "embed", "layer_pass", "target_pass"]

NOWHERE = 2**30
"""Position of padding, beyond every cache: what is written there is dropped."""


class LayerWeights(eqx.Module):
    """Weights of one attention and MLP layer, as checkpoints have them.

    `q_norm` and `k_norm` are of one head, of `dim` dimensions. Where `gated`, each head's query is followed by its
    output gate.
    """

    dim: int = eqx.field(static=True)
    gated: bool = eqx.field(static=True)
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
    layers: tuple[LayerWeights | DeltaNet, ...]
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
    base: Int[Array, ""],
    x: Float[Array, "tokens hidden"],
    keys: Float[Array, "capacity kv_heads dim"],
    values: Float[Array, "capacity kv_heads dim"],
) -> tuple[Float[Array, "tokens hidden"], Array, Array]:
    """Run one attention layer over a chunk: first every token's K and V, then what each makes of those in its span.

    Args:
        weights: the layer's.
        chunk: where the tokens stand.
        span: the slots that each token sees.
        base: position of slot 0.
        x: what goes into the layer.
        keys: of the row.
        values: of the row.

    Returns:
        the layer's output, and its keys and values with the chunk's own in their slots.
    """

    def heads(x, cos, sin):
        h = rms_norm(weights.input_norm, x)
        q, gate = queries(weights, h)
        return turned(weights.q_norm, q, cos, sin), gate, *context_heads(weights, h, cos, sin)

    q, gate, k, v = each(heads, chunk.count, x, chunk.cos, chunk.sin)
    keys, values = write(keys, chunk, base, k), write(values, chunk, base, v)

    def mixed(x, q, gate, span):
        y = attend(q, keys, values, span)
        x = x + project(weights.out, y * jax.nn.sigmoid(gate) if weights.gated else y)
        return x + gated_mlp(weights.gate, weights.up, weights.down, rms_norm(weights.post_norm, x))

    return each(mixed, chunk.count, x, q, gate, span), keys, values


def queries(weights: LayerWeights, h: Float[Array, " hidden"]) -> tuple[Float[Array, "heads dim"], Array]:
    """Project a token onto queries and, where there is one, the output gate; it is empty elsewhere."""
    y = project(weights.q, h).reshape(-1, weights.dim * (2 if weights.gated else 1))
    return y[:, : weights.dim], y[:, weights.dim :].reshape(-1)


def turned(norm: Norm | None, y: Float[Array, "heads dim"], cos: Array, sin: Array) -> Float[Array, "heads dim"]:
    """Normalise queries or keys where the model does that, and turn them."""
    return rotate(y if norm is None else rms_norm(norm, y), cos, sin)


def context_heads(
    weights: LayerWeights, h: Float[Array, " hidden"], cos: Array, sin: Array
) -> tuple[Float[Array, "kv_heads dim"], Float[Array, "kv_heads dim"]]:
    """Return the K and V of a token."""
    k = turned(weights.k_norm, project(weights.k, h).reshape(-1, weights.dim), cos, sin)
    return k, project(weights.v, h).reshape(k.shape)


def write(
    store: Float[Array, "capacity kv_heads dim"],
    chunk: Chunk,
    base: Int[Array, ""],
    new: Float[Array, "tokens kv_heads dim"],
) -> Float[Array, "capacity kv_heads dim"]:
    """Return a store with the chunk's tokens in their slots."""
    return store.at[chunk.positions - base].set(new, mode="drop")


def attention_pass(
    weights: LayerWeights,
    chunk: Chunk,
    reach: Reach,
    positions: Int[np.ndarray, " slots"],
    x: Float[Array, "tokens hidden"],
    held: Attention,
) -> tuple[Float[Array, "tokens hidden"], Attention]:
    """Run one attention layer over a chunk, with what it holds before and after."""
    span = own(padded(spans(reach, positions) - held.base), jnp.int32)
    x, keys, values = layer_pass(weights, chunk, span, jnp.int32(held.base), x, held.keys, held.values)
    return x, replace(held, keys=keys, values=values)


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
    rows, tapes, logits, features = zip(*made, strict=True)
    family = kv.Family(cache, rows, tapes)
    return TargetPass(np.stack(logits) if head else None, np.stack(features) if taps else None, family)


def row_pass(
    target: Model[TargetSpec], row: kv.Row, tokens: Integer[np.ndarray, " slots"], taps: tuple[int, ...], head: bool
) -> tuple[kv.Row, tuple[Tape | None, ...], np.ndarray | None, np.ndarray | None]:
    """Return a row after these tokens, its tapes, and logits and features where they are wanted."""
    spec: TargetSpec = target.spec
    weights: TargetWeights = target.weights
    row, count = kv.room(row, len(tokens)), len(tokens)
    positions = np.arange(row.length, row.length + count)
    chunk = chunk_at(spec, positions, target.dtype)
    held, tapes, outputs = [], [], []
    x = embed(weights.embedding, own(padded(tokens), jnp.int32))
    for layer, kind, one in zip(weights.layers, spec.layer_kinds, row.held, strict=True):
        x, after, tape = mixer_pass(layer, chunk, target_reach(spec, kind), positions, x, one)
        held.append(after)
        tapes.append(tape)
        outputs.append(x)
    outputs[-1] = normed(weights.norm, chunk, x)
    logits = np.asarray(head_pass(weights.head, chunk, outputs[-1]))[:count] if head else None
    features = np.concatenate([np.asarray(outputs[i])[:count] for i in taps], axis=-1) if taps else None
    return kv.append(row, count, held), tuple(tapes), logits, features


def mixer_pass(
    weights: LayerWeights | DeltaNet,
    chunk: Chunk,
    reach: Reach,
    positions: Int[np.ndarray, " slots"],
    x: Float[Array, "tokens hidden"],
    held: Held,
) -> tuple[Float[Array, "tokens hidden"], Held, Tape | None]:
    """Run one layer of either kind over a chunk."""
    if isinstance(weights, DeltaNet):
        assert isinstance(held, gated_delta.State)
        return gated_delta.layer_pass(weights, held, chunk.count, x)
    assert isinstance(held, Attention)
    return *attention_pass(weights, chunk, reach, positions, x, held), None
