"""The DFlash v1 draft: context features become K and V of every layer, then one pass fills a block of masks."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from dflash_fn.config import DraftSpec, LayerKind, TargetSpec
from dflash_fn.records import Model
from dflash_fn_jax import cache as kv
from dflash_fn_jax.attention import Reach, spans
from dflash_fn_jax.decoder import (
    Chunk,
    LayerWeights,
    TargetWeights,
    chunk_at,
    context_heads,
    embed,
    layer_pass,
    positions_after,
    write,
)
from dflash_fn_jax.ops import Projection, each, own, product, project, rms_norm, scope

__all__ = ["DraftWeights", "draft_context", "draft_pass"]


class DraftWeights(eqx.Module):
    """Weights of a draft, whose embedding and head are the target's.

    Attributes:
        fuse: [H, L * H], what context features go through first (`fc` in checkpoints).
        context_norm: [H], and then through this (`hidden_norm`).
        layers: the decoder layers.
        norm: [H], before the head.
    """

    fuse: Projection
    context_norm: Array
    layers: tuple[LayerWeights, ...]
    norm: Array


@eqx.filter_jit
def fuse(
    spec: DraftSpec, weights: DraftWeights, features: Float[Array, "tokens tapped"]
) -> Float[Array, "tokens hidden"]:
    """Make one vector of a token's tapped hidden states."""
    return each(lambda x: rms_norm(project(weights.fuse, x), weights.context_norm, spec.norm_eps), features)


@eqx.filter_jit
def layer_context(
    spec: DraftSpec,
    weights: LayerWeights,
    chunk: Chunk,
    context: Float[Array, "tokens hidden"],
    keys: Array,
    values: Array,
) -> tuple[Array, Array]:
    """Return a layer's keys and values with those of the context at their positions."""
    k, v = each(lambda token: context_heads(spec, weights, *token), (context, chunk.cos, chunk.sin))
    return write(keys, chunk, k), write(values, chunk, v)


def draft_context(
    draft: Model[DraftSpec],
    cache: kv.Cache,
    features: Float[np.ndarray, "rows slots tapped"],
    counts: tuple[int, ...],
) -> kv.Cache:
    """Let the draft read context features; see `dflash_fn.port.Port.draft_context`."""
    spec: DraftSpec = draft.spec
    weights: DraftWeights = draft.weights
    rows, slots, width = features.shape
    cache = kv.roomy(cache, slots)
    keys, values = list(cache.keys), list(cache.values)
    with scope(draft.dtype):
        chunk = chunk_at(spec, positions_after(cache.lengths, slots), draft.dtype)
        context = fuse(spec, weights, own(features.reshape(rows * slots, width)))
        for i, layer in enumerate(weights.layers):
            keys[i], values[i] = layer_context(spec, layer, chunk, context, keys[i], values[i])
    return kv.select(kv.family(cache, slots, keys, values), counts)


def draft_reaches(spec: DraftSpec) -> list[Reach]:
    """What each layer's slots see: the whole block unless the layer is causal, and its window if it slides."""
    return [
        Reach(causal, spec.sliding_window if kind is LayerKind.SLIDING else None)
        for kind, causal in zip(spec.layer_kinds, spec.causal, strict=True)
    ]


@eqx.filter_jit
def fill(
    spec: DraftSpec, weights: DraftWeights, head: Float[Array, "vocabulary hidden"], x: Float[Array, "tokens hidden"]
) -> Float[Array, "tokens vocabulary"]:
    """Return the logits of a block's slots."""
    return each(lambda token: _scaled(spec, product(head, rms_norm(token, weights.norm, spec.norm_eps))), x)


def draft_pass(
    draft: Model[DraftSpec], target: Model[TargetSpec], cache: kv.Cache, block: Integer[np.ndarray, "rows slots"]
) -> Float[np.ndarray, "rows drafted vocabulary"]:
    """Fill a block; see `dflash_fn.port.Port.draft_pass`."""
    spec: DraftSpec = draft.spec
    weights: DraftWeights = draft.weights
    owner: TargetWeights = target.weights
    # The block's own K and V are written behind the context and forgotten with these arrays.
    cache = kv.roomy(cache, block.shape[1])
    positions = positions_after(cache.lengths, block.shape[1])
    with scope(draft.dtype):
        chunk = chunk_at(spec, positions, draft.dtype)
        x = embed(owner.embedding, own(block.reshape(-1), jnp.int32)) * spec.input_embedding_scale
        for i, reach in enumerate(draft_reaches(spec)):
            span = own(spans(reach, positions, positions[:, -1] + 1).reshape(-1, 2))
            x, _, _ = layer_pass(spec, weights.layers[i], chunk, span, x, cache.keys[i], cache.values[i])
        logits = fill(spec, weights, owner.head, x)
    return np.asarray(logits).reshape(*block.shape, -1)[:, 1:]


def _scaled(spec: DraftSpec, logits: Float[Array, " vocabulary"]) -> Float[Array, " vocabulary"]:
    logits = logits * spec.output_multiplier
    if spec.logit_softcap is not None:
        logits = jnp.tanh(logits / spec.logit_softcap) * spec.logit_softcap
    return logits
