import json
from pathlib import Path
from typing import Any

import pytest

from dflash_fn.config import LayerKind, parse_draft, parse_target
from dflash_fn.errors import ConfigError, UnsupportedModel

SHARED = Path(__file__).parents[2] / "shared" / "configs"
ABSENT = object()
FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "num_target_layers": 6,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 127, "target_layer_ids": [1, 3, 4]},
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**config, **changes}.items() if value is not ABSENT}


def nested(**changes: Any) -> dict[str, Any]:
    return changed(DRAFT, dflash_config=changed(DRAFT["dflash_config"], **changes))


# Targets


def test_llama():
    spec = parse_target(LLAMA)
    assert (spec.family, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == ("llama", 3, 4, 2, 16)
    assert (spec.rope.kind, spec.rope.theta, spec.rope.dim, spec.max_context) == ("default", 500000.0, 16, 512)
    assert (spec.tied_head, spec.eos_token_ids, spec.dtype, spec.norm_eps) == (True, (2,), "bfloat16", 1e-5)
    assert (spec.qk_norm, spec.sliding_window, spec.layer_kinds) == (False, None, (FULL,) * 3)


def test_qwen3():
    spec = parse_target(QWEN3)
    assert (spec.family, spec.head_dim, spec.qk_norm, spec.norm_eps) == ("qwen3", 32, True, 1e-6)
    assert (spec.tied_head, spec.eos_token_ids, spec.dtype, spec.rope.theta) == (False, (), "bfloat16", 1e6)


def test_new_rope_keys_read_as_the_old_ones():
    old = changed(LLAMA, rope_scaling=LLAMA3_SCALING)
    new = changed(LLAMA, rope_theta=ABSENT, rope_parameters={**LLAMA3_SCALING, "rope_theta": 500000.0})
    assert parse_target(old) == parse_target(new)


def test_old_name_of_the_rope_kind():
    spec = parse_target(changed(LLAMA, rope_scaling={"type": "linear", "factor": 2}))
    assert (spec.rope.kind, spec.rope.factor, spec.rope.theta) == ("linear", 2.0, 500000.0)


def test_theta_inside_rope_parameters_wins_over_theta_beside_them():
    spec = parse_target(changed(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 10.0}))
    assert spec.rope.theta == 10.0


def test_no_default_theta_where_the_other_table_has_one():
    tables = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 777.0}}
    spec = parse_target(changed(LLAMA, rope_theta=ABSENT, **tables))
    assert (spec.rope.kind, spec.rope.theta) == ("linear", 777.0)


@pytest.mark.parametrize("empty", [None, {}])
def test_empty_rope_tables_are_absent(empty: Any):
    assert parse_target(changed(LLAMA, rope_scaling=empty, rope_parameters=empty)) == parse_target(LLAMA)


def test_yarn_attention_factor():
    def factor(**keys: Any) -> float:
        return parse_target(changed(QWEN3, rope_scaling={**YARN, **keys})).rope.attention_factor

    assert factor() == pytest.approx(1.1386294361119891, abs=0)  # 0.1 ln 4 + 1
    assert factor(attention_factor=1.5) == 1.5
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(factor=1.0) == 1.0


def test_yarn_null_factor_is_the_ratio_of_contexts():
    assert parse_target(changed(QWEN3, rope_scaling={**YARN, "factor": None})).rope.factor == 4.0


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": [5, 7, 5]}, (5, 7)),
        ({"eos_token_id": 5, "generation_eos_token_id": [7, 5]}, (5, 7)),
        ({"eos_token_id": None, "generation_eos_token_id": 7}, (7,)),
        ({"eos_token_id": None}, ()),
        ({"eos_token_id": ABSENT, "generation_eos_token_id": [7]}, (7,)),
        ({"eos_token_id": ABSENT}, (2,)),
    ],
)
def test_stop_tokens(keys: dict[str, Any], ids: tuple[int, ...]):
    assert parse_target(changed(LLAMA, **keys)).eos_token_ids == ids


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": ABSENT, "torch_dtype": ABSENT}, "float32"),
    ],
)
def test_dtype(keys: dict[str, Any], dtype: str):
    assert parse_target(changed(LLAMA, **keys)).dtype == dtype


