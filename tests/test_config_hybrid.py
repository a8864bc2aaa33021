"""Configs of hybrids: as transformers writes them, alone and wrapped, and as mlx-lm holds them in memory."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_fn.config import DeltaSpec, LayerKind, parse_target
from dflash_fn.errors import ConfigError, UnsupportedModel

DELTA, FULL = LayerKind.DELTA, LayerKind.FULL

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "dtype": "bfloat16",
}


def wrapped(**outer: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": TEXT,
        "vision_config": {"hidden_size": 7, "model_type": "qwen3_5"},
        **outer,
    }


def test_a_text_model():
    spec = parse_target(TEXT)
    assert (spec.family, spec.qk_norm, spec.output_gate, spec.dtype) == ("qwen3_5", True, True, "bfloat16")
    assert spec.layer_kinds == (DELTA, DELTA, DELTA, FULL, DELTA)
    assert (spec.layers_of(FULL), spec.layers_of(DELTA)) == ((3,), (0, 1, 2, 4))
    assert spec.delta == DeltaSpec(key_heads=2, value_heads=6, key_dim=16, value_dim=24, kernel=3)
    assert spec.delta is not None
    assert (spec.delta.keys, spec.delta.values, spec.delta.channels) == (32, 144, 208)
    assert (spec.rope.dim, spec.rope.theta, spec.sliding_window) == (16, 1e7, None)


def test_a_wrapped_model_is_its_text_part():
    assert parse_target(wrapped()) == parse_target(TEXT)


def test_a_wrapper_as_mlx_lm_holds_it():
    assert parse_target({"model_type": "qwen3_5", "text_config": TEXT}) == parse_target(TEXT)
    assert parse_target({"model_type": "qwen3_5", "text_config": {**TEXT, "model_type": "qwen3_5"}}) == parse_target(
        TEXT
    )


def test_keys_beside_the_text_part():
    spec = parse_target(wrapped(eos_token_id=[5, 6], generation_eos_token_id=7, tie_word_embeddings=True))
    assert (spec.eos_token_ids, spec.tied_head) == ((5, 6, 7), True)
    assert parse_target(wrapped(dtype="float16")).dtype == "bfloat16"


def test_keys_inside_the_text_part():
    text = {**TEXT, "eos_token_id": 4, "tie_word_embeddings": True}
    spec = parse_target(wrapped(text_config=text))
    assert (spec.eos_token_ids, spec.tied_head) == ((4,), True)


def test_defaults_are_those_of_transformers():
    kept = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    spec = parse_target({key: TEXT[key] for key in kept})
    assert spec.delta == DeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
    assert (spec.head_dim, spec.num_kv_heads, spec.rope.dim, spec.max_context) == (256, 4, 64, 32768)


def test_the_interval_of_full_attention():
    assert parse_target({**TEXT, "full_attention_interval": 2}).layer_kinds == (DELTA, FULL, DELTA, FULL, DELTA)


def test_listed_layers():
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
    assert parse_target({**TEXT, "layer_types": kinds}).layer_kinds == (FULL, DELTA, DELTA, FULL, DELTA)


def test_a_model_without_delta_nets_has_no_sizes_of_them():
    assert parse_target({**TEXT, "layer_types": ["full_attention"] * 5}).delta is None


ERRORS = [
    (
        {"linear_num_value_heads": 5},
        ConfigError,
        "linear_num_value_heads: got 5, expected a multiple of linear_num_key_heads, which is 2",
    ),
    ({"linear_conv_kernel_dim": 1}, ConfigError, "linear_conv_kernel_dim: got 1, expected an integer of at least 2"),
    ({"attn_output_gate": False}, UnsupportedModel, "attn_output_gate: got false; supported is True"),
    ({"mamba_ssm_dtype": "bfloat16"}, UnsupportedModel, "mamba_ssm_dtype: got \"bfloat16\"; supported is 'float32'"),
    ({"num_experts": 8}, UnsupportedModel, "num_experts: got 8; supported is 0"),
    (
        {"layer_types": ["sliding_attention"] * 5},
        UnsupportedModel,
        'layer 0 is "sliding_attention", supported are full_attention, linear_attention',
    ),
    (
        {"layer_types": ["full_attention"] * 5, "full_attention_interval": 4},
        ConfigError,
        "full_attention_interval: got 4, which contradicts layer_types",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}},
        ConfigError,
        "rope_parameters.partial_rotary_factor: got 0.1, expected a share of head_dim 32 that is an even number",
    ),
    ({"model_type": "qwen3_5_moe"}, UnsupportedModel, "supported are llama, qwen3, qwen3_5, qwen3_5_text"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), ERRORS)
def test_errors(changes: dict[str, Any], kind: type[Exception], text: str):
    with pytest.raises(ConfigError) as caught:
        parse_target({**TEXT, **changes})
    assert type(caught.value) is kind
    assert text in str(caught.value)


def test_errors_say_where_in_a_wrapper_a_key_stands():
    with pytest.raises(ConfigError, match=r"target: text_config\.linear_conv_kernel_dim: got 0"):
        parse_target(wrapped(text_config={**TEXT, "linear_conv_kernel_dim": 0}))
    with pytest.raises(ConfigError, match=r"target: text_config\.hidden_size is missing"):
        parse_target(wrapped(text_config={key: TEXT[key] for key in TEXT if key != "hidden_size"}))


@pytest.mark.parametrize("inner", ["llama", "qwen3", "qwen3_moe", "qwen3_5_moe_text", 7])
def test_a_wrapper_of_another_family(inner: Any):
    """Said before anything else that such a text part may lack."""
    with pytest.raises(
        UnsupportedModel,
        match=rf"target: text_config\.model_type: got \"?{inner}\"?; supported are qwen3_5, qwen3_5_text",
    ):
        parse_target(wrapped(text_config={"model_type": inner, "num_experts": 8}))


def test_a_wrapper_of_another_class():
    with pytest.raises(
        UnsupportedModel, match=r"text_config\.architectures: got \[.LlamaForCausalLM.\]; supported for"
    ):
        parse_target(wrapped(text_config={**TEXT, "architectures": ["LlamaForCausalLM"]}))
