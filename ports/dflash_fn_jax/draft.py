"""The DFlash v1 draft: context features become K and V of every layer, then one pass fills a block of masks."""

from __future__ import annotations

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from dflash_fn.config import DraftSpec, LayerKind, TargetSpec
from dflash_fn.records import Model
from dflash_fn_jax import cache as kv
from dflash_fn_jax.attention import Reach
from dflash_fn_jax.cache import Attention
from dflash_fn_jax.decoder import (
    Chunk,
    LayerWeights,
    TargetWeights,
    attention_pass,
    chunk_at,
    context_heads,
    embed,
    write,
)
from dflash_fn_jax.ops import Norm, Projection, each, own, padded, product, project, rms_norm, scope

__all__ = ["DraftWeights", "draft_context", "draft_pass"]


class DraftWeights(eqx.Module):
    """Weights of a draft, whose embedding and head are the target's.

    Attributes:
        fuse: [H, L * H], what context features go through first (`fc` in checkpoints).
        context_norm: and then through this (`hidden_norm`).
        layers: the decoder layers.
        norm: before the head.
    """

    fuse: Projection
    context_norm: Norm
    layers: tuple[LayerWeights, ...]
    norm: Norm


def draft_context(
    draft: Model[DraftSpec],
    cache: kv.Cache,
    features: Float[np.ndarray, "rows slots tapped"],
    counts: tuple[int, ...],
) -> kv.Cache:
    """Let the draft read context features; see `dflash_fn.port.Port.draft_context`."""
    with scope(draft.dtype):
        parts = zip(cache, features, counts, strict=True)
        return tuple(row_context(draft, row, known[:count]) for row, known, count in parts)


def row_context(draft: Model[DraftSpec], row: kv.Row, features: Float[np.ndarray, "slots tapped"]) -> kv.Row:
    """Return a row after these tokens' features."""
    weights: DraftWeights = draft.weights
    count = len(features)
    if count == 0:
        return row
    row = kv.room(row, count)
    held = []
    chunk = chunk_at(draft.spec, np.arange(row.length, row.length + count), draft.dtype)
    context = fused(weights.fuse, weights.context_norm, chunk, own(padded(features)))
    for layer, one in zip(weights.layers, row.held, strict=True):
        assert isinstance(one, Attention)
        keys, values = layer_context(layer, chunk, jnp.int32(one.base), context, one.keys, one.values)
        held.append(replace(one, keys=keys, values=values))
    return kv.append(row, count, held)


@eqx.filter_jit
def fused(
    fuse: Projection, norm: Norm, chunk: Chunk, features: Float[Array, "tokens tapped"]
) -> Float[Array, "tokens hidden"]:
    """Make one vector of a token's tapped hidden states."""
    return each(lambda token: rms_norm(norm, project(fuse, token)), chunk.count, features)


@eqx.filter_jit
def layer_context(
    weights: LayerWeights,
    chunk: Chunk,
    base: Int[Array, ""],
    context: Float[Array, "tokens hidden"],
    keys: Float[Array, "capacity kv_heads dim"],
    values: Float[Array, "capacity kv_heads dim"],
) -> tuple[Array, Array]:
    """Return a layer's keys and values with those of the context in their slots."""
    k, v = each(lambda *token: context_heads(weights, *token), chunk.count, context, chunk.cos, chunk.sin)
    return write(keys, chunk, base, k), write(values, chunk, base, v)


def draft_reaches(spec: DraftSpec) -> list[Reach]:
    """What each layer's slots see: the whole block unless the layer is causal, and its window if it slides."""
    return [
        Reach(causal, spec.sliding_window if kind is LayerKind.SLIDING else None)
        for kind, causal in zip(spec.layer_kinds, spec.causal, strict=True)
    ]


def draft_pass(
    draft: Model[DraftSpec], target: Model[TargetSpec], cache: kv.Cache, block: Integer[np.ndarray, "rows slots"]
) -> Float[np.ndarray, "rows drafted vocabulary"]:
    """Fill a block; see `dflash_fn.port.Port.draft_pass`."""
    with scope(draft.dtype):
        return np.stack([row_block(draft, target.weights, row, ids) for row, ids in zip(cache, block, strict=True)])


def row_block(
    draft: Model[DraftSpec], owner: TargetWeights, row: kv.Row, tokens: Integer[np.ndarray, " slots"]
) -> Float[np.ndarray, "drafted vocabulary"]:
    """Return the logits of a block's slots but the first; its own K and V are forgotten."""
    spec: DraftSpec = draft.spec
    weights: DraftWeights = draft.weights
    row = kv.room(row, len(tokens))
    positions = np.arange(row.length, row.length + len(tokens))
    chunk = chunk_at(spec, positions, draft.dtype)
    x = embed(owner.embedding, own(padded(tokens), jnp.int32)) * spec.input_embedding_scale
    for layer, reach, one in zip(weights.layers, draft_reaches(spec), row.held, strict=True):
        assert isinstance(one, Attention)
        x, _ = attention_pass(layer, chunk, reach, positions, x, one)
    return np.asarray(draft_head(spec, weights.norm, owner.head, chunk, x))[1 : len(tokens)]


@eqx.filter_jit
def draft_head(
    spec: DraftSpec,
    norm: Norm,
    head: Float[Array, "vocabulary hidden"],
    chunk: Chunk,
    x: Float[Array, "tokens hidden"],
) -> Float[Array, "tokens vocabulary"]:
    """Apply the draft's last norm and the target's head."""
    return each(lambda token: _scaled(spec, product(head, rms_norm(norm, token))), chunk.count, x)


def _scaled(spec: DraftSpec, logits: Float[Array, " vocabulary"]) -> Float[Array, " vocabulary"]:
    logits = logits * spec.output_multiplier
    if spec.logit_softcap is not None:
        logits = jnp.tanh(logits / spec.logit_softcap) * spec.logit_softcap
    return logits