@pytest.mark.parametrize(
    ("keys", "kinds", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, (FULL,) * 4, None),
        ({"sliding_window": 8, "max_window_layers": 0}, (FULL,) * 4, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (FULL,) * 3 + (SLIDING,), 8),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (FULL,) * 4, None),
        ({"use_sliding_window": True, "max_window_layers": 2}, (FULL,) * 2 + (SLIDING,) * 2, 4096),
        ({"use_sliding_window": True, "sliding_window": 8}, (FULL,) * 4, None),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (SLIDING, FULL) * 2,
            8,
        ),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, (SLIDING,) * 4, 8),
    ],
)
def test_layer_kinds(keys: dict[str, Any], kinds: tuple[LayerKind, ...], window: int | None):
    spec = parse_target(changed(QWEN3, **keys))
    assert (spec.layer_kinds, spec.sliding_window) == (kinds, window)


LLAMA_ERRORS = [
    ({"hidden_size": ABSENT}, ConfigError, "target: hidden_size is missing, expected an integer of at least 1"),
    ({"hidden_size": 0}, ConfigError, "target: hidden_size: got 0, expected an integer of at least 1"),
    ({"hidden_size": None}, ConfigError, "target: hidden_size: got null, expected an integer of at least 1"),
    ({"hidden_size": "64"}, ConfigError, 'target: hidden_size: got "64", expected an integer of at least 1'),
    ({"hidden_size": 64.0}, ConfigError, "target: hidden_size: got 64.0, expected an integer"),
    ({"num_hidden_layers": True}, ConfigError, "target: num_hidden_layers: got true, expected an integer"),
    ({"vocab_size": -1}, ConfigError, "target: vocab_size: got -1"),
    ({"intermediate_size": ABSENT}, ConfigError, "target: intermediate_size is missing"),
    ({"max_position_embeddings": 0}, ConfigError, "target: max_position_embeddings: got 0"),
    ({"rms_norm_eps": 0}, ConfigError, "target: rms_norm_eps: got 0, expected a number greater than 0"),
    ({"rms_norm_eps": float("nan")}, ConfigError, "target: rms_norm_eps: got NaN, expected a number"),
    ({"rms_norm_eps": 10**400}, ConfigError, "target: rms_norm_eps: got 1000"),
    (
        {"num_key_value_heads": 3},
        ConfigError,
        "target: num_attention_heads: got 4, expected a multiple of num_key_value_heads, which is 3",
    ),
    (
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        ConfigError,
        "target: hidden_size: got 64, expected a multiple of num_attention_heads, which is 3, or a head_dim",
    ),
    ({"head_dim": 15}, ConfigError, "target: head_dim: got 15, expected an even number"),
    ({"rope_theta": 1}, ConfigError, "target: rope_theta: got 1, expected a number greater than 1"),
    ({"rope_scaling": [4]}, ConfigError, "target: rope_scaling: got [4], expected an object"),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        UnsupportedModel,
        'target: rope_scaling.type: got "dynamic"; supported are default, linear, llama3, yarn',
    ),
    (
        {"rope_parameters": {"rope_type": ["longrope"]}},
        UnsupportedModel,
        'target: rope_parameters.rope_type: got ["longrope"]; supported are',
    ),
    (
        {"rope_scaling": {"rope_type": "default", "type": "linear"}},
        ConfigError,
        'target: rope_scaling.rope_type: got "default", expected "linear", as rope_scaling.type has it',
    ),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        ConfigError,
        'target: rope_scaling.rope_type: got "linear", expected "default", as rope_parameters.rope_type has it',
    ),
    (
        {"rope_scaling": {"type": "linear"}},
        ConfigError,
        "target: rope_scaling.factor is missing, expected a number of at least 1",
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        ConfigError,
        "target: rope_scaling.factor: got 0.5, expected a number of at least 1",
    ),
    (
        {"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}},
        ConfigError,
        "target: rope_scaling.high_freq_factor: got 1.0, expected a number greater than low_freq_factor, which is 1",
    ),
    ({"rope_scaling": {**YARN, "truncate": None}}, ConfigError, "target: rope_scaling.truncate: got null"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        UnsupportedModel,
        'target: rope_parameters.full_attention: got {"rope_type": "default"}; a rotary embedding per layer kind',
    ),
    ({"partial_rotary_factor": 0.5}, UnsupportedModel, "target: partial_rotary_factor: got 0.5; only whole heads"),
    ({"hidden_act": "gelu"}, UnsupportedModel, 'target: hidden_act: got "gelu"; supported is silu'),
    ({"quantization_config": {"bits": 4}}, UnsupportedModel, 'target: quantization_config: got {"bits": 4}; quantised'),
    ({"per_layer_config": {"0": {}}}, UnsupportedModel, "target: per_layer_config: got"),
    ({"attention_bias": None}, ConfigError, "target: attention_bias: got null, expected true or false"),
    ({"tie_word_embeddings": 1}, ConfigError, "target: tie_word_embeddings: got 1, expected true or false"),
    (
        {"torch_dtype": "float64"},
        UnsupportedModel,
        'target: torch_dtype: got "float64"; supported are float32, bfloat16',
    ),
    (
        {"eos_token_id": "</s>"},
        ConfigError,
        'target: eos_token_id: got "</s>", expected a token id, a list of token ids',
    ),
    ({"eos_token_id": [True]}, ConfigError, "target: eos_token_id: got [true], expected a token id"),
    ({"generation_eos_token_id": [-1]}, ConfigError, "target: generation_eos_token_id: got [-1]"),
    ({"layer_types": ["sliding_attention"] * 3}, UnsupportedModel, "supported for llama is full_attention"),
    ({"model_type": ABSENT}, ConfigError, "target: model_type is missing, expected llama or qwen3 or qwen3_5"),
    ({"model_type": "qwen3_moe"}, UnsupportedModel, 'target: model_type: got "qwen3_moe"; supported are llama, qwen3'),
    (
        {"model_type": "qwen3_5"},
        UnsupportedModel,
        "supported for qwen3_5 is Qwen3_5ForCausalLM or Qwen3_5ForConditionalGeneration",
    ),
    ({"model_type": ["llama"]}, UnsupportedModel, 'target: model_type: got ["llama"]'),
    (
        {"architectures": ["LlamaForCausalLMEagle3"]},
        UnsupportedModel,
        'target: architectures: got ["LlamaForCausalLMEagle3"]; supported for llama is LlamaForCausalLM',
    ),
    (
        {"architectures": "LlamaForCausalLM"},
        ConfigError,
        'target: architectures: got "LlamaForCausalLM", expected a list',
    ),
    ({"architectures": [1]}, ConfigError, "target: architectures: got [1], expected a list of names"),
]

