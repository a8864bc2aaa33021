"""The match rule: keep drafted tokens for as long as they are the target's own choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_fn.policies.base import Policy
from dflash_fn.records import Array, Verdict

__all__ = ["match"]


def greedy_match(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
    """num_accepted = max {n : drafted[i] = argmax logits[i] for all i < n}; next_token = argmax logits[num_accepted].

    Ties go to the first index, on every port.
    """
    del q, uniforms
    choice = xp.astype(xp.argmax(logits, axis=-1), drafted.dtype)
    agree = xp.astype(drafted == choice[:, :-1], drafted.dtype)
    num_accepted = xp.sum(xp.cumulative_prod(agree, axis=-1), axis=-1, dtype=drafted.dtype)
    next_token = xp.take_along_axis(choice, num_accepted[:, None], axis=-1)[:, 0]
    return Verdict(num_accepted, next_token)


def match() -> Policy:
    """Return the greedy match policy: what is emitted is, token for token, what the target alone would emit.

    Guarantees:
        P01: with any draft and any block size, the tokens and the bits of their logits are those of no draft.

    Source:
        arXiv 2602.06036, section 3, at temperature 0; Leviathan et al. 2211.17192, section 2.2.

    Example:
        >>> import numpy as np
        >>> logits = np.array([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])
        >>> verdict = match().rule(np, np.array([[1, 1]]), logits, None, {})
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
        ([1], [0])
    """
    return Policy("match", greedy_match, lossless=True)
