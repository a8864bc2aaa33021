"""The draft's training pass: many blocks of one text at once, none of which sees another or anything at its anchor.

It is the same function of the weights as `dflash_fn_torch.draft`, with gradients and without a cache. What a slot sees
is built in, not masked out of something larger: the keys of a block are the context before its anchor and its own
slots, so another block's slots are nowhere to be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dflash_fn.config import DraftSpec
from dflash_fn_torch.attention import Reach
from dflash_fn_torch.draft import draft_sights
from dflash_fn_torch.ops import rms_norm, rope_at, rotate

__all__ = ["Parameters", "context_of", "draft_hidden", "first_attention", "own_mask", "past_mask"]

Parameters = Mapping[str, Tensor]
"""A draft's weights in upstream's names."""


@dataclass(frozen=True, slots=True)
class Angles:
    """cos and sin (negated in its first half) of context and block positions."""

    context: tuple[Tensor, Tensor]
    block: tuple[Tensor, Tensor]


def past_mask(
    reach: Reach, anchors: Integer[Tensor, "texts blocks"], slots: int, length: int
) -> Bool[Tensor, "texts blocks slots length"]:
    """Return which context positions each slot sees: those before its block's anchor, within the layer's window."""
    place = torch.arange(length, device=anchors.device)
    query = anchors[:, :, None, None] + torch.arange(slots, device=anchors.device)[:, None]
    seen = (place < anchors[:, :, None, None]).expand(-1, -1, slots, -1)
    return seen if reach.window is None else seen & (query - place < reach.window)


def own_mask(reach: Reach, slots: int, device: torch.device) -> Bool[Tensor, "slots slots"]:
    """Return which slots of its own block each slot sees: all, or in a causal layer those up to itself."""
    slot = torch.arange(slots, device=device)
    distance = slot[:, None] - slot
    seen = distance >= 0 if reach.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if reach.window is None else seen & (distance.abs() < reach.window)


def context_of(
    spec: DraftSpec, weights: Parameters, features: Float[Tensor, "texts length tapped"]
) -> Float[Tensor, "texts length hidden"]:
    """Return what every layer makes its keys and values of the context from."""
    return rms_norm(F.linear(features, weights["fc.weight"]), weights["hidden_norm.weight"], spec.norm_eps)


def draft_hidden(
    spec: DraftSpec,
    weights: Parameters,
    features: Float[Tensor, "texts length tapped"],
    block: Float[Tensor, "texts blocks slots hidden"],
    anchors: Integer[Tensor, "texts blocks"],
) -> Float[Tensor, "texts blocks drafted hidden"]:
    """Return what goes into the head for the slots after each anchor.

    Args:
        spec: of the draft.
        weights: of the draft.
        features: context features of every position of each text; what stands at or after an anchor is never read
            for its block.
        block: embeddings of each block's tokens: the anchor's, then the mask token's.
        anchors: position of each block's anchor.

    Guarantees:
        P21: for one block it is the port's `draft_context` and `draft_pass`, but for rounding; no output depends on
            another block, nor on a feature at or after its anchor.

    Source:
        arXiv 2602.06036, section 4, "random anchor sampling".
    """
    context = context_of(spec, weights, features)
    angles = _angles(spec, features, anchors, block.shape[2])
    x = block * spec.input_embedding_scale if spec.input_embedding_scale != 1.0 else block
    reaches = draft_sights(spec).reaches
    masks = {reach: _bias(reach, anchors, block.shape[2], features.shape[1]) for reach in set(reaches)}
    for layer, reach in enumerate(reaches):
        x = _layer(spec, weights, f"layers.{layer}", x, context, angles, masks[reach])
    return rms_norm(x[:, :, 1:], weights["norm.weight"], spec.norm_eps)


def first_attention(
    spec: DraftSpec,
    weights: Parameters,
    features: Float[Tensor, "texts length tapped"],
    block: Float[Tensor, "texts blocks slots hidden"],
    anchors: Integer[Tensor, "texts blocks"],
) -> Float[Tensor, "texts blocks slots hidden"]:
    """Return what the first layer's attention adds to each slot; the arguments are those of `draft_hidden`."""
    context = context_of(spec, weights, features)
    bias = _bias(draft_sights(spec).reaches[0], anchors, block.shape[2], features.shape[1])
    h = rms_norm(block, weights["layers.0.input_layernorm.weight"], spec.norm_eps)
    return _attention(
        spec, weights, "layers.0.self_attn", h, context, _angles(spec, features, anchors, block.shape[2]), bias
    )


