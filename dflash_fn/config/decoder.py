"""The keys that targets and drafts have in common: what makes a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_fn import errors
from dflash_fn.config.fields import Fields, shown
from dflash_fn.config.hybrid import alternating_kinds, delta_sizes, refuse_hybrid_options
from dflash_fn.config.rope import parse_rope
from dflash_fn.config.specs import LayerKind

__all__ = ["FAMILIES", "MODEL_TYPES", "Family", "architectures", "decoder_values", "is_draft"]


@dataclass(frozen=True, slots=True)
class Family:
    """What transformers' config class of a `model_type` fills in for absent keys.

    Attributes:
        architectures: the classes that checkpoints name.
        num_kv_heads: key and value heads; None for as many as query heads.
        head_dim: dimensions of a head; None for `hidden_size` over heads.
        max_context: `max_position_embeddings`.
        eos: ids that end an answer.
        qk_norm: whether queries and keys are normalised; not a key, but what the class does.
        rotary: share of a head that rotates.
        kinds: of the layers that it may have.
    """

    architectures: tuple[str, ...]
    num_kv_heads: int | None
    head_dim: int | None
    max_context: int
    eos: tuple[int, ...]
    qk_norm: bool
    rotary: float = 1.0
    kinds: tuple[LayerKind, ...] = (LayerKind.FULL, LayerKind.SLIDING)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(("LlamaForCausalLM",), None, None, 2048, (2,), qk_norm=False),
    "qwen3": Family(("Qwen3ForCausalLM",), 32, 128, 32768, (), qk_norm=True),
    "qwen3_5": Family(
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        4,
        256,
        32768,
        (),
        qk_norm=True,
        rotary=0.25,
        kinds=(LayerKind.FULL, LayerKind.DELTA),
    ),
}
"""The families that the decoders run."""

MODEL_TYPES: Mapping[str, str] = {name: name for name in FAMILIES} | {"qwen3_5_text": "qwen3_5"}
"""The family of each `model_type`: Qwen3.5's text part names itself apart from the model that it is a part of."""

DTYPES = ("float32", "bfloat16", "float16")

QWEN3_WINDOW = 4096
QWEN3_MAX_WINDOW_LAYERS = 28


def is_draft(fields: Fields) -> bool:
    """Whether a config has any of the three marks of a DFlash draft."""
    named = any(architecture.startswith("DFlash") for architecture in architectures(fields))
    return named or fields.has("dflash_config") or fields.has("target_layer_ids")


def architectures(fields: Fields) -> tuple[str, ...]:
    """List the classes that a config names; none where it names none."""
    names = fields.sequence("architectures") if fields.has("architectures") else ()
    if not all(isinstance(architecture, str) for architecture in names):
        raise fields.bad("architectures", "a list of names")
    return names


