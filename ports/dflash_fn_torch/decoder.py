"""The target: a pre-norm decoder, run as a function of (spec, weights, cache, tokens)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from jaxtyping import Float, Integer
from torch import Tensor

from dflash_fn.config import DecoderSpec, LayerKind, TargetSpec
from dflash_fn.port import TargetPass
from dflash_fn.records import Model
from dflash_fn_torch import cache as kv
from dflash_fn_torch import gated_delta, parts
from dflash_fn_torch.attention import Reach, Sights, attend, mask, sights
from dflash_fn_torch.fused import Fused, Run, fused_layers, runs
from dflash_fn_torch.gated_delta import DeltaWeights
from dflash_fn_torch.ops import (
    Projection,
    gated_mlp,
    normed_product,
    project,
    rms_norm,
    rope_at,
    rope_tables_to,
    rotate,
    sigmoid,
)
from dflash_fn_torch.panels import Panels

__all__ = ["Chunk", "LayerWeights", "TargetWeights", "chunk_at", "layers_pass", "target_over", "target_pass"]


NO_TAPS: Mapping[int, Tensor] = {}


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
        fused: the layer for our own kernels; None where it runs operation by operation.
    """

    input_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None
    out: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection
    delta: DeltaWeights | None = None
    fused: Fused | None = None


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """Weights of a target.

    Attributes:
        embedding: [V, H].
        layers: the decoder layers.
        norm: [H], before the head.
        head: [V, H], the values of `embedding` where the checkpoint ties them; of a share, a part of the rows.
        places: the device of each layer; None where everything is on one.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor | Panels
    places: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What all layers of a pass share.

    Attributes:
        family: the cache, with the chunk's slots claimed.
        cos: [R, S, 1, turned] of the chunk's positions; where layers are fused, a table of all, [positions, turned].
        sin: the same, negated in its first half.
        spans: attended slots of each kind of attention.
        sights: what the layers see.
        masks: one a reach, in the order of `sights.kinds`.
        groups: into how many parts products are split.
        runs: what fused layers need in place of spans and masks, one a reach; none where layers are not fused.
        places: of each layer among those of its kind.
    """

    family: parts.Family
    cos: Tensor
    sin: Tensor
    spans: dict[LayerKind, kv.Span]
    sights: Sights
    masks: tuple[Tensor, ...]
    groups: int
    runs: tuple[Run, ...]
    places: tuple[int, ...]


def chunk_at(
    spec: DecoderSpec,
    family: parts.Family,
    seen: Sights,
    exact_rows: bool,
    like: Tensor,
    bucket: int = kv.KV_BUCKET,
    fused: Fused | None = None,
) -> Chunk:
    """Prepare a pass over the slots that `family` claims, at the positions that follow its start.

    Args:
        spec: the model's.
        family: of `parts.append`.
        seen: what the layers see; nothing where only the draft's context is written.
        exact_rows: whether products are split by rows.
        like: a tensor of the model's dtype and device.
        bucket: attended lengths are multiples of it.
        fused: of any of the layers that attend, where those are fused.
    """
    starts = family.start.lengths
    slots = family.full.full.lengths[0] - starts[0]
    places, device = parts.places(spec.layer_kinds), str(like.device)
    if fused is not None:
        cos, sin = rope_tables_to(spec.rope, max(starts) + slots, torch.float32, device)
        made = runs(fused, _claims(family, seen, slots), starts, slots, cos, sin)
        return Chunk(family, cos, sin, {}, seen, (), 1, made, places)
    cos, sin = rope_at(spec.rope, starts, slots, like.dtype, device)
    spans = {kind: kv.attended(family.of(kind), bucket) for _, kind in seen.kinds}
    first = torch.tensor(starts, device=like.device)
    masks = []
    for reach, kind in seen.kinds:
        span = spans[kind]
        held = torch.tensor(span.positions, device=like.device)
        masks.append(mask(reach, first, slots, held, span.count, like.dtype))
    return Chunk(family, cos, sin, spans, seen, tuple(masks), len(starts) if exact_rows else 1, (), places)


