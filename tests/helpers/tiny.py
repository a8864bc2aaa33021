"""Tiny random targets and drafts: checkpoint folders in transformers' and upstream's formats, made with numpy alone.

A design is a value that says everything about a model, its seed included, so that the same design is the same file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import dflash_fn
from dflash_fn.port import Port
from dflash_fn.records import Pair

__all__ = ["Checkpoints", "DraftDesign", "TargetDesign", "draft_tensors", "target_tensors", "write_checkpoint"]

GAIN = 3.0
"""How much louder than usual the layers are, so that they, and not the last token's embedding, decide what follows."""


@dataclass(frozen=True)
class TargetDesign:
    """A target of the family `llama`, `qwen3`, or `qwen3_5`, whose every `interval`-th layer is attention.

    `forgets` is how many times as fast as usual the states of a hybrid forget, and `swings` how much more the token
    decides on it.
    """

    seed: int = 19
    family: str = "llama"
    layers: int = 2
    hidden: int = 32
    inner: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    vocab: int = 48
    tied: bool = False
    bias: bool = False
    rope: str = "default"
    window: int | None = None
    max_context: int = 4096
    eos: tuple[int, ...] = ()
    interval: int = 2
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    kernel: int = 4
    forgets: float = 1.0
    swings: float = 1.0

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        config = {
            "architectures": [CLASSES[self.family]],
            "model_type": "qwen3_5_text" if self.family == "qwen3_5" else self.family,
            "attention_bias": self.bias,
            "eos_token_id": list(self.eos),
            "tie_word_embeddings": self.tied,
            **_decoder_config(self),
        }
        if self.window is not None:
            kinds = ["sliding_attention" if layer % 2 else "full_attention" for layer in range(self.layers)]
            config |= {"layer_types": kinds, "sliding_window": self.window, "use_sliding_window": True}
        if self.family == "qwen3_5":
            scaling = config.pop("rope_scaling", {"rope_type": "default"})
            config |= {
                "rope_parameters": {**scaling, "rope_theta": config.pop("rope_theta"), "partial_rotary_factor": 0.5},
                "full_attention_interval": self.interval,
                "linear_num_key_heads": self.key_heads,
                "linear_num_value_heads": self.value_heads,
                "linear_key_head_dim": self.key_dim,
                "linear_value_head_dim": self.value_dim,
                "linear_conv_kernel_dim": self.kernel,
            }
        return config

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Layers that are gated delta nets."""
        layers = range(self.layers) if self.family == "qwen3_5" else ()
        return tuple(layer for layer in layers if (layer + 1) % self.interval)


CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}


@dataclass(frozen=True)
class DraftDesign:
    """A draft for a target; every other layer slides where there is a window."""

    target: TargetDesign = field(default_factory=TargetDesign)
    seed: int = 1
    layers: int = 2
    inner: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 4
    taps: tuple[int, ...] = (0, 1)
    mask: int = 3
    rope: str = "default"
    window: int | None = None
    causal: bool | None = None
    max_context: int = 4096

    @property
    def hidden(self) -> int:
        """The target's."""
        return self.target.hidden

    @property
    def vocab(self) -> int:
        """The target's."""
        return self.target.vocab

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "attention_bias": False,
            "block_size": self.block_size,
            "num_target_layers": self.target.layers,
            "dflash_config": {"mask_token_id": self.mask, "target_layer_ids": list(self.taps)},
            **_decoder_config(self),
        }
        if self.window is not None:
            kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(self.layers)]
            config |= {"layer_types": kinds, "sliding_window": self.window, "use_sliding_window": True}
        if self.causal is not None:
            config["is_causal"] = self.causal
        return config


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 100.0},
    "llama3": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn": {
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
}


def _decoder_config(design: TargetDesign | DraftDesign) -> dict[str, Any]:
    return {
        "hidden_size": design.hidden,
        "intermediate_size": design.inner,
        "num_hidden_layers": design.layers,
        "num_attention_heads": design.heads,
        "num_key_value_heads": design.kv_heads,
        "head_dim": design.head_dim,
        "vocab_size": design.vocab,
        "max_position_embeddings": design.max_context,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "dtype": "float32",
        **ROPES[design.rope],
    }


def target_tensors(design: TargetDesign) -> dict[str, np.ndarray]:
    """Draw a target's weights, in transformers' names."""
    rng = np.random.default_rng([design.seed, 7])
    tensors = {"model.embed_tokens.weight": _matrix(rng, design.vocab, design.hidden, 1.0)}
    for layer in range(design.layers):
        qk_norm, prefix = design.family != "llama", f"model.layers.{layer}"
        if layer in design.delta_layers:
            tensors |= _delta_layer(rng, design, prefix)
        else:
            tensors |= _layer(rng, design, prefix, qk_norm=qk_norm, bias=design.bias)
    tensors["model.norm.weight"] = _norm(rng, design.hidden)
    if design.family == "qwen3_5":
        ends = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
        tensors = {name: x - 1 if name.endswith(ends) else x for name, x in tensors.items()}
    if not design.tied:
        tensors["lm_head.weight"] = _matrix(rng, design.vocab, design.hidden, 1.0)
    return tensors


