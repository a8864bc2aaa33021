"""Configs and rotary tables: C01 to C04."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_fn.config import RopeSpec, parse_draft
from dflash_fn.errors import ConfigError
from dflash_fn.rope import rope_tables

BASE = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
KEYS = {
    "block_size": st.integers(1, 64),
    "mask_token_id": st.integers(0, 127),
    "target_layer_ids": st.lists(st.integers(0, 7), min_size=1, unique=True),
    "num_target_layers": st.integers(8, 40),
    "is_causal": st.booleans(),
    "input_embedding_scale": st.floats(0.125, 8.0),
    "output_multiplier": st.floats(0.125, 8.0),
    "final_logit_softcapping": st.floats(0.0, 50.0),
}
BLOCK = {"block_size": 8, "mask_token_id": 1, "target_layer_ids": [1], "num_target_layers": 8}
OTHER_KEYS = [
    *BASE,
    *KEYS,
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "use_sliding_window",
    "dtype",
]

places = st.sampled_from(["flat", "nested", "both", "null"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ropes = st.one_of(
    st.builds(RopeSpec, st.just("default"), st.sampled_from([1e4, 1e6]), st.sampled_from([16, 80, 128])),
    st.builds(RopeSpec, st.just("linear"), st.just(1e4), st.just(64), factor=st.floats(1.0, 8.0)),
    st.builds(RopeSpec, st.just("llama3"), st.just(5e5), st.just(64), st.floats(1.0, 32.0), st.integers(1, 8192)),
    st.builds(RopeSpec, st.just("yarn"), st.just(1e6), st.just(64), st.floats(1.0, 8.0), st.integers(1, 8192)),
)
positions = st.lists(st.integers(0, 2**20), min_size=1, max_size=70).map(np.array)


@given(st.fixed_dictionaries(KEYS), st.fixed_dictionaries(KEYS), st.fixed_dictionaries(dict.fromkeys(KEYS, places)))
def test_c01_nested_wins_and_a_key_counts_wherever_it_is(values, others, place):
    flat = {key: others[key] if place[key] == "both" else values[key] for key in KEYS if place[key] != "nested"}
    inner = {key: None if place[key] == "null" else values[key] for key in KEYS if place[key] != "flat"}
    assert parse_draft({**BASE, **flat, "dflash_config": inner}) == parse_draft({**BASE, **values})


@given(st.sampled_from(OTHER_KEYS), json_values)
def test_c02_any_value_is_a_spec_or_an_error_that_names_the_key(key, value):
    spec = message = None
    try:
        spec = parse_draft({**BASE, **BLOCK, key: value})
    except ConfigError as error:
        message = str(error)
    if message is None:
        assert parse_draft({**BASE, **BLOCK, key: value}) == spec
        hash(spec)
    else:
        assert message.startswith("draft: ")
        assert key in message


@given(ropes, positions, st.data())
def test_c03_a_row_of_a_table_depends_on_its_position_alone(rope, positions, data):
    cos, sin = rope_tables(rope, positions)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(positions))] * 2)))
    step = data.draw(st.integers(1, 3))
    part = slice(start, stop, step)
    for whole, alone in zip((cos, sin), rope_tables(rope, positions[part]), strict=True):
        assert whole[part].tobytes() == alone.tobytes()


@given(ropes, positions)
def test_c04_rows_of_positions_are_tables(rope, positions):
    flat = rope_tables(rope, positions)
    stacked = rope_tables(rope, np.stack([positions, positions + 1]).astype(np.int32))
    for table, rows in zip(flat, stacked, strict=True):
        assert rows.shape == (2, *table.shape)
        assert rows[0].tobytes() == table.tobytes()
