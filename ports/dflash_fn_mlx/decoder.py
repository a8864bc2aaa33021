"""The target: a pre-norm decoder, run as a function of (spec, weights, cache, tokens)."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from jaxtyping import Float, Integer

from dflash_fn.config import DecoderSpec, LayerKind, TargetSpec
from dflash_fn.port import TargetPass
from dflash_fn.records import Model
from dflash_fn_mlx import cache as kv
from dflash_fn_mlx.attention import Reach, attend, masks
from dflash_fn_mlx.ops import Projection, embed, gated_mlp, product, project, rms_norm, rope_at, rotate
from dflash_fn_mlx.quantized import Matrix

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

    input_norm: mx.array
    qkv: Projection
    qk_norm: mx.array | None
    out: Projection
    post_norm: mx.array
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """Weights of a target; `head` is `embedding` where the checkpoint ties them."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    norm: mx.array
    head: Matrix


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
    cos: mx.array
    sin: mx.array
    masks: dict[Reach, mx.array]
    groups: int


def chunk_at(spec: DecoderSpec, family: kv.Family, reaches: set[Reach], exact_rows: bool) -> Chunk:
    """Prepare a pass over the slots that `family` claims, at the positions that follow its start."""
    starts, ends = family.start.lengths, family.full.lengths
    slots = ends[0] - starts[0]
    cos, sin = rope_at(spec.rope, starts, slots, family.full.buffer.keys[0].dtype)
    made = masks(reaches, mx.array(starts), slots, kv.attended(family.full))
    return Chunk(family, cos, sin, made, len(starts) if exact_rows else 1)


def layer_pass(
    spec: DecoderSpec,
    weights: LayerWeights,
    layer: int,
    chunk: Chunk,
    reach: Reach,
    x: Float[mx.array, "tokens hidden"],
) -> tuple[Float[mx.array, "tokens hidden"], tuple[mx.array, mx.array]]:
    """Run one layer over a chunk; return what it makes of x, and its K and V with the chunk's in the claimed slots."""
    h = rms_norm(x, weights.input_norm, spec.norm_eps)
    q, k, v = _heads(spec, weights, chunk, project(h, weights.qkv, chunk.groups))
    buffer, starts = chunk.family.full.buffer, chunk.family.start.lengths
    keys = kv.write(buffer.keys[layer], starts, k)
    values = kv.write(buffer.values[layer], starts, v)
    y = attend(q, keys, values, chunk.masks[reach])
    x = x + project(y.reshape(x.shape[0], -1), weights.out, chunk.groups)
    h = rms_norm(x, weights.post_norm, spec.norm_eps)
    return x + gated_mlp(h, weights.gate_up, weights.down, chunk.groups), (keys, values)


def _heads(
    spec: DecoderSpec, weights: LayerWeights, chunk: Chunk, qkv: Float[mx.array, "tokens outputs"]
) -> tuple[mx.array, mx.array, mx.array]:
    """Split a projection into heads, [R, S, heads, dim] each; normalise and turn queries and keys together."""
    rows, slots = chunk.cos.shape[:2]
    qk, v = mx.split(qkv.reshape(rows, slots, -1, spec.head_dim), [spec.num_heads + spec.num_kv_heads], axis=2)
    if weights.qk_norm is not None:
        qk = rms_norm(qk, weights.qk_norm, spec.norm_eps)
    q, k = mx.split(rotate(qk, chunk.cos, chunk.sin), [spec.num_heads], axis=2)
    return q, k, v


def target_reach(spec: DecoderSpec, kind: LayerKind) -> Reach:
    """What a target's layer of this kind sees."""
    return Reach(causal=True, window=spec.sliding_window if kind is LayerKind.SLIDING else None)


def target_pass(
    target: Model[TargetSpec],
    cache: kv.Cache,
    tokens: Integer[mx.array, "rows slots"],
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
    x = embed(tokens, weights.embedding, chunk.cos.dtype)
    tapped, stored = {}, []
    for layer, reach in enumerate(reaches):
        x, held = layer_pass(spec, weights.layers[layer], layer, chunk, reach, x)
        stored.append(held)
        if layer in taps:
            tapped[layer] = x
    last = rms_norm(x, weights.norm, spec.norm_eps)
    if spec.num_layers - 1 in tapped:
        tapped[spec.num_layers - 1] = last
    features = mx.concatenate([tapped[i] for i in taps], axis=-1).reshape(*tokens.shape, -1) if taps else None
    logits = product(last, weights.head, chunk.groups).reshape(*tokens.shape, -1) if head else None
    kv.commit(family, stored, logits, features)
    return TargetPass(logits, features, family)
