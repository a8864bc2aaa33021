"""The draft to be trained: its config.json, and its weights before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_fn.config import DraftSpec
from dflash_fn.train.checks import check_draft
from dflash_fn.train.options import DraftOptions
from dflash_fn.train.order import normal
from dflash_fn_torch.train.checkpoint import read_named

__all__ = ["draft_config", "random_weights", "with_copied_layers"]

SPREAD = 0.02
"""Standard deviation of matrices that start from random numbers."""


def draft_config(options: DraftOptions, target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a draft for a target, in upstream's format.

    Heads, norms and the rotary base are the target's.

    Raises:
        InputError: a tap, a layer to copy or a mask token that the target does not have.
    """
    depth, heads = target["num_hidden_layers"], target["num_attention_heads"]
    check_draft(options, depth, target["vocab_size"])
    rope = target.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or target.get("rope_theta") or 10000.0
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": options.inner or target["intermediate_size"],
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": target.get("num_key_value_heads") or heads,
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": target["rms_norm_eps"],
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * options.layers,
        "max_window_layers": options.layers,
        "eos_token_id": target.get("eos_token_id"),
        "dtype": "bfloat16",
        "num_target_layers": depth,
        "block_size": options.block_size,
        "dflash_config": {"mask_token_id": options.mask_token_id, "target_layer_ids": list(options.taps)},
    }


def random_weights(spec: DraftSpec, seed: int) -> dict[str, Tensor]:
    """Return weights in upstream's names: normal matrices, norms of 1, outputs of 0, so that layers begin silent."""
    made = {
        name: torch.from_numpy(normal(seed, f"draft {name}", *shape) * SPREAD) if len(shape) == 2 else torch.ones(shape)
        for name, shape in _shapes(spec).items()
    }
    silent = {name for name in made if "o_proj" in name or "down_proj" in name}
    return {name: torch.zeros_like(one) if name in silent else one for name, one in made.items()}


def _shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_heads * dim, spec.num_kv_heads * dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    ends = {"fc": (hidden, hidden * len(spec.target_layer_ids)), "hidden_norm": (hidden,), "norm": (hidden,)}
    layers = {f"layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in (ends | layers).items()}


def with_copied_layers(
    weights: dict[str, Tensor], spec: DraftSpec, options: DraftOptions, folder: Path, scales: np.ndarray
) -> dict[str, Tensor]:
    """Return weights whose layers are copies of target layers, and whose `fc` takes the mean of the taps.

    Args:
        weights: to start from; what has another shape in the target stays as it is there.
        spec: of the draft.
        options: which layers.
        folder: of the target.
        scales: [L] root mean square of each tap, so that all weigh alike.
    """
    made = dict(weights)
    for own, layer in enumerate(options.start_layers):
        names = {f"layers.{own}.{part}": f"layers.{layer}.{part}" for part in _parts(weights)}
        found = read_named(folder, *names.values())
        for name, theirs in names.items():
            if theirs in found and found[theirs].shape == weights[name].shape:
                made[name] = found[theirs].clone()
    norm = read_named(folder, "norm.weight").get("norm.weight")
    made["norm.weight"] = made["norm.weight"] if norm is None else norm.clone()
    eye = torch.eye(spec.hidden_size)
    made["fc.weight"] = torch.cat([eye / (float(scale) * len(scales)) for scale in scales], dim=1)
    norms = [made[f"layers.{layer}.input_layernorm.weight"] for layer in range(spec.num_layers)]
    made["hidden_norm.weight"] = torch.stack(norms).mean(dim=0)
    return made


def _parts(weights: Mapping[str, Tensor]) -> list[str]:
    return [name.removeprefix("layers.0.") for name in weights if name.startswith("layers.0.")]