def _claims(family: parts.Family, seen: Sights, slots: int) -> list[tuple[Reach, tuple[int, ...], int]]:
    """Return of each reach where a chunk's rows begin in its layers' buffer, and that buffer's capacity."""
    fulls = [(reach, family.of(kind).full) for reach, kind in seen.kinds]
    return [(reach, tuple(end - slots for end in kv.slots(full)), full.buffer.capacity) for reach, full in fulls]


def layers_pass(
    spec: DecoderSpec,
    layers: tuple[LayerWeights, ...],
    chunk: Chunk,
    x: Float[Tensor, "tokens hidden"],
    tapped: Mapping[int, Float[Tensor, "tokens hidden"]] = NO_TAPS,
    places: tuple[str, ...] | None = None,
) -> Float[Tensor, "tokens hidden"]:
    """Run all layers over a chunk; what they remember goes into the chunk's family.

    Args:
        spec: the model's.
        layers: its layers; those that follow one another and are fused run together.
        chunk: of `chunk_at`.
        x: what goes into the first; it may be overwritten.
        tapped: by layer, where its output is to be written too.
        places: the device of each layer; None where everything is on one.
    """
    for fused, numbers in itertools.groupby(range(len(layers)), lambda layer: layers[layer].fused is not None):
        if fused:
            x = fused_layers([_stage(spec, layers[layer], layer, chunk, tapped) for layer in numbers], x)
            continue
        for layer in numbers:
            if places is not None:
                x, chunk = moved(x, chunk, places[layer])
            x = _layer_pass(spec, layers[layer], layer, chunk, x)
            if layer in tapped:
                tapped[layer].copy_(x)
    return x


def _stage(
    spec: DecoderSpec, weights: LayerWeights, layer: int, chunk: Chunk, tapped: Mapping[int, Tensor]
) -> tuple[Fused, Run, Tensor, Tensor, Tensor | None]:
    """Return what `fused_layers` takes of a layer."""
    fused, number = weights.fused, chunk.sights.numbers[layer]
    assert fused is not None
    assert number is not None
    buffer, place = chunk.family.of(spec.layer_kinds[layer]).full.buffer, chunk.places[layer]
    return fused, chunk.runs[number], buffer.keys[place], buffer.values[place], tapped.get(layer)


def _layer_pass(
    spec: DecoderSpec, weights: LayerWeights, layer: int, chunk: Chunk, x: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, "tokens hidden"]:
    h = project(rms_norm(x, weights.input_norm, spec.norm_eps), weights.qkv, chunk.groups)
    if weights.delta is None:
        y = _attention(spec, weights, layer, chunk, h)
    else:
        y = _delta_net(spec, weights.delta, layer, chunk, h)
    x = x + project(y, weights.out, chunk.groups)
    h = rms_norm(x, weights.post_norm, spec.norm_eps)
    return x + gated_mlp(h, weights.gate_up, weights.down, chunk.groups)


def _attention(
    spec: DecoderSpec,
    weights: LayerWeights,
    layer: int,
    chunk: Chunk,
    projected: Float[Tensor, "tokens outputs"],
) -> Float[Tensor, "tokens values"]:
    """Write K and V into the slots that the chunk claimed, and attend."""
    q, k, v, gate = _heads(spec, weights, chunk, projected)
    kind, place = spec.layer_kinds[layer], chunk.places[layer]
    family = chunk.family.of(kind)
    keys, values = family.full.buffer.keys[place], family.full.buffer.values[place]
    starts = tuple(end - q.shape[1] for end in kv.slots(family.full))
    kv.write(keys, starts, k)
    kv.write(values, starts, v)
    number = chunk.sights.numbers[layer]
    assert number is not None
    y = attend(q, keys, values, chunk.spans[kind].firsts, chunk.masks[number]).view(len(projected), -1)
    return y if gate is None else y * sigmoid(gate.float()).to(y.dtype)


def _delta_net(
    spec: DecoderSpec,
    weights: DeltaWeights,
    layer: int,
    chunk: Chunk,
    projected: Float[Tensor, "tokens outputs"],
) -> Float[Tensor, "tokens values"]:
    """Run each row over its own state, and keep the tapes."""
    assert spec.delta is not None
    states = chunk.family.start.recent.states[chunk.places[layer]]
    rows = projected.contiguous().unflatten(0, (len(states), -1))
    y, tapes = gated_delta.mix(spec.delta, weights, spec.norm_eps, states, rows)
    chunk.family.tapes.append(tapes)
    return y