def _angles(spec: DraftSpec, features: Tensor, anchors: Tensor, slots: int) -> Angles:
    texts, length, device = features.shape[0], features.shape[1], features.device
    # cloned: tables that an inference pass made first cannot be kept for a gradient
    cos, sin = (table.clone() for table in rope_at(spec.rope, (0,), length + slots, torch.float32, str(device)))
    places = (anchors[:, :, None] + torch.arange(slots, device=device)).flatten(1)
    context = [table[:, :length].expand(texts, -1, -1, -1) for table in (cos, sin)]
    return Angles((context[0], context[1]), (cos[0][places], sin[0][places]))


def _bias(reach: Reach, anchors: Tensor, slots: int, length: int) -> Tensor:
    """What is added to scores, [S, 1, N, 1, B, T + B]: context first, then the block's own slots."""
    past = past_mask(reach, anchors, slots, length)
    own = own_mask(reach, slots, anchors.device).expand(*past.shape[:2], -1, -1)
    seen = torch.cat([past, own], dim=-1)[:, None, :, None]
    return torch.zeros(seen.shape, device=anchors.device).masked_fill_(~seen, -torch.inf)


def _layer(
    spec: DraftSpec, weights: Parameters, name: str, x: Tensor, context: Tensor, angles: Angles, bias: Tensor
) -> Tensor:
    """Run one layer over all blocks of all texts."""
    h = rms_norm(x, weights[f"{name}.input_layernorm.weight"], spec.norm_eps)
    x = x + _attention(spec, weights, f"{name}.self_attn", h, context, angles, bias)
    h = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], spec.norm_eps)
    gate = F.linear(h, weights[f"{name}.mlp.gate_proj.weight"])
    up = F.linear(h, weights[f"{name}.mlp.up_proj.weight"])
    return x + F.linear(F.silu(gate) * up, weights[f"{name}.mlp.down_proj.weight"])


def _attention(
    spec: DraftSpec, weights: Parameters, name: str, h: Tensor, context: Tensor, angles: Angles, bias: Tensor
) -> Tensor:
    texts, blocks, slots, _ = h.shape
    groups = spec.num_heads // spec.num_kv_heads
    flat = h.flatten(1, 2)
    q = _heads(spec, weights, f"{name}.q", flat, angles.block)
    # [S, kv_heads, N, group, B, dim]: query heads that share keys side by side, a block's slots together
    q = q.view(texts, blocks, slots, spec.num_kv_heads, groups, -1).permute(0, 3, 1, 4, 2, 5)
    own_k, own_v = (_split(_kv(spec, weights, name, kind, flat, angles.block), blocks) for kind in "kv")
    past_k, past_v = (_kv(spec, weights, name, kind, context, angles.context).transpose(1, 2) for kind in "kv")
    scores = torch.cat([_past(q, past_k.transpose(2, 3)), _own(q, own_k.transpose(3, 4))], dim=-1)
    shares = torch.softmax(scores.float() * spec.head_dim**-0.5 + bias, dim=-1).to(q.dtype)
    length = past_k.shape[2]
    y = _past(shares[..., :length], past_v) + _own(shares[..., length:], own_v)
    return F.linear(y.permute(0, 2, 4, 1, 3, 5).reshape(texts, blocks, slots, -1), weights[f"{name}.o_proj.weight"])


def _past(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [S, kv, N, g, B, x] with what all blocks of a text share, [S, kv, x, y]."""
    return torch.matmul(left.flatten(2, 4), right).view(*left.shape[:-1], right.shape[-1])


def _own(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [S, kv, N, g, B, x] with what each block has for itself, [S, kv, N, x, y]."""
    return torch.matmul(left.flatten(3, 4), right).view(*left.shape[:-1], right.shape[-1])


def _split(heads: Tensor, blocks: int) -> Tensor:
    """[S, N * B, kv, dim] to [S, kv, N, B, dim]."""
    return heads.unflatten(1, (blocks, -1)).permute(0, 3, 1, 2, 4)


def _kv(spec: DraftSpec, weights: Parameters, name: str, kind: str, h: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    if kind == "k":
        return _heads(spec, weights, f"{name}.k", h, angles)
    return F.linear(h, weights[f"{name}.v_proj.weight"]).unflatten(-1, (-1, spec.head_dim))


def _heads(spec: DraftSpec, weights: Parameters, name: str, h: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Return normalised and turned heads, [S, tokens, heads, dim]."""
    heads = F.linear(h, weights[f"{name}_proj.weight"]).unflatten(-1, (-1, spec.head_dim))
    return rotate(rms_norm(heads, weights[f"{name}_norm.weight"], spec.norm_eps), *angles)
