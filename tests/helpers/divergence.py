"""Where two right programs part: at a near tie, whose gap is smaller than what rounding may move, or by a mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_fn.tolerances import TIE

KNOWN = Path(__file__).resolve().parents[1] / "known"


class NearTie(AssertionError):
    """Two programs chose differently where rounding may decide: the one failure that tests/known may excuse."""


@dataclass(frozen=True)
class Top2:
    """The two best tokens of a row of logits.

    Attributes:
        best: the token chosen, the first of equals.
        second: the next best.
        gap: how much lower its logit is.
        scale: largest magnitude in the row.
    """

    best: int
    second: int
    gap: float
    scale: float

    def __str__(self) -> str:
        return f"{self.best} before {self.second} by {self.gap:.3g}"


@dataclass(frozen=True)
class Divergence:
    """A position at which two programs chose different tokens.

    Attributes:
        what: whose choice it was, and where, for people.
        position: absolute index of the chosen token.
        ours: the two best of this library.
        theirs: the two best of the other program.
        apart: largest difference between the two rows of logits.
        bound: how far apart rounding may put them.
    """

    what: str
    position: int
    ours: Top2
    theirs: Top2
    apart: float
    bound: float

    @property
    def near_tie(self) -> bool:
        """Whether the distance of the logits and both gaps are within what rounding may do."""
        return self.apart <= self.bound and max(self.ours.gap, self.theirs.gap) <= TIE * self.bound

    def __str__(self) -> str:
        judged = "a near tie" if self.near_tie else "NO near tie"
        return (
            f"{self.what}, position {self.position}: ours {self.ours}, theirs {self.theirs} (rounding may do "
            f"{TIE * self.bound:.3g}); logits up to {self.apart:.3g} apart (rounding may do {self.bound:.3g}): {judged}"
        )


def top2(logits: np.ndarray) -> Top2:
    """Read the two best tokens off a row of logits; the first index wins a tie."""
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
        ours: [V] logits of this library, after the tokens that both agree on.
        theirs: [V] logits of the other program after the same tokens.
        relative_bound: of `dflash_fn.tolerances.bound`; multiplied with the largest magnitude in the rows.
    """
    mine, other = top2(ours), top2(theirs)
    apart = float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max())
    return Divergence(what, position, mine, other, apart, relative_bound * max(mine.scale, other.scale))


def demand_near_tie(found: Divergence) -> None:
    """Raise AssertionError unless rounding explains the divergence."""
    assert found.near_tie, str(found)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first index at which two texts differ; None where one begins the other."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (mine, other) in pairs if mine != other), None)


def known_near_ties(port: str) -> Mapping[str, str]:
    """Read tests/known/PORT.txt: a reason for each test name that may end in `NearTie`."""
    lines = (KNOWN / f"{port}.txt").read_text(encoding="utf-8").splitlines()
    return parse_known([line.strip() for line in lines])


def parse_known(lines: Sequence[str]) -> Mapping[str, str]:
    """Read `NAME: REASON` lines; raise ValueError where one is something else."""
    known: dict[str, str] = {}
    for line in lines:
        if not line or line.startswith("#"):
            continue
        name, _, reason = line.partition(": ")
        if not reason.strip() or name in known:
            raise ValueError(f"expected one 'NAME: REASON' for each name, got {line!r}")
        known[name] = reason.strip()
    return known
