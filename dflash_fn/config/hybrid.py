"""What hybrids have that other families do not: wrapped configs, gated delta nets, and the layers in between."""

from __future__ import annotations

from typing import Any

from dflash_fn import errors
from dflash_fn.config.fields import Fields
from dflash_fn.config.specs import DeltaSpec, LayerKind

__all__ = ["alternating_kinds", "delta_sizes", "refuse_hybrid_options", "text_fields"]

TEXT = "text_config"
OUTER = ("eos_token_id", "generation_eos_token_id", "tie_word_embeddings", "quantization", "quantization_config")
"""Keys that count beside `text_config`, and before what stands in it."""

FALLBACK = ("architectures", "dtype", "torch_dtype")
"""Keys that count beside `text_config` where they do not stand in it."""

INTERVAL = 4
"""Without a list of kinds, every fourth layer is full attention."""


def text_fields(fields: Fields) -> Fields:
    """Return the fields of a model's text part: those of `text_config` where a config wraps one, else all of them.

    What describes other parts of the model, such as its vision tower, is left out.
    """
    if not fields.has(TEXT):
        return fields
    text = dict(fields.table(TEXT))
    paths = dict.fromkeys(text, f"{TEXT}.")
    outer = [key for key in OUTER if fields.has(key)]
    outer += [key for key in FALLBACK if fields.has(key) and text.get(key) is None]
    for key in outer:
        text[key] = fields.values[key]
        paths.pop(key, None)
    return Fields(text, fields.name, paths, f"{TEXT}.")


def delta_sizes(fields: Fields) -> DeltaSpec:
    """Read the sizes of the gated delta nets; absent keys get the defaults of transformers' `Qwen3_5TextConfig`."""
    keys = fields.integer("linear_num_key_heads", 16)
    values = fields.integer("linear_num_value_heads", 32)
    if values % keys:
        raise fields.bad("linear_num_value_heads", f"a multiple of linear_num_key_heads, which is {keys}")
    return DeltaSpec(
        key_heads=keys,
        value_heads=values,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
    )


def alternating_kinds(fields: Fields) -> tuple[LayerKind, ...]:
    """Apply the rule where `layer_types` is absent: the last of every `full_attention_interval` layers sees all."""
    interval = fields.integer("full_attention_interval", INTERVAL)
    count = fields.integer("num_hidden_layers")
    return tuple(LayerKind.DELTA if (layer + 1) % interval else LayerKind.FULL for layer in range(count))


def refuse_hybrid_options(fields: Fields) -> None:
    """Refuse options of this family that change what is computed."""
    expected: dict[str, Any] = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "num_experts": 0}
    for key, value in expected.items():
        if fields.has(key) and fields.values[key] != value:
            raise fields.unsupported(key, f"supported is {value!r}")
    if fields.has("layer_types") and fields.has("full_attention_interval"):
        derived = [kind.value for kind in alternating_kinds(fields)]
        if list(fields.sequence("layer_types")) != derived:
            # transformers reads the list and mlx-lm the interval, so there is no telling which one is meant
            raise errors.ConfigError(
                f"{fields.label('full_attention_interval')}: got {fields.values['full_attention_interval']}, "
                "which contradicts layer_types; remove one of the two"
            )
