"""The match rule on numpy, by exact enumeration, and within the subset of the array API that rules may use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn.policies import Policy, match
from tests.helpers.enumeration import all_blocks, all_ties, matched

SIZES = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3), (3, 4)]


@pytest.fixture(params=["numpy", "array_api_strict"])
def xp(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


@pytest.mark.parametrize(("vocab", "size"), SIZES)
def test_match_on_every_block(xp: Any, vocab: int, size: int) -> None:
    check(xp, *all_blocks(vocab, size))


@pytest.mark.parametrize("vocab", [2, 3])
def test_match_takes_the_first_of_tied_logits(xp: Any, vocab: int) -> None:
    check(xp, *all_ties(vocab))


def check(xp: Any, drafted: np.ndarray, logits: np.ndarray) -> None:
    verdict = match().rule(xp, xp.asarray(drafted), xp.asarray(logits), None, {})
    found = list(zip(np.asarray(verdict.num_accepted).tolist(), np.asarray(verdict.next_token).tolist(), strict=True))
    assert found == [matched(*case) for case in zip(drafted.tolist(), logits.tolist(), strict=True)]


def test_match_returns_the_dtype_of_the_drafted_tokens() -> None:
    drafted, logits = all_blocks(2, 3)
    verdict = match().rule(np, drafted, logits, None, {})
    assert (verdict.num_accepted.dtype, verdict.next_token.dtype) == (drafted.dtype, drafted.dtype)
    assert verdict.num_accepted.shape == verdict.next_token.shape == (len(drafted),)


def test_match_says_what_it_is() -> None:
    assert (match().name, match().lossless, match().needs_q, match().streams) == ("match", True, False, ())
    assert match() == match()
    assert dflash_fn.match is match


def test_a_policy_is_a_value() -> None:
    policy = Policy("mine", match().rule, lossless=False)
    with pytest.raises(AttributeError):
        policy.name = "yours"  # pyright: ignore[reportAttributeAccessIssue]
