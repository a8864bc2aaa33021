"""Philox: published answers, a plain reference, and numbers that look drawn from [0, 1)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dflash_fn import errors
from dflash_fn.rng import Stream, philox, uniforms, words

KNOWN_ANSWERS = {  # Random123's kat_vectors, philox4x32 of 10 rounds: counter, key, block
    "zeros": ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}
CERTAINTY = 20.0
"""Bounds below are crossed by a fair generator with a probability of at most 2 e**-20, four in a billion."""


def hexes(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint64)


def reference(counter: list[int], key: list[int]) -> list[int]:
    """One block, in Python's integers, as the paper writes it."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers(name: str) -> None:
    counter, key, block = (hexes(text) for text in KNOWN_ANSWERS[name])
    assert philox(counter[None], key).tolist() == [block.tolist()]
    assert reference(counter.tolist(), key.tolist()) == block.tolist()


def test_many_counters_at_once_with_one_key_or_a_key_each() -> None:
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (50, 4), dtype=np.uint64)
    keys = rng.integers(0, 2**32, (50, 2), dtype=np.uint64)
    pairs = zip(counters.tolist(), keys.tolist(), strict=True)
    assert philox(counters, keys).tolist() == [reference(*pair) for pair in pairs]
    assert philox(counters, keys[0]).tolist() == [reference(counter, keys[0].tolist()) for counter in counters.tolist()]


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64])
def test_counters_of_any_integer_dtype(dtype: type) -> None:
    counter = np.array([[1, 2, 3, 2**31 - 1]], dtype=dtype)
    assert philox(counter, np.array([5, 6], dtype=dtype)).tolist() == [reference([1, 2, 3, 2**31 - 1], [5, 6])]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("stream", Stream)
@pytest.mark.parametrize("counter", [0, 1, 2**32, 5 << 32 | 7, 2**63 - 1])
def test_a_number_is_53_bits_of_its_block(seed: int, stream: Stream, counter: int) -> None:
    block = reference([counter % 2**32, counter >> 32, int(stream), 0], [seed % 2**32, seed >> 32])
    expected = ((block[0] >> 5 << 26) + (block[1] >> 6)) * 2.0**-53
    assert uniforms(seed, stream, np.array([counter])).tolist() == [expected]


def test_streams_keep_their_numbers() -> None:
    numbers = {"TARGET": 0, "DRAFT": 1, "ACCEPT": 2, "RECOVER": 3, "NOISE": 4}
    assert {stream.name: int(stream) for stream in Stream} == numbers
    drawn = np.stack([uniforms(3, stream, np.arange(100)) for stream in Stream])
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range(seed: int) -> None:
    with pytest.raises(errors.InputError) as caught:
        uniforms(seed, Stream.TARGET, np.arange(2))
    assert str(caught.value) == f"seed: got {seed}, expected an integer from 0 to 2**64 - 1"


@pytest.mark.parametrize("seed", [0, 77, 2**64 - 1])
def test_words_are_the_upper_bits_of_a_block(seed: int) -> None:
    block = reference([9, 3, 4, 0], [seed % 2**32, seed >> 32])
    found = words(seed, Stream.NOISE, np.array([3 << 32 | 9]))
    assert found.dtype == np.int64
    assert found.tolist() == [[block[0] >> 1, block[1] >> 1]]


def test_no_counters_give_no_numbers() -> None:
    assert uniforms(0, Stream.TARGET, np.arange(0)).shape == (0,)


# --- statistics, of fixed seeds ---


def samples(seed: int, count: int = 2**16) -> np.ndarray:
    return uniforms(seed, Stream.ACCEPT, np.arange(count))


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_range(seed: int) -> None:
    drawn = samples(seed)
    assert drawn.dtype == np.float64
    assert 0.0 <= drawn.min() < drawn.max() < 1.0


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_mean(seed: int) -> None:
    """Hoeffding: a mean of n numbers in [0, 1) is off by t with a probability of at most 2 exp(-2 n t**2)."""
    drawn = samples(seed)
    assert abs(drawn.mean() - 0.5) < math.sqrt(CERTAINTY / (2 * len(drawn)))


@pytest.mark.parametrize("bins", [2, 64, 1000])
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_chi_square(seed: int, bins: int) -> None:
    assert chi_square(np.bincount((samples(seed) * bins).astype(int), minlength=bins)) < chi_square_bound(bins - 1)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_chi_square_of_neighbours(seed: int) -> None:
    cells = (samples(seed) * 16).astype(int)
    pairs = cells[::2] * 16 + cells[1::2]
    assert chi_square(np.bincount(pairs, minlength=256)) < chi_square_bound(255)


@pytest.mark.parametrize("bit", [*range(0, 53, 4), 52])
def test_every_bit_is_fair(bit: int) -> None:
    bits = (samples(7) * 2.0**53).astype(np.uint64) >> np.uint64(bit) & np.uint64(1)
    assert abs(bits.mean() - 0.5) < math.sqrt(CERTAINTY / (2 * len(bits)))


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / len(counts)
    return float(np.square(counts - expected).sum() / expected)


def chi_square_bound(freedom: int) -> float:
    """Laurent and Massart 2000, lemma 1: exceeded with a probability of at most exp(-CERTAINTY)."""
    return freedom + 2.0 * math.sqrt(freedom * CERTAINTY) + 2.0 * CERTAINTY
