"""Draws on numpy: what is drawn, exactly; that nothing of weight 0 is; the noise's vectors and its law."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from dflash_fn.draws import draw, first_reaching, noise, race, total, tree
from dflash_fn.rng import Stream, words

ENDS = [0.0, 2.0**-53, 0.5, 1 - 2.0**-24, 1 - 2.0**-53]


@pytest.mark.parametrize("vocab", range(1, 10))
def test_the_first_index_whose_cumulative_weight_exceeds(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(50):
        values = rng.integers(0, 4, vocab).astype(np.float64)
        values[rng.integers(vocab)] += 1
        whole = int(values.sum())
        for ticks in range(4 * whole):
            u = Fraction(ticks, 4 * whole)
            sums = np.cumsum(values)
            expected = next(index for index, reached in enumerate(sums) if Fraction(int(reached)) > u * whole)
            # the middle of a quarter, so that no rounding of u can reach a border
            assert int(draw(np, values, np.array(float(u) + 0.125 / whole))) == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("u", ENDS)
def test_weight_0_is_never_drawn(u: float, dtype: type) -> None:
    rng = np.random.default_rng(5)
    values = rng.random((1, 500, 37)).astype(dtype) ** 8 * (rng.random((1, 500, 37)) < 0.3)
    values[0, np.arange(500), rng.integers(0, 37, 500)] += dtype(1e-30)
    found = draw(np, values.astype(dtype), np.full((1, 500), u))
    assert (np.take_along_axis(values, found[..., None], axis=-1) > 0).all()


def test_a_u_that_rounds_to_1_draws_the_last_that_can_be() -> None:
    values = np.array([[[0.25, 0.75, 0.0, 0.0]]], dtype=np.float32)
    assert np.float32(1 - 2.0**-53) == 1
    assert draw(np, values, np.array([[1 - 2.0**-53]])).tolist() == [[1]]


def test_a_border_belongs_to_the_next_token() -> None:
    values = np.array([0.25, 0.25, 0.0, 0.5])
    assert [int(draw(np, values, np.array(u))) for u in (0.0, 0.25, 0.5)] == [0, 1, 3]
    assert [int(first_reaching(np, values, share)[0]) for share in (0.25, 0.5, 0.51, 1.0)] == [0, 1, 3, 3]


def test_sums_do_not_depend_on_neighbours() -> None:
    values = np.random.default_rng(2).random((2, 8, 1000)).astype(np.float32)
    whole = total(np, values)
    for row in range(2):
        for slot in range(8):
            assert total(np, values[row : row + 1, slot : slot + 1]).tobytes() == whole[row, slot].tobytes()
    assert [level.shape[-1] for level in tree(np, values)] == [1024 >> depth for depth in range(11)]


# --- noise ---


def plain_hash(token: int, first: int, second: int) -> int:
    """The docstring's lines, in Python's integers."""
    x = token * 0x9E3779B1 % 2**32 ^ first
    x ^= x >> 16
    x = (x * 0x7FEB352D + second) % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 5), (2**64 - 1, 2**31)])
def test_noise_is_the_hash_of_seed_position_and_token(seed: int, position: int) -> None:
    keys = words(seed, Stream.NOISE, np.array([position]))
    found = noise(np, np.zeros((1, 1, 300)), keys[None])[0, 0]
    expected = [(plain_hash(token, *keys[0].tolist()) + 0.5) * (2.0**-32 * (1 - 2.0**-24)) for token in range(300)]
    assert found.tolist() == expected


VECTORS = {
    (0, 0): ["679891bf", "a4800b25", "f985d86b", "d1618fb5"],
    (1, 5): ["e229268d", "a5bbb66f", "a27bc561", "f39bdbdd"],
    (2**64 - 1, 1000): ["9177035a", "6359bfa8", "1dc3eb00", "b7cb7706"],
}
"""(seed, position): the words of tokens 0, 1, 2 and 100000."""


@pytest.mark.parametrize("key", VECTORS)
def test_vectors_of_the_noise(key: tuple[int, int]) -> None:
    """They are part of what a seed means, and never change."""
    seed, position = key
    keys = words(seed, Stream.NOISE, np.array([position]))
    found = noise(np, np.zeros((1, 1, 100001)), keys[None])[0, 0, [0, 1, 2, 100000]]
    assert [f"{int(number / (2.0**-32 * (1 - 2.0**-24))):08x}" for number in found] == VECTORS[key]


def test_every_bit_of_the_word_counts() -> None:
    """Flipping one bit of the position's first word, or taking the next token, turns half of the noise's bits."""
    keys = words(1, Stream.NOISE, np.arange(200))[:, None]

    def bits(keys: np.ndarray) -> np.ndarray:
        made = (noise(np, np.zeros((200, 1, 64)), keys)[:, 0] / (2.0**-32 * (1 - 2.0**-24))).astype(np.int64)
        return made[:, :, None] >> np.arange(32) & 1

    before = bits(keys)
    turned = [bits(keys ^ (np.array([1, 0]) << place)) != before for place in range(31)]
    for changed in (*turned, before[:, 1:] != before[:, :-1]):
        assert abs(changed.mean() - 0.5) < 0.02
        assert (np.abs(changed.mean(axis=(0, 1)) - 0.5) < 0.05).all()


def test_the_largest_word_does_not_round_to_1() -> None:
    made = noise(np, np.zeros((1, 4, 4096), dtype=np.float32), np.zeros((1, 4, 2), dtype=np.int64))
    assert made.dtype == np.float32
    assert 0 < made.min() < made.max() < 1


def test_a_race_has_the_law_of_its_weights() -> None:
    """Over 40000 positions, each frequency within 4.5 standard deviations: a wrong rejection in 2e5 at most."""
    law, count = np.array([0.5, 0.25, 0.2, 0.05, 0.0]), 40000
    keys = words(11, Stream.NOISE, np.arange(count))[:, None]
    found = race(np, np.broadcast_to(law, (count, 1, 5)), keys)
    shares = np.bincount(found[:, 0], minlength=5) / count
    assert (np.abs(shares - law) <= 4.5 * np.sqrt(law * (1 - law) / count)).all()


@pytest.mark.parametrize("q", [[0.6, 0.2, 0.2], [0.1, 0.1, 0.8], [0.0, 0.5, 0.5]])
def test_two_races_agree_as_often_as_stated(q: list[float]) -> None:
    p, drawn, count = np.array([0.5, 0.3, 0.2]), np.array(q), 40000
    keys = words(3, Stream.NOISE, np.arange(count))[:, None]
    ours, theirs = (race(np, np.broadcast_to(law, (count, 1, 3)), keys)[:, 0] for law in (p, drawn))
    chances = [1 / sum(max(p[w] / p[v], q[w] / q[v]) for w in range(3)) if q[v] else 0.0 for v in range(3)]
    stated = sum(chances)
    assert abs((ours == theirs).mean() - stated) <= 4.5 * np.sqrt(stated * (1 - stated) / count)
    distance = np.abs(p - drawn).sum() / 2
    assert stated >= (1 - distance) / (1 + distance)