QWEN3_ERRORS = [
    ({"layer_types": ["full_attention"] * 3}, ConfigError, "expected 4 entries, as num_hidden_layers says, not 3"),
    (
        {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
        UnsupportedModel,
        'layer 3 is "linear_attention", supported are full_attention, sliding_attention',
    ),
    ({"layer_types": "full_attention"}, ConfigError, 'target: layer_types: got "full_attention", expected a list'),
    (
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8, "use_sliding_window": False},
        ConfigError,
        "target: use_sliding_window: got false, expected true, since layer_types has sliding_attention",
    ),
    (
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": None},
        ConfigError,
        "target: sliding_window: got null, expected an integer of at least 1, since layer_types has sliding_attention",
    ),
    (
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": 0},
        ConfigError,
        "target: sliding_window: got 0, expected an integer of at least 1",
    ),
    (
        {"num_key_value_heads": ABSENT},
        ConfigError,
        "target: num_attention_heads: got 4, expected a multiple of num_key_value_heads, which is 32 by default",
    ),
]


def check_error(parse: Any, config: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert type(caught.value) is kind
    assert text in str(caught.value)


@pytest.mark.parametrize(("changes", "kind", "text"), LLAMA_ERRORS)
def test_llama_errors(changes: dict[str, Any], kind: type[Exception], text: str):
    check_error(parse_target, changed(LLAMA, **changes), kind, text)


@pytest.mark.parametrize(("changes", "kind", "text"), QWEN3_ERRORS)
def test_qwen3_errors(changes: dict[str, Any], kind: type[Exception], text: str):
    check_error(parse_target, changed(QWEN3, **changes), kind, text)


@pytest.mark.parametrize("config", [DRAFT, changed(QWEN3, target_layer_ids=[1]), changed(QWEN3, dflash_config={})])
def test_a_draft_is_no_target(config: dict[str, Any]):
    check_error(
        parse_target, config, UnsupportedModel, "target: this is the config of a DFlash draft; expected a target"
    )


def test_messages_use_the_given_name_and_stay_short():
    with pytest.raises(ConfigError, match=r"^Qwen/Qwen3-8B: hidden_size: got \[0, 0.*\.\.\., expected an integer"):
        parse_target(changed(QWEN3, hidden_size=[0] * 1000), name="Qwen/Qwen3-8B")


def test_the_config_is_left_as_it_was():
    config = nested(block_size=8)
    before = json.dumps(config)
    parse_draft(config)
    assert json.dumps(config) == before


# Drafts


def test_draft():
    spec = parse_draft(DRAFT)
    assert (spec.block_size, spec.mask_token_id, spec.target_layer_ids, spec.num_target_layers) == (
        16,
        127,
        (1, 3, 4),
        6,
    )
    assert (spec.family, spec.qk_norm, spec.causal, spec.logit_softcap) == ("qwen3", True, (False, False), None)
    assert (spec.input_embedding_scale, spec.output_multiplier) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("key", "attribute", "flat", "inner"),
    [
        ("block_size", "block_size", 16, 8),
        ("mask_token_id", "mask_token_id", 0, 5),
        ("target_layer_ids", "target_layer_ids", [0], [2, 1]),
        ("num_target_layers", "num_target_layers", 9, 8),
        ("input_embedding_scale", "input_embedding_scale", 2.0, 0.5),
        ("output_multiplier", "output_multiplier", 3, 0.25),
        ("final_logit_softcapping", "logit_softcap", 30.0, 15.0),
    ],
)
def test_nested_wins_and_once_counts(key: str, attribute: str, flat: Any, inner: Any):
    def read(flat: Any, inner: Any) -> Any:
        table = changed(DRAFT["dflash_config"], **{key: inner})
        return getattr(parse_draft(changed(DRAFT, **{key: flat}, dflash_config=table)), attribute)

    def value(given: Any) -> Any:
        return tuple(given) if isinstance(given, list) else given

    assert read(flat, inner) == value(inner)
    assert read(flat, ABSENT) == value(flat)
    assert read(ABSENT, inner) == value(inner)
    assert read(flat, None) == value(flat)


