"""The DFlash v1 draft: context features become K and V of every layer, then one pass fills a block of masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from jaxtyping import Float, Integer
from torch import Tensor

from dflash_fn.config import DraftSpec, TargetSpec
from dflash_fn.records import Model
from dflash_fn_torch import cache as kv
from dflash_fn_torch import parts
from dflash_fn_torch.attention import Sights, sights
from dflash_fn_torch.decoder import Chunk, LayerWeights, TargetWeights, chunk_at, fused_of, layers_pass
from dflash_fn_torch.fused import Fused, place_context
from dflash_fn_torch.ops import Projection, normed_product, normed_project, project, rms_norm, rotate

__all__ = ["DraftWeights", "block_over", "context_over", "draft_context", "draft_pass"]

BLOCK_BUCKET = 64
"""Attended lengths of a block are multiples of this: a guess needs no bits that are the same at every length."""

NOTHING = Sights((), (), ())
"""What a pass sees that only writes the context."""


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
        context_fused: what our own kernels do with the context's keys and values, a layer each; None without them.
    """

    fuse: Projection
    context_norm: Tensor
    context_kv: Projection
    context_k_norm: Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    context_fused: tuple[Fused, ...] | None = None


@torch.inference_mode()
def draft_context(
    draft: Model[DraftSpec],
    cache: parts.Cache,
    features: Float[Tensor, "rows slots tapped"],
    counts: tuple[int, ...],
    *,
    exact_rows: bool,
) -> parts.Cache:
    """Let the draft read context features; see `dflash_fn.port.Port.draft_context`."""
    family = parts.append(cache, features.shape[1])
    context_over(draft, family, features, exact_rows=exact_rows)
    return parts.select(family, counts)


def context_over(
    draft: Model[DraftSpec], family: parts.Family, features: Float[Tensor, "rows slots tapped"], *, exact_rows: bool
) -> None:
    """Let the draft read context features into slots that are claimed."""
    spec: DraftSpec = draft.spec
    weights: DraftWeights = draft.weights
    rows, slots, width = features.shape
    placed = weights.context_fused or ()
    chunk = chunk_at(
        spec,
        family,
        draft_sights(spec) if placed else NOTHING,
        exact_rows,
        weights.norm,
        fused=placed[0] if placed else None,
    )
    fused = project(features.reshape(rows * slots, width), weights.fuse, chunk.groups)
    heads = normed_project(fused, weights.context_norm, spec.norm_eps, weights.context_kv, chunk.groups).contiguous()
    if placed:
        _place(spec, placed, chunk, heads.float())
    else:
        _write(spec, weights, chunk, heads.view(rows, slots, -1))


def _place(spec: DraftSpec, weights: tuple[Fused, ...], chunk: Chunk, heads: Float[Tensor, "tokens outputs"]) -> None:
    layers = []
    for layer, (kind, place) in enumerate(zip(spec.layer_kinds, chunk.places, strict=True)):
        buffer, number = chunk.family.of(kind).full.buffer, chunk.sights.numbers[layer]
        assert number is not None
        layers.append((weights[layer], chunk.runs[number], buffer.keys[place], buffer.values[place]))
    place_context(layers, heads)


def _write(spec: DraftSpec, weights: DraftWeights, chunk: Chunk, heads: Float[Tensor, "rows slots outputs"]) -> None:
    """Normalise and turn the keys of all layers together, and write them and the values into the claimed slots."""
    rows, slots, _ = heads.shape
    k, v = heads.view(rows, slots, spec.num_layers, 2, spec.num_kv_heads, spec.head_dim).unbind(3)
    k = k.reshape(rows, slots, -1, spec.head_dim)
    if weights.context_k_norm is not None:
        k = rms_norm(k, weights.context_k_norm, spec.norm_eps)
    k = rotate(k, chunk.cos, chunk.sin).view(v.shape)
    for layer, (kind, place) in enumerate(zip(spec.layer_kinds, chunk.places, strict=True)):
        claimed = chunk.family.of(kind).full
        starts = tuple(end - slots for end in kv.slots(claimed))
        kv.write(claimed.buffer.keys[place], starts, k[:, :, layer])
        kv.write(claimed.buffer.values[place], starts, v[:, :, layer])


def draft_sights(spec: DraftSpec) -> Sights:
    """What each layer's slots see: the whole block unless the layer is causal, and its window if it slides."""
    return sights(spec.layer_kinds, spec.causal, spec.sliding_window)


@torch.inference_mode()
def draft_pass(
    draft: Model[DraftSpec],
    target: Model[TargetSpec],
    cache: parts.Cache,
    block: Integer[Tensor, "rows slots"],
    *,
    exact_rows: bool,
) -> Float[Tensor, "rows drafted vocabulary"]:
    """Fill a block; see `dflash_fn.port.Port.draft_pass`."""
    # The block's own K and V are written behind the context and forgotten with this family.
    return block_over(draft, target, parts.append(cache, block.shape[1]), block, exact_rows=exact_rows)


def block_over(
    draft: Model[DraftSpec],
    target: Model[TargetSpec],
    family: parts.Family,
    block: Integer[Tensor, "rows slots"],
    *,
    exact_rows: bool,
) -> Float[Tensor, "rows drafted vocabulary"]:
    """Fill a block whose slots are claimed; return the logits of the slots after the anchor."""
    spec: DraftSpec = draft.spec
    weights: DraftWeights = draft.weights
    owner: TargetWeights = target.weights
    seen = draft_sights(spec)
    chunk = chunk_at(spec, family, seen, exact_rows, weights.norm, BLOCK_BUCKET, fused_of(weights.layers))
    x = F.embedding(block.to(owner.embedding.device), owner.embedding).to(block.device).view(block.numel(), -1)
    if spec.input_embedding_scale != 1.0:
        x = x * spec.input_embedding_scale
    x = layers_pass(spec, weights.layers, chunk, x)
    rows, slots = block.shape
    guesses = x.view(rows, slots, -1)[:, 1:].reshape(rows * (slots - 1), -1)
    logits = normed_product(guesses, weights.norm, spec.norm_eps, owner.head, chunk.groups)
    return _scaled(spec, logits).view(rows, slots - 1, -1)


def _scaled(spec: DraftSpec, logits: Float[Tensor, "tokens vocabulary"]) -> Float[Tensor, "tokens vocabulary"]:
    if spec.output_multiplier != 1.0:
        logits = logits * spec.output_multiplier
    if spec.logit_softcap is not None:
        logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
    return logits
