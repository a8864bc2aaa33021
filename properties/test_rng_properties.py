"""P10: a random number is a function of (seed, stream, counter)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_fn.rng import Stream, uniforms

SEEDS = st.integers(0, 2**64 - 1)
STREAMS = st.sampled_from(list(Stream))
COUNTERS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20)


@given(SEEDS, STREAMS, COUNTERS, st.randoms(use_true_random=False))
def test_p10_neither_order_nor_company_matters(seed, stream, counters, random):
    """P10: the number at a counter is the same alone, among others, in any order, and again."""
    drawn = dict(zip(counters, uniforms(seed, stream, np.array(counters, dtype=np.uint64)).tolist(), strict=True))
    for counter in random.sample(counters, len(counters)):
        assert uniforms(seed, stream, np.array([counter], dtype=np.uint64)).tolist() == [drawn[counter]]
    assert all(0.0 <= number < 1.0 for number in drawn.values())


@given(SEEDS, STREAMS, st.integers(0, 2**64 - 1), SEEDS, STREAMS, st.integers(0, 2**64 - 1))
def test_p10_different_names_give_different_numbers(seed, stream, counter, seed2, stream2, counter2):
    """P10: seed, stream and counter all count (two of 2 ** 53 numbers are equal too rarely to be seen)."""
    left, right = (
        uniforms(s, name, np.array([n], dtype=np.uint64))[0]
        for s, name, n in ((seed, stream, counter), (seed2, stream2, counter2))
    )
    assert (left == right) == ((seed, stream, counter) == (seed2, stream2, counter2))
