"""The target: a pre-norm decoder, run as a function of (spec, weights, cache, tokens)."""

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
from dflash_fn_jax.ops import Projection, each, gated_mlp, own, product, project, rms_norm, rotate, scope

__all__ = ["Chunk", "LayerWeights", "TargetWeights", "chunk_at", "embed", "layer_pass", "target_pass"]


class LayerWeights(eqx.Module):
    """Weights of one attention and MLP layer, as checkpoints have them; norms are [H], or [dim] for `q` and `k`."""

    input_norm: Array
    q: Projection
    k: Projection
    v: Projection
    q_norm: Array | None
    k_norm: Array | None
    out: Projection
    post_norm: Array
    gate: Projection
    up: Projection
    down: Projection


class TargetWeights(eqx.Module):
    """Weights of a target; `head` is `embedding` where the checkpoint ties them."""

    embedding: Array
    layers: tuple[LayerWeights, ...]
    norm: Array
    head: Array


class Chunk(eqx.Module):
    """Where the tokens of a pass stand, R * S of them in a line.

    Attributes:
        rows: [tokens].
        positions: [tokens].
        cos: [tokens, dim / 2].
        sin: the same.
    """

    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    cos: Float[Array, "tokens half"]
    sin: Float[Array, "tokens half"]


def positions_after(lengths: tuple[int, ...], slots: int) -> Int[np.ndarray, "rows slots"]:
    """Return the positions of a chunk that follows these lengths."""
    return np.asarray(lengths)[:, None] + np.arange(slots)


def chunk_at(spec: DecoderSpec, positions: Int[np.ndarray, "rows slots"], dtype: str) -> Chunk:
    """Prepare a pass at these positions."""
    rows = np.broadcast_to(np.arange(len(positions))[:, None], positions.shape)
    cos, sin = (own(table, dtype) for table in rope_tables(spec.rope, positions.reshape(-1)))
    return Chunk(own(rows.reshape(-1), jnp.int32), own(positions.reshape(-1), jnp.int32), cos, sin)


@eqx.filter_jit
def embed(embedding: Float[Array, "vocabulary hidden"], tokens: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
    """Look tokens up."""
    return embedding[tokens]


@eqx.filter_jit
def layer_pass(
    spec: DecoderSpec,
    weights: LayerWeights,
    chunk: Chunk,
    span: Int[Array, "tokens 2"],
    x: Float[Array, "tokens hidden"],
    keys: Float[Array, "rows capacity kv_heads dim"],
    values: Float[Array, "rows capacity kv_heads dim"],
) -> tuple[Float[Array, "tokens hidden"], Array, Array]:
    """Run one layer over a chunk: first every token's K and V, then what each token makes of those in its span.

    Returns:
        the layer's output, and its keys and values with the chunk's own at their positions.
    """

    def heads(token):
        x, cos, sin = token
        h = rms_norm(x, weights.input_norm, spec.norm_eps)
        q = head_rows(spec, weights.q, h, weights.q_norm)
        return rotate(q, cos, sin), *context_heads(spec, weights, h, cos, sin)

    q, k, v = each(heads, (x, chunk.cos, chunk.sin))
    keys, values = write(keys, chunk, k), write(values, chunk, v)

    def mixed(token):
        x, q, row, span = token
        x = x + project(weights.out, attend(q, keys, values, row, span))
        h = rms_norm(x, weights.post_norm, spec.norm_eps)
        return x + gated_mlp(weights.gate, weights.up, weights.down, h)

    return each(mixed, (x, q, chunk.rows, span)), keys, values


def head_rows(
    spec: DecoderSpec, projection: Projection, h: Float[Array, " hidden"], norm: Array | None
) -> Float[Array, "heads dim"]:
    """Project a token onto heads, normalised where the model does that."""
    y = project(projection, h).reshape(-1, spec.head_dim)
    return y if norm is None else rms_norm(y, norm, spec.norm_eps)


def context_heads(
    spec: DecoderSpec, weights: LayerWeights, h: Float[Array, " hidden"], cos: Array, sin: Array
) -> tuple[Float[Array, "kv_heads dim"], Float[Array, "kv_heads dim"]]:
    """Return the K and V of a token."""
    k = rotate(head_rows(spec, weights.k, h, weights.k_norm), cos, sin)
    return k, head_rows(spec, weights.v, h, None)


def write(
    store: Float[Array, "rows capacity kv_heads dim"], chunk: Chunk, new: Float[Array, "tokens kv_heads dim"]
) -> Float[Array, "rows capacity kv_heads dim"]:
    """Return a store with the chunk's tokens at their places."""
    return store.at[chunk.rows, chunk.positions].set(new)


def target_reach(spec: DecoderSpec, kind: LayerKind) -> Reach:
    """What a target's layer of this kind sees."""
    return Reach(causal=True, window=spec.sliding_window if kind is LayerKind.SLIDING else None)


@eqx.filter_jit
def finish(
    spec: TargetSpec,
    weights: TargetWeights,
    x: Float[Array, "tokens hidden"],
    outputs: dict[int, Float[Array, "tokens hidden"]],
    taps: tuple[int, ...],
    head: bool,
) -> tuple[Array | None, Array | None]:
    """Return logits, if the head is wanted, and the tapped of the layers' outputs side by side, if any are."""
    last = each(lambda token: rms_norm(token, weights.norm, spec.norm_eps), x)
    outputs = {**outputs, spec.num_layers - 1: last}
    features = jnp.concatenate([outputs[i] for i in taps], axis=-1) if taps else None
    return each(lambda token: product(weights.head, token), last) if head else None, features


def target_pass(
    target: Model[TargetSpec],
    cache: kv.Cache,
    tokens: Integer[np.ndarray, "rows slots"],
    *,
    taps: tuple[int, ...],
    head: bool,
) -> TargetPass:
    """Run the target over a chunk; see `dflash_fn.port.Port.target_pass`."""
    spec: TargetSpec = target.spec
    weights: TargetWeights = target.weights
    cache = kv.roomy(cache, tokens.shape[1])
    positions = positions_after(cache.lengths, tokens.shape[1])
    keys, values, outputs = list(cache.keys), list(cache.values), {}
    with scope(target.dtype):
        chunk = chunk_at(spec, positions, target.dtype)
        x = embed(weights.embedding, own(tokens.reshape(-1), jnp.int32))
        for i, kind in enumerate(spec.layer_kinds):
            span = own(spans(target_reach(spec, kind), positions, positions[:, -1] + 1).reshape(-1, 2))
            x, keys[i], values[i] = layer_pass(spec, weights.layers[i], chunk, span, x, keys[i], values[i])
            if i in taps:
                outputs[i] = x
        made = finish(spec, weights, x, outputs, taps, head)
    logits, features = (None if array is None else np.asarray(array).reshape(*tokens.shape, -1) for array in made)
    return TargetPass(logits, features, kv.family(cache, tokens.shape[1], keys, values))
