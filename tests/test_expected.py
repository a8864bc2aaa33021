"""Expected acceptance: numbers worked out by hand, and what cannot be asked."""

from __future__ import annotations

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
    message = r"expected_accepted: got 3 drafted tokens, p \(3, 3\) and q \(2, 3\); expected p \[B - 1 or more, V\]"
    with pytest.raises(errors.InputError, match=message):
        expected_accepted("token_rejection", np.array([0, 1, 2]), P, Q)
