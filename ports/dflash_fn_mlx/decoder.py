"""The target: a pre-norm decoder, run as a function of (spec, weights, cache, tokens)."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from jaxtyping import Float, Integer

from dflash_fn.config import DecoderSpec, LayerKind, TargetSpec
from dflash_fn.port import TargetPass
from dflash_fn.records import Model
from dflash_fn_mlx import cache as kv
from dflash_fn_mlx import gated_delta, parts
from dflash_fn_mlx.attention import Reach, attend, mask
from dflash_fn_mlx.gated_delta import DeltaWeights
from dflash_fn_mlx.ops import Projection, dtype_of, embed, gated_mlp, product, project, rms_norm, rope_at, rotate
from dflash_fn_mlx.quantized import Matrix

__all__ = ["Chunk", "LayerWeights", "TargetWeights", "chunk_at", "layer_pass", "target_pass"]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer: a token mixer and an MLP.

    Attributes:
        input_norm: [H].
        qkv: queries, keys and values, [(heads + 2 kv_heads) * dim, H]; with an output gate each head's rows of it
            follow those of its query. In a gated delta net queries, keys and values, gate, and what makes b and d.
        qk_norm: [heads + kv_heads, dim], the heads' norm weights laid out a head a row; None without such norms.
        out: [H, heads * dim], or [H, all values].
        post_norm: [H].
        gate_up: gate and up, [2 * intermediate, H].
        down: [H, intermediate].
        delta: the rest of a gated delta net; None where the layer is attention.
    """

    input_norm: mx.array
    qkv: Projection
    qk_norm: mx.array | None
    out: Projection
    post_norm: mx.array
    gate_up: Projection
    down: Projection
    delta: DeltaWeights | None = None


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
        cos: [R, S, 1, turned] of the chunk's positions.
        sin: the same, negated in its first half.
        spans: attended slots of each kind of attention.
        masks: one a reach.
        groups: into how many parts products are split.
    """

    family: parts.Family
    cos: mx.array
    sin: mx.array
    spans: dict[LayerKind, kv.Span]
    masks: dict[Reach, mx.array]
    groups: int


def chunk_at(
    spec: DecoderSpec,
    family: parts.Family,
    reaches: list[Reach],
    exact_rows: bool,
    dtype: mx.Dtype,
) -> Chunk:
    """Prepare a pass over the slots that `family` claims, at the positions that follow its start.

    Args:
        spec: the model's.
        family: of `parts.append`.
        reaches: one a layer; none where nothing attends.
        exact_rows: whether products are split by rows.
        dtype: the model's.
    """
    starts = family.start.lengths
    slots = family.full.full.lengths[0] - starts[0]
    cos, sin = rope_at(spec.rope, starts, slots, dtype)
    spans = {kind: kv.attended(family.of(kind)) for kind in set(spec.layer_kinds) - {LayerKind.DELTA}}
    made = {}
    for kind, reach in set(zip(spec.layer_kinds, reaches, strict=False)):
        if kind is not LayerKind.DELTA:
            span = spans[kind]
            made[reach] = mask(reach, mx.array(starts), slots, mx.array(span.positions), span.count)
    return Chunk(family, cos, sin, spans, made, len(starts) if exact_rows else 1)


def layer_pass(
    spec: DecoderSpec,
    weights: LayerWeights,
    layer: int,
    chunk: Chunk,
    reach: Reach,
    x: Float[mx.array, "tokens hidden"],
) -> tuple[Float[mx.array, "tokens hidden"], tuple[mx.array, mx.array] | None]:
    """Run one layer over a chunk.

    Returns:
        what it makes of x, and its K and V with the chunk's in the claimed slots; those of a gated delta net are None,
        and its tapes go into the chunk's family.
    """
    stored, h = None, project(rms_norm(x, weights.input_norm, spec.norm_eps), weights.qkv, chunk.groups)
    if weights.delta is None:
        y, stored = _attention(spec, weights, layer, chunk, reach, h)
    else:
        y = _delta_net(spec, weights.delta, layer, chunk, h)
    x = x + project(y, weights.out, chunk.groups)
    h = rms_norm(x, weights.post_norm, spec.norm_eps)
    return x + gated_mlp(h, weights.gate_up, weights.down, chunk.groups), stored


def _attention(
    spec: DecoderSpec,
    weights: LayerWeights,
    layer: int,
    chunk: Chunk,
    reach: Reach,
    projected: Float[mx.array, "tokens outputs"],
) -> tuple[Float[mx.array, "tokens values"], tuple[mx.array, mx.array]]:
    """Put K and V into the slots that the chunk claimed, and attend."""
    q, k, v, gate = _heads(spec, weights, chunk, projected)
    kind, place = spec.layer_kinds[layer], parts.places(spec.layer_kinds)[layer]
    family = chunk.family.of(kind)
    starts = tuple(end - q.shape[1] for end in kv.slots(family.full))
    keys = kv.write(family.full.buffer.keys[place], starts, k)
    values = kv.write(family.full.buffer.values[place], starts, v)
    y = attend(q, keys, values, chunk.spans[kind].firsts, chunk.masks[reach]).reshape(len(projected), -1)
    return y if gate is None else y * mx.sigmoid(gate), (keys, values)


def _delta_net(
    spec: DecoderSpec,
    weights: DeltaWeights,
    layer: int,
    chunk: Chunk,
    projected: Float[mx.array, "tokens outputs"],
) -> Float[mx.array, "tokens values"]:
    """Run each row apart over its own state, and keep the tapes."""
    assert spec.delta is not None
    states = chunk.family.start.recent.states[parts.places(spec.layer_kinds)[layer]]
    rows = mx.split(projected, len(states))
    made = [
        gated_delta.mix(spec.delta, weights, spec.norm_eps, state, row) for state, row in zip(states, rows, strict=True)
    ]
    chunk.family.tapes.append(tuple(tape for _, tape in made))
    return mx.concatenate([y for y, _ in made])


def _heads(
    spec: DecoderSpec, weights: LayerWeights, chunk: Chunk, qkv: Float[mx.array, "tokens outputs"]
) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """Split a projection into heads, [R, S, heads, dim] each; normalise and turn queries and keys together.

    Returns:
        queries, keys, values, and the output gate [tokens, heads * dim] where there is one.
    """
    rows, slots = chunk.cos.shape[:2]
    heads = qkv.reshape(rows, slots, -1, spec.head_dim)
    gate = None
    if spec.output_gate:
        both, kv_heads = mx.split(heads, [2 * spec.num_heads], axis=2)
        q, gate = both[:, :, ::2], both[:, :, 1::2].reshape(len(qkv), -1)
        heads = mx.concatenate([q, kv_heads], axis=2)
    qk, v = mx.split(heads, [spec.num_heads + spec.num_kv_heads], axis=2)
    if weights.qk_norm is not None:
        qk = rms_norm(qk, weights.qk_norm, spec.norm_eps)
    q, k = mx.split(rotate(qk, chunk.cos, chunk.sin), [spec.num_heads], axis=2)
    return q, k, v, gate


def target_reach(spec: DecoderSpec, kind: LayerKind) -> Reach:
    """What a target's layer of this kind sees."""
    return Reach(causal=True, window=spec.sliding_window if kind is LayerKind.SLIDING else None)


def target_pass(
    target: Model[TargetSpec],
    cache: parts.Cache,
    tokens: Integer[mx.array, "rows slots"],
    *,
    taps: tuple[int, ...],
    head: bool,
    exact_rows: bool,
) -> TargetPass:
    """Run the target over a chunk; see `dflash_fn.port.Port.target_pass`."""
    spec: TargetSpec = target.spec
    weights: TargetWeights = target.weights
    family = parts.append(cache, tokens.shape[1])
    reaches = [target_reach(spec, kind) for kind in spec.layer_kinds]
    chunk = chunk_at(spec, family, reaches, exact_rows, dtype_of(target))
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
    parts.commit(family, stored, logits, features)
    return TargetPass(logits, features, family)
