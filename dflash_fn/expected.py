"""Expected acceptance along a recorded path, exactly and without drawing anything.

Given the drafted tokens of a block and p and q at its slots, each lossless rule keeps a prefix with a probability that
can be written down. So one recorded run says what every rule would have kept on its path, with no noise but that of
the path. Host arrays in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from dflash_fn import errors
from dflash_fn.policies.block_verification import carried
from dflash_fn.tolerances import LAW

__all__ = ["ACCEPTANCE", "Acceptance", "expected_accepted"]


def expected_accepted(name: str, drafted: ArrayLike, p: ArrayLike, q: ArrayLike) -> float:
    """Return the expectation of num_accepted, over the rule's draws, given what was drafted.

        E[num_accepted | drafted, p, q] = sum_i P(at least i drafted tokens are kept)

    Where the drafted tokens are drawn from q, as recorded, the mean of this over many blocks estimates the same as the
    mean of num_accepted, with less variance. It may be asked of a rule other than the one that was recorded.

    Args:
        name: a key of `ACCEPTANCE`.
        drafted: [B - 1] token ids; arrays, or what numpy makes arrays of.
        p: [B - 1 or more, V], the target's probabilities along the drafted path.
        q: [B - 1, V], the draft's, which the tokens were drawn from; `match_independent` reads none of it.

    Raises:
        InputError: an unknown name; arrays whose shapes do not fit; ids that are no integers, or outside the
            vocabulary; p or q that are no law: negative, not finite, or off 1 in sum by more than `tolerances.LAW`;
            q = 0 at a drafted token, which then was not drawn from it.

    Guarantees:
        P15: equal to the mean over all outcomes of the rule, worked out by enumeration.

    Example:
        >>> p, q = np.array([[0.5, 0.3, 0.2]]), np.array([[0.6, 0.2, 0.2]])
        >>> round(expected_accepted("token_rejection", np.array([0]), p, q), 4)
        0.8333
    """
    if name not in ACCEPTANCE:
        raise errors.InputError(f"expected_accepted: got {name!r}, expected one of: {', '.join(ACCEPTANCE)}")
    tokens, target, draft = np.asarray(drafted), _law("p", p), _law("q", q)
    count = len(tokens) if tokens.ndim == 1 else -1
    if count < 0 or draft.shape != (count, target.shape[1]) or len(target) < count:
        raise errors.InputError(
            f"expected_accepted: got drafted tokens {tokens.shape}, p {target.shape} and q {draft.shape}; "
            "expected drafted [B - 1], p [B - 1 or more, V] and q [B - 1, V]"
        )
    tokens = _checked(tokens, draft)
    return float(sum(ACCEPTANCE[name](tokens, target[:count], draft)))


def _law(name: str, values: ArrayLike) -> np.ndarray:
    """Return [n, V] probabilities in float64, or raise InputError if a slot has no law."""
    try:
        law = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise errors.InputError(f"expected_accepted: {name}: expected an array of numbers [n, V] ({error})") from None
    if law.ndim != 2 or not law.shape[1]:
        raise errors.InputError(f"expected_accepted: got {name} {law.shape}, expected [n, V]")
    for slot, row in enumerate(law):
        if not np.isfinite(row).all() or row.min() < 0:
            raise errors.InputError(
                f"expected_accepted: {name}, slot {slot}: got {row.min()}, expected numbers from 0 to 1"
            )
        if abs(row.sum() - 1) > LAW:
            raise errors.InputError(
                f"expected_accepted: {name}, slot {slot}: got probabilities that add up to {row.sum():.6g}, expected 1 "
                f"(within {LAW:g}); give all V of them, from float32 or better"
            )
    return law


def _checked(tokens: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the drafted tokens as int64, or raise InputError if one cannot have been drawn from q."""
    if len(tokens) and tokens.dtype.kind not in "iu":
        raise errors.InputError(f"expected_accepted: got drafted tokens of dtype {tokens.dtype}, expected integers")
    for slot, token in enumerate(tokens.tolist()):
        if not 0 <= token < q.shape[1]:
            raise errors.InputError(
                f"expected_accepted: slot {slot}: got drafted token {token}, expected an id from 0 to {q.shape[1] - 1}"
            )
        if q[slot, token] == 0:
            raise errors.InputError(
                f"expected_accepted: slot {slot}: q of drafted token {token} is 0, expected the law that it was drawn "
                "from; of a token that no chance had a part in, q is 1 at it"
            )
    return tokens.astype(np.int64)


Acceptance: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""A function (drafted [B - 1], p [B - 1, V], q [B - 1, V]) -> [B - 1], P(at least i tokens are kept)."""


def tokens_kept(drafted: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return P(at least i kept) for i = 1 .. B - 1 under token rejection: the product of min(1, p / q)."""
    return np.cumprod(np.minimum(1.0, _at(p, drafted) / _at(q, drafted)))


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
