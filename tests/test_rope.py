import math
from dataclasses import replace

import numpy as np
import pytest

from dflash_fn.config import RopeSpec, parse_target
from dflash_fn.errors import ConfigError
from dflash_fn.rope import inverse_frequencies, rope_tables

DEFAULT = RopeSpec("default", theta=10000.0, dim=8)
LLAMA3 = RopeSpec("llama3", theta=500000.0, dim=128, factor=8.0, original_max_position=8192)
YARN = RopeSpec("yarn", theta=1000000.0, dim=128, factor=4.0, original_max_position=32768)
POSITIONS = np.array([0, 1, 2, 3, 255, 256, 4095, 32767, 40959, 131071, 262143])

# Every kind as config.json writes it, with numbers of published models and a few that are none.
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"type": "linear", "factor": 2.0},
    "linear-3": {"type": "linear", "factor": 3.0},
    "llama-3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama-3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3-odd": {
        "rope_type": "llama3",
        "factor": 7.3,
        "low_freq_factor": 0.9,
        "high_freq_factor": 3.7,
        "original_max_position_embeddings": 1000,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-mscale": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 20,
        "beta_slow": 2,
    },
    "yarn-not-truncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 2.5,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 4,
    },
}


def units_apart(left: np.ndarray, right: np.ndarray) -> int:
    """Difference of positive float32 arrays in units of the last place."""
    return int(np.abs(left.view(np.int32).astype(np.int64) - right.view(np.int32)).max())


def test_default_by_hand():
    # 10000 ** (-i / 4) for i = 0 .. 3, which is a power of ten
    powers = np.array([1.0, 0.1, 0.01, 0.001], np.float32)
    assert inverse_frequencies(DEFAULT).tolist() == powers.tolist()
    cos, sin = rope_tables(DEFAULT, np.array([7]))
    angles = (np.float32(7) * powers).tolist()
    assert cos[0].tolist() == [np.float32(math.cos(angle)) for angle in angles]
    assert sin[0].tolist() == [np.float32(math.sin(angle)) for angle in angles]


def test_linear_divides():
    linear = replace(DEFAULT, kind="linear", factor=4.0)
    assert np.array_equal(inverse_frequencies(linear), inverse_frequencies(DEFAULT) / 4)


def test_llama3_keeps_fast_pairs_divides_slow_ones_and_ramps_between():
    plain, scaled = inverse_frequencies(replace(LLAMA3, kind="default")), inverse_frequencies(LLAMA3)
    turns = 8192 * plain.astype(np.float64) / (2 * math.pi)
    fast, slow = turns > 4.0, turns < 1.0
    assert np.array_equal(scaled[fast], plain[fast])
    assert np.array_equal(scaled[slow], plain[slow] / 8)
    between = ~fast & ~slow
    weight = (turns[between] - 1.0) / 3.0
    np.testing.assert_allclose(scaled[between], plain[between] * (weight + (1 - weight) / 8), rtol=1e-6)
    assert fast.any()
    assert slow.any()
    assert between.any()


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    plain, scaled = inverse_frequencies(replace(YARN, kind="default")), inverse_frequencies(YARN)
    turns = 32768 * plain.astype(np.float64) / (2 * math.pi)
    ratio = plain / scaled
    np.testing.assert_allclose(ratio[turns > 34], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 0.8], 4.0, rtol=1e-6)
    assert (np.diff(ratio) >= -1e-6).all()


def test_yarn_without_a_ramp_is_a_step():
    step = replace(YARN, beta_fast=1.0, beta_slow=1.0, truncate=False)
    plain = inverse_frequencies(replace(YARN, kind="default"))
    expected = np.where(32768 * plain.astype(np.float64) / (2 * math.pi) > 1.0, plain, plain / 4)
    np.testing.assert_allclose(inverse_frequencies(step), expected, rtol=1e-6)


def test_attention_factor_multiplies_both_tables():
    plain = rope_tables(YARN, POSITIONS)
    scaled = rope_tables(replace(YARN, attention_factor=1.25), POSITIONS)
    for table, larger in zip(plain, scaled, strict=True):
        assert np.array_equal(larger, table * np.float32(1.25))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5), (2, 1, 3)])
def test_shapes_and_dtypes(shape: tuple[int, ...], dtype: type):
    for table in rope_tables(LLAMA3, np.ones(shape, dtype)):
        assert table.shape == (*shape, 64)
        assert table.dtype == np.float32


def test_position_zero_rotates_nothing():
    cos, sin = rope_tables(LLAMA3, np.array([0]))
    assert (cos == 1).all()
    assert (sin == 0).all()


def test_inverse_frequencies_are_cached_and_read_only():
    frequencies = inverse_frequencies(DEFAULT)
    assert inverse_frequencies(replace(DEFAULT)) is frequencies
    with pytest.raises(ValueError, match="read-only"):
        frequencies[0] = 2.0


def test_unknown_kind():
    with pytest.raises(ConfigError, match=r"rope kind: got 'longrope', expected default, linear, llama3 or yarn"):
        inverse_frequencies(replace(DEFAULT, kind="longrope"))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0, 10000000.0])
@pytest.mark.parametrize("kind", SCALINGS)
def test_equals_transformers(kind: str, theta: float, head_dim: int):
    """Frequencies within 2 units of the last place, tables within 1 float32 rounding where the frequencies are equal.

    Not bitwise: torch's float32 power is a unit away from the rounded one for about one frequency in 300, a division
    can make two of that, and another version of torch may differ elsewhere. Everything else is the same arithmetic.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, intermediate_size=8, num_hidden_layers=1, vocab_size=8,
        max_position_embeddings=131072, rope_theta=theta, rope_scaling=dict(SCALINGS[kind]),
    )  # fmt: skip
    theirs = llama.LlamaRotaryEmbedding(config)
    rope = parse_target(config.to_dict()).rope
    assert rope.attention_factor == theirs.attention_scaling
    expected = theirs.inv_freq.numpy()
    assert units_apart(inverse_frequencies(rope), expected) <= 2

    same = inverse_frequencies(rope) == expected
    tables = theirs(torch.zeros(1), torch.from_numpy(POSITIONS)[None])
    for mine, other in zip(rope_tables(rope, POSITIONS), tables, strict=True):
        half = other[0, :, : head_dim // 2].numpy()
        # 2 ** -23 of values up to the attention factor: a unit for their cosine, half a unit for each product
        assert np.abs(mine - half)[:, same].max() <= 2.0**-23 * rope.attention_factor
