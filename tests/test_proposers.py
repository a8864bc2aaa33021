"""The n-gram baseline against the plainest possible search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_fn import errors
from dflash_fn.proposers import continuation, lookup_or_draft, ngram, occurred


def plain(tokens: list[int], count: int, longest: int) -> list[int]:
    """Look for every suffix, the longest first, at every earlier place, the latest first."""
    text = list(tokens)
    for _ in range(count):
        places = [
            (size, start)
            for size in range(1, min(longest, len(text) - 1) + 1)
            for start in range(len(text) - size)
            if text[start : start + size] == text[-size:]
        ]
        if not places:
            break
        size, start = max(places)
        text.append(text[start + size])
    return text[len(tokens) :]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 6), st.integers(1, 5))
def test_it_is_the_latest_of_the_longest(tokens, count, longest):
    assert continuation(tokens, count, longest=longest) == plain(tokens, count, longest)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5], []),
        ([5, 6], []),
        ([5, 5], [5, 5, 5]),
        ([1, 2, 1], [2, 1, 2]),
        ([1, 2, 8, 3, 2, 9, 1, 2], [8, 3, 2]),  # the longer suffix wins over the later place
    ],
)
def test_small_texts(tokens, expected):
    assert continuation(tokens, 3) == expected


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 4))
def test_what_occurred(tokens, count):
    before = [tokens[i : i + count] for i in range(len(tokens) - count)]
    assert occurred(tokens, count) == (len(tokens) > count and tokens[-count:] in before)


@pytest.mark.parametrize("make", [ngram, lookup_or_draft])
def test_a_suffix_has_a_token(make):
    with pytest.raises(errors.InputError, match="longest: got 0, expected an integer of at least 1"):
        make(0)


def test_lengths_are_numbers():
    with pytest.raises(errors.InputError, match="least: got 0, expected an integer of at least 1"):
        lookup_or_draft(least=0)
    assert np.array(continuation(list(range(9)) * 2, 0)).shape == (0,)