def draft_tensors(design: DraftDesign) -> dict[str, np.ndarray]:
    """Draw a draft's weights, in upstream's names."""
    rng = np.random.default_rng([design.seed, 11])
    tensors = {"fc.weight": _matrix(rng, design.hidden, design.hidden * len(design.taps), 1.0)}
    for layer in range(design.layers):
        tensors |= _layer(rng, design, f"layers.{layer}", qk_norm=True, bias=False)
    return tensors | {"hidden_norm.weight": _norm(rng, design.hidden), "norm.weight": _norm(rng, design.hidden)}


def _layer(
    rng: np.random.Generator, design: TargetDesign | DraftDesign, prefix: str, *, qk_norm: bool, bias: bool
) -> dict[str, np.ndarray]:
    hidden, inner, dim = design.hidden, design.inner, design.head_dim
    queries, keys = design.heads * dim, design.kv_heads * dim
    gated = isinstance(design, TargetDesign) and design.family == "qwen3_5"
    shapes = {
        "self_attn.q_proj": (queries * (2 if gated else 1), hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    gains = {"self_attn.q_proj": 2.0, "self_attn.o_proj": GAIN, "mlp.down_proj": GAIN}
    made = {f"{name}.weight": _matrix(rng, *shape, gains.get(name, 1.0)) for name, shape in shapes.items()}
    if bias:
        attention = [name for name in shapes if name.startswith("self_attn")]
        made |= {f"{name}.bias": _array(rng.normal(size=shapes[name][0]) / 2) for name in attention}
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim} if qk_norm else {}
    made |= {f"{name}.weight": _norm(rng, size) for name, size in norms.items()}
    return {f"{prefix}.{name}": tensor for name, tensor in made.items()}


def _delta_layer(rng: np.random.Generator, design: TargetDesign, prefix: str) -> dict[str, np.ndarray]:
    hidden, inner, heads = design.hidden, design.inner, design.value_heads
    values = heads * design.value_dim
    channels = 2 * design.key_heads * design.key_dim + values
    shapes = {
        "linear_attn.in_proj_qkv": (channels, hidden),
        "linear_attn.in_proj_z": (values, hidden),
        "linear_attn.in_proj_b": (heads, hidden),
        "linear_attn.in_proj_a": (heads, hidden),
        "linear_attn.out_proj": (hidden, values),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    gains = {"linear_attn.out_proj": GAIN, "mlp.down_proj": GAIN, "linear_attn.in_proj_a": design.swings}
    made = {f"{name}.weight": _matrix(rng, *shape, gains.get(name, 1.0)) for name, shape in shapes.items()}
    made |= {
        "linear_attn.conv1d.weight": _array(rng.normal(size=(channels, 1, design.kernel))),
        "linear_attn.A_log": _array(np.log(design.forgets * rng.uniform(0.01, 2.0, heads))),
        "linear_attn.dt_bias": _array(rng.normal(size=heads)),
        "linear_attn.norm.weight": _norm(rng, design.value_dim),
        "input_layernorm.weight": _norm(rng, hidden),
        "post_attention_layernorm.weight": _norm(rng, hidden),
    }
    return {f"{prefix}.{name}": tensor for name, tensor in made.items()}


def _matrix(rng: np.random.Generator, outputs: int, inputs: int, gain: float) -> np.ndarray:
    return _array(rng.normal(size=(outputs, inputs)) * gain / np.sqrt(inputs))


def _norm(rng: np.random.Generator, size: int) -> np.ndarray:
    return _array(1.0 + rng.normal(size=size) / 8)


def _array(values: np.ndarray) -> np.ndarray:
    # rounded to half precision, so that the model is the same one in float32 and float16
    return values.astype(np.float16).astype(np.float32)


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """Write a checkpoint folder and return it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Checkpoints:
    """Folders and pairs of designs below one root, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: dict[TargetDesign | DraftDesign, Path] = {}
        self.pairs: dict[Any, Pair] = {}

    def folder(self, design: TargetDesign | DraftDesign) -> Path:
        """Return the design's checkpoint folder."""
        if design not in self.folders:
            make = target_tensors if isinstance(design, TargetDesign) else draft_tensors
            folder = self.root / f"{type(design).__name__}-{len(self.folders)}"
            self.folders[design] = write_checkpoint(folder, design.config, make(design))  # pyright: ignore[reportArgumentType]
        return self.folders[design]

    def pair(self, port: Port, design: TargetDesign | DraftDesign, dtype: str = "float32") -> Pair:
        """Load a draft's design with its target, or a target alone."""
        key = (port.name, design, dtype)
        if key not in self.pairs:
            target = design.target if isinstance(design, DraftDesign) else design
            draft = self.folder(design) if isinstance(design, DraftDesign) else None
            self.pairs[key] = dflash_fn.load_pair(self.folder(target), draft, port=port, dtype=dtype)
        return self.pairs[key]


def without_draft(pair: Pair) -> Pair:
    """Return the same target with nobody to guess for it."""
    return replace(pair, draft=None)
