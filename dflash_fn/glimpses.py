"""Rows of logits of which only a few log probabilities are known, as servers give them.

A log probability is a logit less the logarithm of a sum, the same for all tokens of a row. So gaps between log
probabilities are gaps between logits, and two rows can be compared up to a shift of one of them; how large the logits
are, in which rounding is measured, is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from dflash_fn.divergence import Divergence, Top2, explain_divergence, top2

__all__ = ["Glimpse", "Row", "distance", "explain_rows"]

UNTOLD = "the server gave no log probabilities"


@dataclass(frozen=True, slots=True)
class Glimpse:
    """What is known of a row.

    Attributes:
        chosen: the token that was chosen from it; None where even that is not told.
        values: log probabilities by token, of the best and of the chosen one; empty where none are told.
    """

    chosen: int | None
    values: Mapping[int, float] = field(default_factory=dict)


Row: TypeAlias = "np.ndarray | Glimpse"
"""[V] logits, or what is known of them."""


def explain_rows(
    what: str,
    position: int,
    ours: Row,
    theirs: Row,
    chosen: tuple[int, int],
    *,
    relative_bound: float,
    peak: float,
    reason: str | None = None,
) -> Divergence:
    """Describe what two programs saw at the first position where they chose differently, full rows or not.

    Rows are apart by the largest difference between them over tokens that both know, after the shift that makes it
    least: a lower bound of what full rows would give. The other program's choice counts too; where it is not among the
    tokens that a row knows, it is taken to be as good as the worst of those, which is the most that it can be.

    Rounding explains a swap of the two best. A program whose choice is third in the other's row has passed another
    token that is nearer, so it is not explained; a token that equals the second counts as one of the two.

    Args:
        what: whose choice it was.
        position: absolute index of the chosen token.
        ours: of the first program, after the tokens that both agree on.
        theirs: of the other, after the same tokens.
        chosen: by the first program, and by the other.
        relative_bound: how far rounding reaches; multiplied with the largest magnitude in a full row.
        peak: what it is multiplied with where no row is full, or more where the known values say so.
        reason: why rounding explains nothing between these programs, if so.
    """
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        found = explain_divergence(what, position, ours, theirs, relative_bound=relative_bound)
        return replace(found, reason=reason or _not_of_two((ours, theirs), (found.ours, found.theirs)))
    tops = _top2(ours, chosen[0]), _top2(theirs, chosen[1])
    if any(top.gap is None for top in tops):
        return Divergence(what, position, *tops, None, None, UNTOLD)
    scales = [top.scale for top in tops if top.scale is not None]
    scale = max(scales) if scales else max(peak, _spread(ours), _spread(theirs))
    apart, reason = distance(ours, theirs, chosen), reason or _not_of_two((ours, theirs), tops)
    return Divergence(what, position, *tops, apart, relative_bound * scale, reason=reason)


def _not_of_two(rows: tuple[Row, Row], tops: tuple[Top2, Top2]) -> str | None:
    """Say which program's choice is not one of the other's best two; None where both are."""
    for row, top, other in zip(rows, tops, reversed(tops), strict=True):
        if top.second is not None and other.best != top.best and _value(row, other.best) < _value(row, top.second):
            return f"token {other.best} is the choice of one way, and not among the best two of the other"
    return None


def _top2(row: Row, chosen: int) -> Top2:
    if isinstance(row, np.ndarray):
        return top2(row)
    others = {token: value for token, value in row.values.items() if token != chosen}
    if chosen not in row.values or not others:
        return Top2(chosen, None, None, None)
    second = max(others, key=others.__getitem__)
    # below zero is a choice that was not the best: as far from right as it is from the best
    return Top2(chosen, second, abs(row.values[chosen] - others[second]), None)


def _spread(row: Row) -> float:
    """Return half the distance between the known values: the largest magnitude is that at least."""
    values = list(row.values.values()) if isinstance(row, Glimpse) else []
    return (max(values) - min(values)) / 2.0 if values else 0.0


def distance(ours: Row, theirs: Row, chosen: tuple[int, int]) -> float | None:
    """Return how far two rows are apart, full or not; None where too little is known.

    Args:
        ours: of one program.
        theirs: of the other, after the same tokens.
        chosen: by each.
    """
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max())
    if any(isinstance(row, Glimpse) and not row.values for row in (ours, theirs)):
        return None
    known = [set(row.values) for row in (ours, theirs) if isinstance(row, Glimpse)]
    tokens = sorted(set.intersection(*known) | set(chosen))
    if len(tokens) < 2:
        return None  # one token can always be shifted onto the other
    differences = [_value(ours, token) - _value(theirs, token) for token in tokens]
    return (max(differences) - min(differences)) / 2.0


def _value(row: Row, token: int) -> float:
    if isinstance(row, np.ndarray):
        return float(row[token])
    return row.values.get(token, min(row.values.values()))