def test_every_key_may_be_flat():
    flat = changed(DRAFT, dflash_config=ABSENT, **DRAFT["dflash_config"])
    assert parse_draft(flat) == parse_draft(DRAFT)
    assert parse_draft(changed(flat, architectures=ABSENT, model_type=ABSENT)) == parse_draft(DRAFT)


@pytest.mark.parametrize(
    ("is_causal", "expected"),
    [(ABSENT, (True, False)), (None, (True, False)), (True, (True,) * 2), (False, (False,) * 2)],
)
def test_causality(is_causal: Any, expected: tuple[bool, ...]):
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 4}
    spec = parse_draft(changed(DRAFT, is_causal=is_causal, **kinds))
    assert (spec.causal, spec.sliding_window) == (expected, 4)


def test_softcap_zero_is_none():
    assert parse_draft(changed(DRAFT, final_logit_softcapping=0)).logit_softcap is None


def test_block_size_one_is_plain_decoding():
    assert parse_draft(changed(DRAFT, block_size=1)).block_size == 1


def test_draft_vocabulary_of_the_same_size():
    assert parse_draft(changed(DRAFT, draft_vocab_size=128)) == parse_draft(DRAFT)
    assert parse_draft(changed(DRAFT, draft_vocab_size=None)) == parse_draft(DRAFT)


