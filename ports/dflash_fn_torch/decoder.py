"""The target: a pre-norm decoder, run as a function of (spec, weights, cache, tokens)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from jaxtyping import Float, Integer
from torch import Tensor

from dflash_fn.config import DecoderSpec, LayerKind, TargetSpec
from dflash_fn.port import TargetPass
from dflash_fn.records import Model
from dflash_fn_torch import cache as kv
from dflash_fn_torch.attention import Reach, attend, masks
from dflash_fn_torch.ops import Projection, gated_mlp, product, project, rms_norm, rope_at, rotate

__all__ = ["Chunk", "LayerWeights", "TargetWeights", "chunk_at", "layer_pass", "target_pass"]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one attention and MLP layer.

    Attributes:
        input_norm: [H].
        qkv: queries, keys and values, [(heads + 2 kv_heads) * dim, H].
        qk_norm: [heads + kv_heads, dim], the heads' norm weights laid out a head a row; None without such norms.
        out: [H, heads * dim].
        post_norm: [H].
        gate_up: gate and up, [2 * intermediate, H].
        down: [H, intermediate].
    """

    input_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None
    out: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """Weights of a target; `head` holds the values of `embedding` where the checkpoint ties them."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """What all layers of a pass share.

    Attributes:
        family: the cache, with the chunk's slots claimed.
        cos: [R, S, 1, dim] of the chunk's positions.
        sin: the same, negated in its first half.
        masks: one a kind of layer.
        groups: into how many parts products are split.
    """

    family: kv.Family
    cos: Tensor
    sin: Tensor
    masks: dict[Reach, Tensor]
    groups: int


def chunk_at(
    spec: DecoderSpec, family: kv.Family, reaches: set[Reach], exact_rows: bool, bucket: int = kv.KV_BUCKET
) -> Chunk:
    """Prepare a pass over the slots that `family` claims, at the positions that follow its start."""
    starts, ends = family.start.lengths, family.full.lengths
    store = family.full.buffer.keys[0]
    slots = ends[0] - starts[0]
    cos, sin = rope_at(spec.rope, starts, slots, store.dtype, str(store.device))
    made = masks(
        reaches, torch.tensor(starts, device=store.device), slots, kv.attended(family.full, bucket), store.dtype
    )
    return Chunk(family, cos, sin, made, len(starts) if exact_rows else 1)


def layer_pass(
    spec: DecoderSpec,
    weights: LayerWeights,
    layer: int,
    chunk: Chunk,
    reach: Reach,
    x: Float[Tensor, "tokens hidden"],
) -> Float[Tensor, "tokens hidden"]:
    """Run one layer over a chunk; its K and V go into the slots that the chunk claimed."""
    h = rms_norm(x, weights.input_norm, spec.norm_eps)
    q, k, v = _heads(spec, weights, chunk, project(h, weights.qkv, chunk.groups))
    buffer, starts = chunk.family.full.buffer, chunk.family.start.lengths
    kv.write(buffer.keys[layer], starts, k)
    kv.write(buffer.values[layer], starts, v)
    y = attend(q, buffer.keys[layer], buffer.values[layer], chunk.masks[reach])
    x = x + project(y.view(x.shape[0], -1), weights.out, chunk.groups)
    h = rms_norm(x, weights.post_norm, spec.norm_eps)
    return x + gated_mlp(h, weights.gate_up, weights.down, chunk.groups)


def _heads(
    spec: DecoderSpec, weights: LayerWeights, chunk: Chunk, qkv: Float[Tensor, "tokens outputs"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into heads, [R, S, heads, dim] each; normalise and turn queries and keys together."""
    rows, slots = chunk.cos.shape[:2]
    heads = qkv.contiguous().view(rows, slots, -1, spec.head_dim)
    qk, v = heads.split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=2)
    if weights.qk_norm is not None:
        qk = rms_norm(qk, weights.qk_norm, spec.norm_eps)
    q, k = rotate(qk, chunk.cos, chunk.sin).split([spec.num_heads, spec.num_kv_heads], dim=2)
    return q, k, v


def target_reach(spec: DecoderSpec, kind: LayerKind) -> Reach:
    """What a target's layer of this kind sees."""
    return Reach(causal=True, window=spec.sliding_window if kind is LayerKind.SLIDING else None)


@torch.inference_mode()
def target_pass(
    target: Model[TargetSpec],
    cache: kv.Cache,
    tokens: Integer[Tensor, "rows slots"],
    *,
    taps: tuple[int, ...],
    head: bool,
    exact_rows: bool,
) -> TargetPass:
    """Run the target over a chunk; see `dflash_fn.port.Port.target_pass`."""
    spec: TargetSpec = target.spec
    weights: TargetWeights = target.weights
    family = kv.append(cache, tokens.shape[1])
    reaches = [target_reach(spec, kind) for kind in spec.layer_kinds]
    chunk = chunk_at(spec, family, set(reaches), exact_rows)
    x = F.embedding(tokens, weights.embedding).view(tokens.numel(), -1)
    tapped = {}
    for layer, reach in enumerate(reaches):
        x = layer_pass(spec, weights.layers[layer], layer, chunk, reach, x)
        if layer in taps:
            tapped[layer] = x
    last = rms_norm(x, weights.norm, spec.norm_eps)
    if spec.num_layers - 1 in tapped:
        tapped[spec.num_layers - 1] = last
    features = torch.cat([tapped[i] for i in taps], dim=-1).view(*tokens.shape, -1) if taps else None
    logits = product(last, weights.head, chunk.groups).view(*tokens.shape, -1) if head else None
    return TargetPass(logits, features, family)
