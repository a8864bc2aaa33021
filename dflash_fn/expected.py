"""Expected acceptance along a recorded path, exactly and without drawing anything.

Given the drafted tokens of a block and p and q at its slots, each lossless rule keeps a prefix with a probability that
can be written down. So one recorded run says what every rule would have kept on its path, with no noise but that of
the path. Host arrays in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from dflash_fn import errors
from dflash_fn.policies.block_verification import carried

__all__ = ["ACCEPTANCE", "Acceptance", "expected_accepted"]


def expected_accepted(name: str, drafted: np.ndarray, p: np.ndarray, q: np.ndarray) -> float:
    """Return the expectation of num_accepted, over the rule's draws, given what was drafted.

        E[num_accepted | drafted, p, q] = sum_i P(at least i drafted tokens are kept)

    Where the drafted tokens are drawn from q, as recorded, the mean of this over many blocks estimates the same as the
    mean of num_accepted, with less variance. It may be asked of a rule other than the one that was recorded.

    Args:
        name: a key of `ACCEPTANCE`.
        drafted: [B - 1] token ids.
        p: [B - 1 or more, V], the target's probabilities along the drafted path.
        q: [B - 1, V], the draft's, which the tokens were drawn from; `match_independent` reads none of it.

    Raises:
        InputError: an unknown name, or arrays whose shapes do not fit.

    Guarantees:
        P15: equal to the mean over all outcomes of the rule, worked out by enumeration.

    Example:
        >>> p, q = np.array([[0.5, 0.3, 0.2]]), np.array([[0.6, 0.2, 0.2]])
        >>> round(expected_accepted("token_rejection", np.array([0]), p, q), 4)
        0.8333
    """
    if name not in ACCEPTANCE:
        raise errors.InputError(f"expected_accepted: got {name!r}, expected one of: {', '.join(ACCEPTANCE)}")
    count = len(drafted)
    if p.ndim != 2 or q.shape != (count, p.shape[1]) or len(p) < count:
        raise errors.InputError(
            f"expected_accepted: got {count} drafted tokens, p {p.shape} and q {q.shape}; "
            "expected p [B - 1 or more, V] and q [B - 1, V]"
        )
    return float(sum(ACCEPTANCE[name](np.asarray(drafted), p[:count].astype(np.float64), q.astype(np.float64))))


Acceptance: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""A function (drafted [B - 1], p [B - 1, V], q [B - 1, V]) -> [B - 1], P(at least i tokens are kept)."""


def tokens_kept(drafted: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return P(at least i kept) for i = 1 .. B - 1 under token rejection: the product of min(1, p / q)."""
    own, drawn = _at(p, drafted), _at(q, drafted)
    return np.cumprod(np.minimum(1.0, np.divide(own, drawn, out=(own > 0).astype(np.float64), where=drawn > 0)))


def blocks_kept(drafted: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the same under block verification: 1 - the product over j >= i of (1 - h[j])."""
    last = p[-1:] if len(p) else np.zeros((1, p.shape[1]))
    _, bars = carried(np, drafted[None], np.concatenate([p, last])[None], q[None])
    return 1.0 - np.cumprod(1.0 - bars[0][::-1])[::-1]


def match_independent(drafted: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the same under the match rule, with drafts that know nothing of the target's numbers: the product of p."""
    del q
    return np.cumprod(_at(p, drafted))


def match_inverse(drafted: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the same with a shared uniform: the part of the draft's interval that the target's covers."""
    low_p, low_q = _at(np.cumsum(p, axis=-1) - p, drafted), _at(np.cumsum(q, axis=-1) - q, drafted)
    own, drawn = _at(p, drafted), _at(q, drafted)
    both = np.minimum(low_p + own, low_q + drawn) - np.maximum(low_p, low_q)
    return np.cumprod(np.maximum(both, 0.0) / drawn)


def match_gumbel(drafted: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the same with shared Gumbel noise: P(both draw x) = 1 / sum_v max(p(v) / p(x), q(v) / q(x))."""
    own, drawn = _at(p, drafted)[:, None], _at(q, drafted)[:, None]
    safe = np.where(own > 0, own, 1.0)
    both = np.where(own[:, 0] > 0, 1.0 / np.maximum(p / safe, q / drawn).sum(axis=-1), 0.0)
    return np.cumprod(both / drawn[:, 0])


def _at(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]


ACCEPTANCE: dict[str, Acceptance] = {
    "match_independent": match_independent,
    "match_inverse": match_inverse,
    "match_gumbel": match_gumbel,
    "token_rejection": tokens_kept,
    "block_verification": blocks_kept,
}
"""How likely each rule is to keep how much, by name."""