def decoder_values(fields: Fields, family: str) -> dict[str, Any]:
    """Read the keys that make a `DecoderSpec`, as arguments for it or a subclass."""
    refuse_options(fields)
    heads, kv_heads, head_dim = head_sizes(fields, FAMILIES[family])
    max_context = fields.integer("max_position_embeddings", FAMILIES[family].max_context)
    kinds, window = layer_kinds(fields, family)
    hybrid = family == "qwen3_5"
    if hybrid:
        refuse_hybrid_options(fields)
    return {
        "family": family,
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size"),
        "max_context": max_context,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": parse_rope(fields, head_dim=head_dim, max_context=max_context, rotary=FAMILIES[family].rotary),
        "layer_kinds": kinds,
        "sliding_window": window,
        "qk_norm": FAMILIES[family].qk_norm,
        "attention_bias": fields.flag("attention_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
        "dtype": dtype(fields),
        "quantization": quantization(fields),
        "delta": delta_sizes(fields) if LayerKind.DELTA in kinds else None,
        "output_gate": hybrid,
    }


def refuse_options(fields: Fields) -> None:
    """Refuse options that change what is computed and that no decoder here knows."""
    if fields.has("hidden_act") and fields.values["hidden_act"] != "silu":
        raise fields.unsupported("hidden_act", "supported is silu")
    if fields.has("per_layer_config"):
        raise fields.unsupported("per_layer_config", "layers of different sizes are not supported")


def head_sizes(fields: Fields, family: Family) -> tuple[int, int, int]:
    """Read query heads, key and value heads, and dimensions of a head."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    # an explicit null means "as many as query heads" in both families; only an absent key gets qwen3's 32
    fallback = heads if "num_key_value_heads" in fields.values else family.num_kv_heads or heads
    kv_heads = fields.integer("num_key_value_heads", fallback)
    if heads % kv_heads:
        raise errors.ConfigError(
            f"{fields.label('num_attention_heads')}: got {heads}, expected a multiple of num_key_value_heads, "
            f"which is {kv_heads}{'' if fields.has('num_key_value_heads') else ' by default'}"
        )
    if fields.has("head_dim"):
        return heads, kv_heads, fields.integer("head_dim")
    if family.head_dim is not None and "head_dim" not in fields.values:
        return heads, kv_heads, family.head_dim
    if hidden % heads:
        raise fields.bad("hidden_size", f"a multiple of num_attention_heads, which is {heads}, or a head_dim")
    return heads, kv_heads, hidden // heads


def layer_kinds(fields: Fields, family: str) -> tuple[tuple[LayerKind, ...], int | None]:
    """Read what mixes tokens in each layer, and the window of those that slide."""
    known = FAMILIES[family].kinds
    kinds = listed_kinds(fields, known) if fields.has("layer_types") else derived_kinds(fields, family)
    if LayerKind.SLIDING not in kinds:
        return kinds, None
    if family == "llama":
        raise fields.unsupported("layer_types", "supported for llama is full_attention")
    # transformers takes an absent flag for false and drops the window; a window that is given must count
    if not fields.flag("use_sliding_window", True):
        raise fields.bad("use_sliding_window", "true, since layer_types has sliding_attention")
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        raise fields.bad("sliding_window", "an integer of at least 1, since layer_types has sliding_attention")
    return kinds, fields.integer("sliding_window", QWEN3_WINDOW)


def listed_kinds(fields: Fields, known: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """Read the kinds that `layer_types` lists."""
    count, names = fields.integer("num_hidden_layers"), fields.sequence("layer_types")
    if len(names) != count:
        raise fields.bad("layer_types", f"{count} entries, as num_hidden_layers says, not {len(names)}")
    words = [kind.value for kind in known]
    for layer, kind in enumerate(names):
        if kind not in words:
            raise fields.unsupported("layer_types", f"layer {layer} is {shown(kind)}, supported are {', '.join(words)}")
    return tuple(LayerKind(kind) for kind in names)


def derived_kinds(fields: Fields, family: str) -> tuple[LayerKind, ...]:
    """Apply a family's rule where `layer_types` is absent; Qwen3's layers slide from `max_window_layers` on."""
    if LayerKind.DELTA in FAMILIES[family].kinds:
        return alternating_kinds(fields)
    count = fields.integer("num_hidden_layers")
    window_given = "sliding_window" not in fields.values or fields.has("sliding_window")
    if family == "llama" or not fields.flag("use_sliding_window", False) or not window_given:
        return (LayerKind.FULL,) * count
    first = fields.integer("max_window_layers", QWEN3_MAX_WINDOW_LAYERS, minimum=0)
    return tuple(LayerKind.SLIDING if layer >= first else LayerKind.FULL for layer in range(count))


def dtype(fields: Fields) -> str:
    """Read the checkpoint's dtype; `dtype` is the newer name and counts before `torch_dtype`."""
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.values[key] if fields.has(key) else "float32"
    if value not in DTYPES:
        raise fields.unsupported(key, f"supported are {', '.join(DTYPES)}")
    return value


def quantization(fields: Fields) -> str | None:
    """Name the format that matrices are stored in; mlx's has no name in config.json, and often stands there twice."""
    key = "quantization" if fields.has("quantization") else "quantization_config"
    table = fields.table(key)
    if not table:
        return None
    if "quant_method" not in table and not {"group_size", "bits"} <= table.keys():
        raise fields.unsupported(key, "quantised weights need a quant_method, or mlx's group_size and bits")
    return str(table.get("quant_method", "mlx"))
