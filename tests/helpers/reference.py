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
    states[-1] = _norm(x, tensors["model.norm.weight"] + _center(spec), spec.norm_eps)
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
    h = _norm(x, part["input_layernorm.weight"] + _center(spec), spec.norm_eps)
    if "linear_attn.A_log" in part:
        x = x + _delta_net(spec, part, h)
        return x + _mlp(spec, part, x)
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
    if spec.output_gate:
        mixed = mixed * _sigmoid(_projected(spec, part, "q", h)[..., spec.head_dim :].reshape(len(x), -1))
    x = x + mixed @ part["self_attn.o_proj.weight"].T + part.get("self_attn.o_proj.bias", 0.0)
    return x + _mlp(spec, part, x)


def _mlp(spec: DecoderSpec, part: Tensors, x: np.ndarray) -> np.ndarray:
    h = _norm(x, part["post_attention_layernorm.weight"] + _center(spec), spec.norm_eps)
    gate, up = h @ part["mlp.gate_proj.weight"].T, h @ part["mlp.up_proj.weight"].T
    return (gate * _sigmoid(gate) * up) @ part["mlp.down_proj.weight"].T


def _delta_net(spec: DecoderSpec, part: Tensors, h: np.ndarray) -> np.ndarray:
    """Follow the recurrence as it is written in the papers, a token and a head at a time."""
    sizes = spec.delta
    assert sizes is not None
    part = _below(part, "linear_attn.")
    mixed, kernel = h @ part["in_proj_qkv.weight"].T, part["conv1d.weight"][:, 0]
    padded = np.concatenate([np.zeros((sizes.kernel - 1, sizes.channels)), mixed])
    seen = np.stack([(padded[t : t + sizes.kernel].T * kernel).sum(axis=1) for t in range(len(h))])
    seen = seen * _sigmoid(seen)
    q, k, v = np.split(seen, [sizes.keys, 2 * sizes.keys], axis=1)
    q, k = (_unit(x.reshape(len(h), sizes.key_heads, sizes.key_dim)) for x in (q, k))
    v = v.reshape(len(h), sizes.value_heads, sizes.value_dim)
    beta = _sigmoid(h @ part["in_proj_b.weight"].T)
    decay = np.exp(-np.exp(part["A_log"]) * np.log1p(np.exp(h @ part["in_proj_a.weight"].T + part["dt_bias"])))
    gate = (h @ part["in_proj_z.weight"].T).reshape(v.shape)
    out, group = np.zeros_like(v), sizes.value_heads // sizes.key_heads
    for head in range(sizes.value_heads):
        state = np.zeros((sizes.key_dim, sizes.value_dim))
        for t in range(len(h)):
            key = k[t, head // group]
            state = decay[t, head] * state
            state = state + np.outer(key, beta[t, head] * (v[t, head] - state.T @ key))
            out[t, head] = state.T @ q[t, head // group] / math.sqrt(sizes.key_dim)
    out = _norm(out, part["norm.weight"], spec.norm_eps) * gate * _sigmoid(gate)
    return out.reshape(len(h), -1) @ part["out_proj.weight"].T


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + 1e-6)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _center(spec: DecoderSpec) -> float:
    """What is added to the weights of norms."""
    return 1.0 if spec.family == "qwen3_5" else 0.0


def _projected(spec: DecoderSpec, part: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    y = x @ part[f"self_attn.{name}_proj.weight"].T + part.get(f"self_attn.{name}_proj.bias", 0.0)
    return y.reshape(len(x), -1, spec.head_dim * (2 if spec.output_gate and name == "q" else 1))


def _heads(spec: DecoderSpec, part: Tensors, name: str, x: np.ndarray, positions: np.ndarray | None) -> np.ndarray:
    y = _projected(spec, part, name, x)[..., : spec.head_dim]
    if positions is None:
        return y
    if spec.qk_norm:
        y = _norm(y, part[f"self_attn.{name}_norm.weight"] + _center(spec), spec.norm_eps)
    cos, sin = (table.astype(np.float64)[:, None] for table in rope_tables(spec.rope, positions))
    left, right, rest = np.split(y, [spec.rope.dim // 2, spec.rope.dim], axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * weight


def _below(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _doubles(tensors: Tensors) -> Tensors:
    return {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
