"""The DFlash v1 draft: context features become K and V of every layer, then one pass fills a block of masks."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from jaxtyping import Float, Integer

from dflash_fn.config import DraftSpec, LayerKind, TargetSpec
from dflash_fn.records import Model
from dflash_fn_mlx import cache as kv
from dflash_fn_mlx import parts
from dflash_fn_mlx.attention import Reach
from dflash_fn_mlx.decoder import LayerWeights, TargetWeights, chunk_at, layer_pass
from dflash_fn_mlx.ops import Projection, dtype_of, embed, product, project, rms_norm, rotate

__all__ = ["DraftWeights", "draft_context", "draft_pass"]


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Weights of a draft, whose embedding and head are the target's.

    Attributes:
        fuse: [H, L * H], what context features go through first (`fc` in checkpoints).
        context_norm: [H], and then through this (`hidden_norm`).
        context_kv: keys and values of all layers, which read the same features: [layers * 2 * kv_heads * dim, H].
        context_k_norm: [layers * kv_heads, dim], the key heads' norm weights; None without such norms.
        layers: the decoder layers, for the block.
        norm: [H], before the head.
    """

    fuse: Projection
    context_norm: mx.array
    context_kv: Projection
    context_k_norm: mx.array | None
    layers: tuple[LayerWeights, ...]
    norm: mx.array


def draft_context(
    draft: Model[DraftSpec],
    cache: parts.Cache,
    features: Float[mx.array, "rows slots tapped"],
    counts: tuple[int, ...],
    *,
    exact_rows: bool,
) -> parts.Cache:
    """Let the draft read context features; see `dflash_fn.port.Port.draft_context`."""
    spec: DraftSpec = draft.spec
    weights: DraftWeights = draft.weights
    rows, slots, width = features.shape
    family = parts.append(cache, slots)
    chunk = chunk_at(spec, family, [], exact_rows, dtype_of(draft))
    fused = project(features.reshape(rows * slots, width), weights.fuse, chunk.groups)
    context = rms_norm(fused, weights.context_norm, spec.norm_eps)
    heads = project(context, weights.context_kv, chunk.groups)
    heads = heads.reshape(rows, slots, spec.num_layers, 2, spec.num_kv_heads, spec.head_dim)
    k, v = heads[:, :, :, 0].reshape(rows, slots, -1, spec.head_dim), heads[:, :, :, 1]
    if weights.context_k_norm is not None:
        k = rms_norm(k, weights.context_k_norm, spec.norm_eps)
    k = rotate(k, chunk.cos, chunk.sin).reshape(v.shape)
    stored = []
    for layer, (kind, place) in enumerate(zip(spec.layer_kinds, parts.places(spec.layer_kinds), strict=True)):
        claimed = family.of(kind).full
        starts = tuple(end - slots for end in kv.slots(claimed))
        keys = kv.write(claimed.buffer.keys[place], starts, k[:, :, layer])
        stored.append((keys, kv.write(claimed.buffer.values[place], starts, v[:, :, layer])))
    parts.commit(family, stored)
    return parts.select(family, counts)


def draft_reaches(spec: DraftSpec) -> list[Reach]:
    """What each layer's slots see: the whole block unless the layer is causal, and its window if it slides."""
    return [
        Reach(causal, spec.sliding_window if kind is LayerKind.SLIDING else None)
        for kind, causal in zip(spec.layer_kinds, spec.causal, strict=True)
    ]


def draft_pass(
    draft: Model[DraftSpec],
    target: Model[TargetSpec],
    cache: parts.Cache,
    block: Integer[mx.array, "rows slots"],
    *,
    exact_rows: bool,
) -> Float[mx.array, "rows drafted vocabulary"]:
    """Fill a block; see `dflash_fn.port.Port.draft_pass`."""
    spec: DraftSpec = draft.spec
    weights: DraftWeights = draft.weights
    owner: TargetWeights = target.weights
    reaches = draft_reaches(spec)
    # The block's own K and V are written behind the context and forgotten with this family.
    family = parts.append(cache, block.shape[1])
    chunk = chunk_at(spec, family, reaches, exact_rows, dtype_of(draft))
    x, stored = embed(block, owner.embedding, chunk.cos.dtype), []
    if spec.input_embedding_scale != 1.0:
        x = x * spec.input_embedding_scale
    for index, reach in enumerate(reaches):
        x, held = layer_pass(spec, weights.layers[index], index, chunk, reach, x)
        stored.append(held)
    rows, slots = block.shape
    last = rms_norm(x.reshape(rows, slots, -1)[:, 1:], weights.norm, spec.norm_eps)
    logits = product(last.reshape(rows * (slots - 1), -1), owner.head, chunk.groups)
    made = _scaled(spec, logits).reshape(rows, slots - 1, -1)
    parts.commit(family, stored, made)
    return made


def _scaled(spec: DraftSpec, logits: Float[mx.array, "tokens vocabulary"]) -> Float[mx.array, "tokens vocabulary"]:
    if spec.output_multiplier != 1.0:
        logits = logits * spec.output_multiplier
    if spec.logit_softcap is not None:
        logits = mx.tanh(logits / spec.logit_softcap) * spec.logit_softcap
    return logits
