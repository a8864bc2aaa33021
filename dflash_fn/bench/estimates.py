"""Ratios over texts, such as tau = tokens / steps, with intervals of 95 % by the jackknife.

Steps of one text are not independent of each other; texts are. So the text (a prompt with a seed) is what is left out:
with n texts and theta[i] the ratio without text i, the variance of the ratio is (n - 1) / n * sum (theta[i] - mean)^2,
and the interval reaches t(n - 1) standard errors to either side, by Student's quantile. Texts of the same prompt count
as different texts: the interval is over seeds and prompts like these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["NORMAL", "Estimate", "difference", "quantile", "ratio"]

NORMAL = 1.959963984540054
"""The normal's 97.5 % quantile."""
FEW = {1: 12.706204736, 2: 4.302652730, 3: 3.182446305, 4: 2.776445105}
"""Student's, where the expansion is too coarse."""

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of two sums.

    Attributes:
        value: the ratio.
        half: half the width of its interval; None where there are fewer than two texts.
    """

    value: float
    half: float | None


def ratio(texts: Pairs) -> Estimate | None:
    """Return the ratio of sums of (numerator, denominator) over texts; None where the denominators add up to 0.

    Example:
        >>> made = ratio([(4, 2), (6, 2), (5, 2)])
        >>> round(made.value, 3), round(made.half, 3)
        (2.5, 1.242)
    """
    counted = np.array([pair for pair in texts if pair[1]], dtype=np.float64).reshape(-1, 2)
    if not len(counted):
        return None
    return Estimate(_of(counted.sum(axis=0)), _half(np.array([_of(row) for row in counted.sum(axis=0) - counted])))


def difference(texts: Pairs, others: Pairs) -> Estimate | None:
    """Return the ratio of the first less that of the others, text by text the same prompt and seed.

    Left out together, what both have in common cancels, so the interval is that of the difference itself.
    """
    both = [(*one, *other) for one, other in zip(texts, others, strict=True) if one[1] and other[1]]
    if not both:
        return None
    counted = np.array(both, dtype=np.float64)
    whole = counted.sum(axis=0)
    left_out = np.array([_of(row[:2]) - _of(row[2:]) for row in whole - counted])
    return Estimate(_of(whole[:2]) - _of(whole[2:]), _half(left_out))


def _of(pair: np.ndarray) -> float:
    return float(pair[0] / pair[1]) if pair[1] else math.nan


def _half(left_out: np.ndarray) -> float | None:
    count = len(left_out)
    if count < 2:
        return None
    variance = (count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum())
    return quantile(count - 1) * math.sqrt(variance)


def quantile(freedom: int) -> float:
    """Return Student's 97.5 % quantile.

    Source:
        Abramowitz and Stegun, 26.7.5, three terms; off by less than 0.01 from 5 degrees of freedom on.

    Example:
        >>> [round(quantile(n), 2) for n in (1, 3, 10, 100)]
        [12.71, 3.18, 2.23, 1.98]
    """
    if freedom in FEW:
        return FEW[freedom]
    z = NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
