"""How far rounding puts two ways apart, measured where they agree and held against what rounding usually does.

The derived worst case (`dflash_fn.tolerances.bound`) is for checks that must not fail by chance. In bfloat16 it is as
large as the logits, so a mistake fits in. What two ways really do to each other's rows shows at every position that
both reached with the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from dflash_fn.bench.ways import Answer, Way
from dflash_fn.glimpses import distance
from dflash_fn.tolerances import UNIT, bound, typical

__all__ = ["FACTOR", "FEW", "Noise", "distances", "measure", "percent"]

FACTOR = 4.0
"""From the median of the distances to the largest that rounding is believed to reach. Over some 1200 positions of
honest runs the largest was 4.0 of the median, mostly 2 to 3. It is a median, so a mistake that begins late, or in
one prompt of several, does not widen the reach."""

FEW = 8
"""Positions below which a median says too little, and half of what rounding typically does at most stands for it:
honest runs have 0.36 to 0.59 of that."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far two ways are apart without a mistake, relative to the largest magnitude in a row.

    Attributes:
        promised: whether the contract promises the same bits, which leaves no noise.
        measured: median distance of the rows where the ways agree; None where fewer than `FEW` are known.
        positions: how many are known.
        typical: what rounding typically does at most, by `dflash_fn.tolerances.typical`.
        worst: what it cannot exceed, by `dflash_fn.tolerances.bound`.
        last: what storing the logits themselves does, once in each way.
    """

    promised: bool
    measured: float | None
    positions: int
    typical: float
    worst: float
    last: float

    @property
    def plausible(self) -> bool:
        """Whether rounding alone does what was measured; a mistake from the first token on does more."""
        return self.measured is None or self.measured <= self.typical

    @property
    def reach(self) -> float:
        """How far apart rounding is believed to put two rows."""
        if self.promised:
            return 0.0
        center = self.typical / 2.0 if self.measured is None or not self.plausible else self.measured
        return min(max(FACTOR * center, self.last), self.worst)

    def reason(self) -> str | None:
        """Say why no divergence between these ways can be a near tie; None where one can."""
        if self.promised:
            return "the contract promises the same bits here"
        if self.measured is None or self.plausible:
            return None
        return (
            f"already where the ways agree, their logits are typically {percent(self.measured)} of the peak apart, and "
            f"rounding puts them {percent(self.typical)} apart at most"
        )


def percent(share: float) -> str:
    """Write a share of the peak, of any size, as percent.

    Example:
        >>> percent(0.0148), percent(6.2e-7)
        ('1.5%', '6.2e-05%')
    """
    return f"{100.0 * share:.2g}%"


def measure(first: Way, second: Way, pool: Sequence[float]) -> Noise:
    """Make of all distances of a run what they say; the coarser dtype and the first way's sizes count."""
    coarser = max(first.dtype, second.dtype, key=UNIT.__getitem__)
    limits = typical(coarser, first.spec), bound(coarser, "logits", first.spec), 2.0 * UNIT[coarser]
    promised = first.promise is not None and first.promise == second.promise
    return Noise(promised, median(pool) if len(pool) >= FEW else None, len(pool), *limits)


def distances(first: Answer, second: Answer, agreed: int, peak: float) -> list[float]:
    """Return how far rows are apart, relative to their peak, at the positions where both chose the same.

    Args:
        first: an answer.
        second: to the same prompt.
        agreed: how many tokens are the same.
        peak: of rows that do not show theirs.
    """
    found: list[float] = []
    for index in range(agreed):
        rows, token = (first.logits[index], second.logits[index]), first.tokens[index]
        apart = distance(*rows, (token, token))
        peaks = [float(np.abs(row).max()) for row in rows if isinstance(row, np.ndarray)]
        if apart is not None:
            found.append(apart / (max(peaks) if peaks else peak))
    return found
