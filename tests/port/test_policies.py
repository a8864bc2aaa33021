"""Policies over each port's array namespace: the same verdicts as on numpy."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_fn.policies import match
from dflash_fn.port import Port
from tests.helpers.enumeration import all_blocks, all_ties, matched
from tests.helpers.fixtures import DTYPES, need_dtype


def check(port: Port, drafted: np.ndarray, logits: np.ndarray, dtype: str) -> None:
    need_dtype(port, dtype)
    xp, device = port.xp, port.info().devices[0]
    values = xp.astype(port.asarray(logits, device), getattr(xp, dtype))
    verdict = match().rule(xp, port.asarray(drafted, device), values, None, {})
    counts, tokens = (port.to_numpy(array).tolist() for array in (verdict.num_accepted, verdict.next_token))
    expected = [matched(*case) for case in zip(drafted.tolist(), logits.tolist(), strict=True)]
    assert list(zip(counts, tokens, strict=True)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "size"), [(2, 1), (2, 2), (2, 4), (3, 1), (3, 3), (3, 4)])
def test_match_on_every_block(port: Port, vocab: int, size: int, dtype: str) -> None:
    check(port, *all_blocks(vocab, size), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [2, 3])
def test_match_takes_the_first_of_tied_logits(port: Port, vocab: int, dtype: str) -> None:
    check(port, *all_ties(vocab), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 8, 16, 31, 100, 1000])
def test_ties_in_wide_vocabularies(port: Port, vocab: int, dtype: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(0, 3, (50, 2, vocab)).astype(np.float32) * 0.125 + 15.75  # neighbours in bfloat16
    check(port, rng.integers(0, vocab, (50, 1)), logits, dtype)