TAPS = "expected a list of different layers from 0 to 5, num_target_layers being 6"
DRAFT_ERRORS = [
    (changed(DRAFT, block_size=ABSENT), ConfigError, "draft: block_size is missing, expected an integer of at least 1"),
    (changed(DRAFT, block_size=0), ConfigError, "draft: block_size: got 0, expected an integer of at least 1"),
    (nested(block_size=-4), ConfigError, "draft: dflash_config.block_size: got -4, expected an integer of at least 1"),
    (nested(mask_token_id=ABSENT), ConfigError, "draft: mask_token_id is missing, expected an integer of at least 0"),
    (nested(mask_token_id=128), ConfigError, "mask_token_id: got 128, expected an id below vocab_size, which is 128"),
    (nested(mask_token_id=-1), ConfigError, "draft: dflash_config.mask_token_id: got -1"),
    (nested(mask_token_id=False), ConfigError, "draft: dflash_config.mask_token_id: got false, expected an integer"),
    (nested(target_layer_ids=ABSENT), ConfigError, f"draft: target_layer_ids is missing, {TAPS}"),
    (nested(target_layer_ids=[]), ConfigError, f"draft: dflash_config.target_layer_ids: got [], {TAPS}"),
    (nested(target_layer_ids=[-1]), ConfigError, f"draft: dflash_config.target_layer_ids: got [-1], {TAPS}"),
    (nested(target_layer_ids=[6]), ConfigError, f"draft: dflash_config.target_layer_ids: got [6], {TAPS}"),
    (nested(target_layer_ids=[1, 1]), ConfigError, f"draft: dflash_config.target_layer_ids: got [1, 1], {TAPS}"),
    (nested(target_layer_ids=[True]), ConfigError, f"draft: dflash_config.target_layer_ids: got [true], {TAPS}"),
    (nested(target_layer_ids=[1.0]), ConfigError, f"draft: dflash_config.target_layer_ids: got [1.0], {TAPS}"),
    (nested(target_layer_ids=[[1]]), ConfigError, f"draft: dflash_config.target_layer_ids: got [[1]], {TAPS}"),
    (nested(target_layer_ids=3), ConfigError, "draft: dflash_config.target_layer_ids: got 3, expected a list"),
    (changed(DRAFT, num_target_layers=ABSENT), ConfigError, "draft: num_target_layers is missing, expected an integer"),
    (changed(DRAFT, num_target_layers=4), ConfigError, "from 0 to 3, num_target_layers being 4"),
    (changed(DRAFT, dflash_config=[1]), ConfigError, "draft: dflash_config: got [1], expected an object"),
    (
        nested(output_multiplier=0),
        ConfigError,
        "draft: dflash_config.output_multiplier: got 0, expected a number greater",
    ),
    (
        nested(final_logit_softcapping=-1),
        ConfigError,
        "dflash_config.final_logit_softcapping: got -1, expected a number",
    ),
    (nested(is_causal=1), ConfigError, "draft: dflash_config.is_causal: got 1, expected true or false"),
    (changed(DRAFT, architectures=["DFlash2DraftModel"]), UnsupportedModel, "draft: architectures: this is a DFlash 2"),
    (
        nested(conv_kernel_size=2),
        UnsupportedModel,
        "draft: dflash_config.conv_kernel_size: this is a DFlash 2 draft (D",
    ),
    (changed(DRAFT, selector_rank=8), UnsupportedModel, "its candidate selector (selector_*) are not supported; use a"),
    (
        changed(DRAFT, architectures=["DSparkDraftModel"]),
        UnsupportedModel,
        'draft: architectures: got ["DSparkDraftModel"]; supported is DFlashDraftModel',
    ),
    (changed(DRAFT, model_type="llama"), UnsupportedModel, 'model_type: got "llama"; supported for drafts is qwen3'),
    (nested(fc_layernorm=True), UnsupportedModel, "draft: dflash_config.fc_layernorm: got true; norms of each tapped"),
    (
        nested(use_swa=True),
        UnsupportedModel,
        "draft: dflash_config.use_swa: got true; windows that layer_types does not",
    ),
    (changed(DRAFT, markov_rank=4), UnsupportedModel, "draft: markov_rank: got 4; Markov heads are not supported"),
    (
        changed(DRAFT, draft_vocab_size=64),
        UnsupportedModel,
        "draft: draft_vocab_size: got 64; a draft vocabulary other",
    ),
    (changed(DRAFT, hidden_act="gelu"), UnsupportedModel, 'draft: hidden_act: got "gelu"; supported is silu'),
    (QWEN3, UnsupportedModel, "draft: this config is a target, not a draft"),
    (LLAMA, UnsupportedModel, "draft: this config is a target, not a draft"),
]


@pytest.mark.parametrize(("config", "kind", "text"), DRAFT_ERRORS)
def test_draft_errors(config: dict[str, Any], kind: type[Exception], text: str):
    check_error(parse_draft, config, kind, text)


# Published configs

FILES = {
    "Qwen3-8B-DFlash-b16": (16, 151669, (1, 9, 17, 25, 33), 36, 1e6, "default", (False,) * 5, None),
    "Qwen3.6-27B-DFlash": (16, 248070, (1, 16, 31, 46, 61), 64, 1e7, "default", (True,) * 4 + (False,), 2048),
    "Qwen3.6-35B-A3B-DFlash": (16, 248070, (1, 10, 19, 28, 37), 40, 1e7, "default", (False,) * 8, None),
    "both-block-sizes": (8, 127, (1, 3, 4), 6, 10000.0, "yarn", (False,) * 2, None),
    "nested-rope-and-block": (8, 127, (1, 3, 4), 6, 500000.0, "default", (False,) * 2, None),
}