def _heads(
    spec: DecoderSpec, weights: LayerWeights, chunk: Chunk, qkv: Float[Tensor, "tokens outputs"]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Split a projection into heads, [R, S, heads, dim] each; normalise and turn queries and keys together.

    Returns:
        queries, keys, values, and the output gate [tokens, heads * dim] where there is one.
    """
    rows, slots = chunk.cos.shape[:2]
    heads = qkv.contiguous().view(rows, slots, -1, spec.head_dim)
    gate = None
    if spec.output_gate:
        both, kv_heads = heads.split([2 * spec.num_heads, 2 * spec.num_kv_heads], dim=2)
        q, gate = both.unflatten(2, (spec.num_heads, 2)).unbind(3)
        heads, gate = torch.cat([q, kv_heads], dim=2), gate.reshape(len(qkv), -1)
    qk, v = heads.split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=2)
    if weights.qk_norm is not None:
        qk = rms_norm(qk, weights.qk_norm, spec.norm_eps)
    q, k = rotate(qk, chunk.cos, chunk.sin).split([spec.num_heads, spec.num_kv_heads], dim=2)
    return q, k, v, gate


def moved(x: Tensor, chunk: Chunk, place: str) -> tuple[Tensor, Chunk]:
    """Return hidden states, and what the layers of a pass share, on the next layer's device.

    Between CUDA devices these are copies in the order of their streams, which the host does not wait for.
    """
    if x.device == torch.device(place):
        return x, chunk
    masks = tuple(mask.to(place) for mask in chunk.masks)
    return x.to(place), replace(chunk, cos=chunk.cos.to(place), sin=chunk.sin.to(place), masks=masks)


def fused_of(layers: tuple[LayerWeights, ...]) -> Fused | None:
    """Return a fused layer's weights if the layers that attend are fused."""
    return next((layer.fused for layer in layers if layer.fused is not None), None)


def target_sights(spec: DecoderSpec) -> Sights:
    """What a target's layers see."""
    return sights(spec.layer_kinds, (True,) * spec.num_layers, spec.sliding_window)


@torch.inference_mode()
def target_pass(
    target: Model[TargetSpec],
    cache: parts.Cache,
    tokens: Integer[Tensor, "rows slots"],
    *,
    taps: tuple[int, ...],
    head: bool,
    exact_rows: bool,
) -> TargetPass:
    """Run the target over a chunk; see `dflash_fn.port.Port.target_pass`."""
    family = parts.append(cache, tokens.shape[1])
    logits, features = target_over(target, family, tokens, taps=taps, head=head, exact_rows=exact_rows)
    return TargetPass(logits, features, family)


def target_over(
    target: Model[TargetSpec],
    family: parts.Family,
    tokens: Integer[Tensor, "rows slots"],
    *,
    taps: tuple[int, ...],
    head: bool,
    exact_rows: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Run the target over a chunk whose slots are claimed; return logits and features, as `TargetPass` has them."""
    spec: TargetSpec = target.spec
    weights: TargetWeights = target.weights
    fused = fused_of(weights.layers)
    chunk = chunk_at(spec, family, target_sights(spec), exact_rows, weights.embedding, fused=fused)
    x = F.embedding(tokens.to(weights.embedding.device), weights.embedding).view(tokens.numel(), -1)
    features = x.new_empty(*tokens.shape, len(taps) * spec.hidden_size, device=weights.norm.device) if taps else None
    tapped = {} if features is None else _columns(features, taps)
    x = layers_pass(spec, weights.layers, chunk, x, tapped, weights.places).to(weights.norm.device)
    if spec.num_layers - 1 in tapped:
        tapped[spec.num_layers - 1].copy_(rms_norm(x, weights.norm, spec.norm_eps))
    if not head:
        return None, features
    logits = normed_product(x, weights.norm, spec.norm_eps, weights.head, chunk.groups)
    return logits.view(*tokens.shape, -1), features


def _columns(
    features: Float[Tensor, "rows slots tapped"], taps: tuple[int, ...]
) -> dict[int, Float[Tensor, "tokens hidden"]]:
    """Return by layer the columns of the features that it fills."""
    return dict(zip(taps, features.flatten(0, 1).chunk(len(taps), dim=-1), strict=True))
