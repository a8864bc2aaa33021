"""Where two programs that decode the same prompt part, and whether rounding explains it.

Greedy decoding takes the larger of two logits. Two right programs that sum in another order put each logit a little
elsewhere, so they may part where the two best are closer than that: at a near tie. Anything else is a mistake in one
of them. `dflash_fn.tolerances` derives how far rounding reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_fn.tolerances import TIE

__all__ = ["Divergence", "Top2", "explain_divergence", "first_difference", "top2"]


@dataclass(frozen=True, slots=True)
class Top2:
    """The two best tokens of a row of logits.

    Attributes:
        best: the token chosen, the first of equals.
        second: the next best; None where a program tells its choice alone.
        gap: how much lower its logit is; None where a program does not tell.
        scale: largest magnitude in the row; None where a program does not tell.
    """

    best: int
    second: int | None
    gap: float | None
    scale: float | None

    def __str__(self) -> str:
        if self.gap is None:
            return f"{self.best}"
        return f"{self.best} before {self.second} by {self.gap:.3g}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """A position at which two programs chose different tokens.

    Attributes:
        what: whose choice it was, and where, for people.
        position: absolute index of the chosen token.
        ours: the two best of the first program.
        theirs: the two best of the other.
        apart: largest difference between the two rows of logits; None where it is not known.
        bound: how far apart rounding may put them; None where it is not known.
        unknown: why nothing can be said of it; None where the rows are known.
        reason: why rounding does not explain it, whatever the distances; None where those decide.
    """

    what: str
    position: int
    ours: Top2
    theirs: Top2
    apart: float | None
    bound: float | None
    unknown: str | None = None
    reason: str | None = None

    @property
    def near_tie(self) -> bool:
        """Whether the distance of the logits and both gaps are known, and within what rounding may do."""
        gaps = [gap for gap in (self.ours.gap, self.theirs.gap) if gap is not None]
        if self.reason is not None or self.apart is None or self.bound is None or len(gaps) < 2:
            return False
        return self.apart <= self.bound and max(gaps) <= TIE * self.bound

    @property
    def verdict(self) -> str:
        """What to make of it: a near tie, not explained by rounding, or unknown and why."""
        if self.unknown is not None:
            return f"unknown: {self.unknown}"
        return "near tie" if self.near_tie else "not explained by rounding"

    def __str__(self) -> str:
        start = f"{self.what}, position {self.position}: ours {self.ours}, theirs {self.theirs}"
        if self.apart is None or self.bound is None:
            return f"{start}: {self.verdict}"
        judged = "a near tie" if self.near_tie else "NO near tie"
        return (
            f"{start} (rounding may do {TIE * self.bound:.3g}); logits up to {self.apart:.3g} apart "
            f"(rounding may do {self.bound:.3g}): {judged}"
        )


def top2(logits: np.ndarray) -> Top2:
    """Read the two best tokens off a row of logits; the first index wins a tie.

    Example:
        >>> top2(np.array([1.0, 4.0, 3.5]))
        Top2(best=1, second=2, gap=0.5, scale=4.0)
    """
    order = np.argsort(-logits, kind="stable")
    best, second = int(order[0]), int(order[1])
    gap = float(logits[best]) - float(logits[second])
    return Top2(best, second, gap, float(np.abs(logits).max()))


def explain_divergence(
    what: str, position: int, ours: np.ndarray, theirs: np.ndarray, *, relative_bound: float
) -> Divergence:
    """Describe what two programs saw at the first position where they chose differently.

    Args:
        what: whose choice it was.
        position: absolute index of the chosen token.
        ours: [V] logits of the first program, after the tokens that both agree on.
        theirs: [V] logits of the other program after the same tokens.
        relative_bound: of `dflash_fn.tolerances.bound`; multiplied with the largest magnitude in the rows.
    """
    scale = max(float(np.abs(row).max()) for row in (ours, theirs))
    apart = float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max())
    return Divergence(what, position, top2(ours), top2(theirs), apart, relative_bound * scale)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first index at which two texts differ; None where one begins the other.

    Example:
        >>> first_difference([5, 6, 7], [5, 6, 8]), first_difference([5], [5, 6])
        (2, None)
    """
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (mine, other) in pairs if mine != other), None)