def shared_config(name: str) -> dict[str, Any]:
    path = SHARED / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_shared_draft(name: str):
    spec = parse_draft(shared_config(name), name=name)
    block = (spec.block_size, spec.mask_token_id, spec.target_layer_ids, spec.num_target_layers)
    assert (*block, spec.rope.theta, spec.rope.kind, spec.causal, spec.sliding_window) == FILES[name]
    assert spec.dtype == "bfloat16"


@pytest.mark.parametrize("name", [*FILES, "Qwen3.8-27B-DFlash2"])
def test_shared_draft_is_no_target(name: str):
    check_error(parse_target, shared_config(name), UnsupportedModel, "this is the config of a DFlash draft")


def test_shared_dflash2():
    check_error(
        parse_draft, shared_config("Qwen3.8-27B-DFlash2"), UnsupportedModel, "a DFlash 2 draft (DFlash2DraftModel)"
    )


def test_every_shared_file_is_tested():
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent")
    assert {path.stem for path in SHARED.glob("*.json")} == {*FILES, "Qwen3.8-27B-DFlash2"}


# transformers as the oracle

ORACLE = [
    LLAMA,
    changed(LLAMA, num_key_value_heads=ABSENT, max_position_embeddings=ABSENT, rope_theta=ABSENT, rms_norm_eps=ABSENT),
    changed(LLAMA, num_key_value_heads=None, tie_word_embeddings=ABSENT, eos_token_id=ABSENT, torch_dtype=ABSENT),
    changed(LLAMA, head_dim=32, attention_bias=True, mlp_bias=True, eos_token_id=[3, 4]),
    changed(LLAMA, rope_scaling={"type": "linear", "factor": 2.0}),
    changed(LLAMA, rope_scaling=LLAMA3_SCALING),
    changed(LLAMA, rope_scaling=LLAMA3_SCALING, original_max_position_embeddings=64),
    changed(LLAMA, rope_theta=ABSENT, rope_parameters={**LLAMA3_SCALING, "rope_theta": 1000.0}),
    changed(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}),
    QWEN3,
    changed(QWEN3, head_dim=ABSENT, num_attention_heads=32, num_key_value_heads=ABSENT, rope_theta=ABSENT),
    changed(QWEN3, max_position_embeddings=ABSENT, rms_norm_eps=ABSENT, hidden_act=ABSENT, dtype=ABSENT),
    changed(QWEN3, rope_scaling=YARN, tie_word_embeddings=True, attention_bias=True),
    changed(QWEN3, rope_scaling={"type": "yarn", "factor": 2.0}, eos_token_id=9),
    changed(QWEN3, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    changed(QWEN3, use_sliding_window=True, sliding_window=8),
    changed(QWEN3, use_sliding_window=True, max_window_layers=0),
    changed(QWEN3, use_sliding_window=True, sliding_window=8, layer_types=["full_attention", "sliding_attention"] * 2),
    changed(QWEN3, sliding_window=8, max_window_layers=0),
]


@pytest.mark.parametrize("config", ORACLE)
def test_absent_keys_mean_what_transformers_takes_them_for(config: dict[str, Any]):
    """What transformers makes of a config, written out in full, reads as the config itself."""
    transformers = pytest.importorskip("transformers")
    classes = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    filled = classes[config["model_type"]](**json.loads(json.dumps(config)))
    spec = parse_target(config)
    assert parse_target(filled.to_dict()) == spec
    assert (spec.num_kv_heads, spec.head_dim) == (filled.num_key_value_heads, filled.head_dim)
    assert (spec.norm_eps, spec.max_context) == (filled.rms_norm_eps, filled.max_position_embeddings)
    assert (spec.rope.kind, spec.rope.theta) == (
        filled.rope_parameters["rope_type"],
        filled.rope_parameters["rope_theta"],
    )


def test_a_draft_config_object_reads_as_its_file():
    transformers = pytest.importorskip("transformers")
    filled = transformers.Qwen3Config(**json.loads(json.dumps(DRAFT)))
    assert parse_draft(filled.to_dict()) == parse_draft(DRAFT)
