"""Targets of random weights for benchmarks: as large as one asks for, of one kind of layer or of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn.config import TargetSpec, parse_target
from dflash_fn.load import load_pair
from dflash_fn.records import Pair

__all__ = ["KINDS", "SIZES", "config_of", "random_pair", "shapes_of"]

SIZES = {"layers": 4, "hidden": 1024, "inner": 3584, "heads": 8, "kv_heads": 2, "head_dim": 256, "vocab": 4096}
"""Layers of Qwen3.5-0.8B, four of them."""

KINDS = {
    "full": ("qwen3", ["full_attention"]),
    "sliding": ("qwen3", ["sliding_attention"]),
    "delta": ("qwen3_5_text", ["linear_attention"]),
    "hybrid": ("qwen3_5_text", ["linear_attention"] * 3 + ["full_attention"]),
}
"""By name: the model type, and the kinds of layers, repeated."""


def config_of(
    kind: str,
    *,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    window: int = 512,
) -> dict[str, Any]:
    """Return the config.json of a model of a kind of `KINDS`; its gated delta nets are those of Qwen3.5-0.8B."""
    family, kinds = KINDS[kind]
    sliding = {"use_sliding_window": True, "sliding_window": window} if kind == "sliding" else {}
    delta = {"linear_num_key_heads": 16, "linear_num_value_heads": 16} if family == "qwen3_5_text" else {}
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": True,
        "layer_types": [kinds[layer % len(kinds)] for layer in range(layers)],
        **sliding,
        **delta,
    }


def shapes_of(spec: TargetSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint without biases whose head is tied."""
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    made: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    attention = {
        "self_attn.q_proj.weight": (spec.num_heads * dim * (2 if spec.output_gate else 1), hidden),
        "self_attn.k_proj.weight": (spec.num_kv_heads * dim, hidden),
        "self_attn.v_proj.weight": (spec.num_kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, spec.num_heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }
    rest = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for layer, kind in enumerate(spec.layer_kinds):
        mixer = _delta_net(spec) if kind.value == "linear_attention" else attention
        made |= {f"model.layers.{layer}.{name}": shape for name, shape in (mixer | rest).items()}
    return made


def _delta_net(spec: TargetSpec) -> dict[str, tuple[int, ...]]:
    sizes, hidden = spec.delta, spec.hidden_size
    assert sizes is not None
    return {
        "linear_attn.in_proj_qkv.weight": (sizes.channels, hidden),
        "linear_attn.in_proj_z.weight": (sizes.values, hidden),
        "linear_attn.in_proj_b.weight": (sizes.value_heads, hidden),
        "linear_attn.in_proj_a.weight": (sizes.value_heads, hidden),
        "linear_attn.out_proj.weight": (hidden, sizes.values),
        "linear_attn.conv1d.weight": (sizes.channels, 1, sizes.kernel),
        "linear_attn.A_log": (sizes.value_heads,),
        "linear_attn.dt_bias": (sizes.value_heads,),
        "linear_attn.norm.weight": (sizes.value_dim,),
    }


def random_pair(port: str, kind: str, folder: Path, **sizes: int) -> Pair:
    """Write a checkpoint of a kind below a folder and load it, without a draft, in float32 on the port's CPU."""
    from safetensors.numpy import save_file

    config = config_of(kind, **sizes)
    rng, place = np.random.default_rng(0), folder / kind
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = shapes_of(parse_target(config))
    save_file(
        {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()},
        place / "model.safetensors",
    )
    return load_pair(place, port=port, dtype="float32", device="cpu")
