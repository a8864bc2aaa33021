"""Targets and drafts in plain numpy, in float64, without cache or padding: what the ports are held against."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dflash_fn.config import DecoderSpec, DraftSpec, LayerKind, TargetSpec, parse_draft, parse_target
from dflash_fn.rope import rope_tables
from tests.helpers.tiny import DraftDesign, TargetDesign, draft_tensors, target_tensors

__all__ = ["draft_logits", "target_hidden_states"]

Tensors = Mapping[str, np.ndarray]


def target_hidden_states(design: TargetDesign, ids: list[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return transformers' `hidden_states` (the last one after the final norm), [T, H] each, and logits [T, V]."""
    spec, tensors = parse_target(design.config), _doubles(target_tensors(design))
    positions = np.arange(len(ids))
    x = tensors["model.embed_tokens.weight"][ids]
    states = [x]
    for layer, kind in enumerate(spec.layer_kinds):
        part = _below(tensors, f"model.layers.{layer}.")
        seen = positions[:, None] >= positions
        if kind is LayerKind.SLIDING:
            assert spec.sliding_window is not None
            seen &= positions[:, None] - positions < spec.sliding_window
        x = _layer(spec, part, x, positions, None, seen)
        states.append(x)
    states[-1] = _norm(x, tensors["model.norm.weight"], spec.norm_eps)
    head = tensors["model.embed_tokens.weight" if spec.tied_head else "lm_head.weight"]
    return states, states[-1] @ head.T


def draft_logits(design: DraftDesign, ids: list[int], size: int, *, shift: int = 0) -> np.ndarray:
    """Return the draft's logits [size - 1, V] for the tokens after `ids`, whose last is the anchor.

    Args:
        design: the draft.
        ids: the text so far.
        size: the block size.
        shift: added to the block's positions, to see what a mistake there would look like.
    """
    spec, tensors = parse_draft(design.config), _doubles(draft_tensors(design))
    owner = _doubles(target_tensors(design.target))
    states, _ = target_hidden_states(design.target, ids[:-1])
    features = np.concatenate([states[layer + 1] for layer in spec.target_layer_ids], axis=-1)
    context = _norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], spec.norm_eps)
    known = np.arange(len(context))
    block = np.arange(size) + len(context) + shift
    x = owner["model.embed_tokens.weight"][[ids[-1], *[spec.mask_token_id] * (size - 1)]]
    for layer, kind in enumerate(spec.layer_kinds):
        distance = block[:, None] - np.concatenate([known, block])
        seen = np.ones_like(distance, dtype=bool)
        if spec.causal[layer]:
            seen &= distance >= 0
        if kind is LayerKind.SLIDING:
            assert spec.sliding_window is not None
            seen &= abs(distance) < spec.sliding_window
        x = _layer(spec, _below(tensors, f"layers.{layer}."), x, block, (context, known), seen)
    x = _norm(x[1:], tensors["norm.weight"], spec.norm_eps)
    head = owner["model.embed_tokens.weight" if design.target.tied else "lm_head.weight"]
    return x @ head.T


def _layer(
    spec: TargetSpec | DraftSpec,
    part: Tensors,
    x: np.ndarray,
    positions: np.ndarray,
    context: tuple[np.ndarray, np.ndarray] | None,
    seen: np.ndarray,
) -> np.ndarray:
    h = _norm(x, part["input_layernorm.weight"], spec.norm_eps)
    q = _heads(spec, part, "q", h, positions)
    k, v = _heads(spec, part, "k", h, positions), _heads(spec, part, "v", h, None)
    if context is not None:
        values, known = context
        k = np.concatenate([_heads(spec, part, "k", values, known), k])
        v = np.concatenate([_heads(spec, part, "v", values, None), v])
    groups = spec.num_heads // spec.num_kv_heads
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(spec.head_dim)
    weights = np.exp(np.where(seen, scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
    x = x + mixed @ part["self_attn.o_proj.weight"].T + part.get("self_attn.o_proj.bias", 0.0)
    h = _norm(x, part["post_attention_layernorm.weight"], spec.norm_eps)
    gate, up = h @ part["mlp.gate_proj.weight"].T, h @ part["mlp.up_proj.weight"].T
    return x + (gate / (1.0 + np.exp(-gate)) * up) @ part["mlp.down_proj.weight"].T


def _heads(spec: DecoderSpec, part: Tensors, name: str, x: np.ndarray, positions: np.ndarray | None) -> np.ndarray:
    y = x @ part[f"self_attn.{name}_proj.weight"].T + part.get(f"self_attn.{name}_proj.bias", 0.0)
    y = y.reshape(len(x), -1, spec.head_dim)
    if positions is None:
        return y
    if spec.qk_norm:
        y = _norm(y, part[f"self_attn.{name}_norm.weight"], spec.norm_eps)
    cos, sin = (table.astype(np.float64)[:, None] for table in rope_tables(spec.rope, positions))
    left, right = np.split(y, 2, axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * weight


def _below(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _doubles(tensors: Tensors) -> Tensors:
    return {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
