"""Expected acceptance: numbers worked out by hand, and what cannot be asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_fn import errors
from dflash_fn.expected import ACCEPTANCE, expected_accepted

P = np.array([[0.5, 0.3, 0.2]] * 3)
Q = np.array([[0.6, 0.2, 0.2]] * 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("match_independent", 0.5 + 0.5 * 0.3),
        # [0, 0.5) of [0, 0.6); then [0.6, 0.8) of [0.6, 0.8)
        ("match_inverse", 0.5 / 0.6 + 0.5 / 0.6),
        # 1 / (1 + max(0.6, 1/3) + max(0.4, 1/3)) / 0.6; then 1 / (max(5/3, 3) + 1 + max(2/3, 1)) / 0.2
        ("match_gumbel", 0.5 / 0.6 + 0.5 / 0.6 * 0.2 / 0.2),
        ("token_rejection", 5 / 6 + 5 / 6),
        # c = 5/6, then min(1, 5/6 * 3/2) = 1: everything is kept
        ("block_verification", 2.0),
    ],
)
def test_by_hand(name: str, value: float) -> None:
    assert expected_accepted(name, np.array([0, 1]), P, Q) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("name", ACCEPTANCE)
def test_nothing_drafted_nothing_accepted(name: str) -> None:
    assert expected_accepted(name, np.array([], dtype=np.int64), P, Q[:0]) == 0


@pytest.mark.parametrize("name", ACCEPTANCE)
def test_a_token_the_target_never_emits_ends_it(name: str) -> None:
    p = np.array([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    assert expected_accepted(name, np.array([0, 0]), p, Q) == 0


def test_what_cannot_be_asked() -> None:
    with pytest.raises(errors.InputError, match="expected_accepted: got 'best', expected one of: match_independent, "):
        expected_accepted("best", np.array([0]), P, Q)
    message = (
        r"expected_accepted: got drafted tokens \(3,\), p \(3, 3\) and q \(2, 3\); expected drafted \[B - 1\], p \["
    )
    with pytest.raises(errors.InputError, match=message):
        expected_accepted("token_rejection", np.array([0, 1, 2]), P, Q)


@pytest.mark.parametrize("name", ACCEPTANCE)
@pytest.mark.parametrize(
    ("drafted", "p", "q", "message"),
    [
        ([0, 1], P * np.nan, Q, "p, slot 0: got nan, expected numbers from 0 to 1"),
        ([0, 1], P, Q - [[0], [0.3]], r"q, slot 1: got -0\.\d+, expected numbers from 0 to 1"),
        ([0, 1], P * 3, Q, r"p, slot 0: got probabilities that add up to 3, expected 1 \(within 0\.000976562\)"),
        ([0, 1], P, Q[:, :2] * [[1, 2]], "got drafted tokens .*; expected drafted"),
        ([0, -1], P, Q, "slot 1: got drafted token -1, expected an id from 0 to 2"),
        ([3, 1], P, Q, "slot 0: got drafted token 3, expected an id from 0 to 2"),
        ([0.0, 1.0], P, Q, "got drafted tokens of dtype float64, expected integers"),
        ([[0, 1]], P, Q, r"got drafted tokens \(1, 2\), p"),
        ([1, 1], P, [[0.8, 0.0, 0.2], [0.6, 0.2, 0.2]], "slot 0: q of drafted token 1 is 0, expected the law that it"),
        ([0, 1], P[0], Q, r"got p \(3,\), expected \[n, V\]"),
        ([0, 1], [[1.0], [0.5, 0.5]], Q, r"p: expected an array of numbers \[n, V\]"),
    ],
)
def test_what_is_no_law_is_refused_by_every_rule(name: str, drafted: Any, p: Any, q: Any, message: str) -> None:
    with pytest.raises(errors.InputError, match=f"expected_accepted: {message}"):
        expected_accepted(name, drafted, p, q)


@pytest.mark.parametrize("name", ACCEPTANCE)
def test_lists_are_as_good_as_arrays(name: str) -> None:
    assert expected_accepted(name, [0, 1], P.tolist(), Q.tolist()) == expected_accepted(name, np.array([0, 1]), P, Q)
    assert expected_accepted(name, [], P, Q[:0]) == 0
