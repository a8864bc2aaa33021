"""Statistics of decoding: pure functions over the `StepInfo`s that a run yields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_fn.records import StepInfo

__all__ = ["TAU_DEFINITION", "Summary", "summarize"]

TAU_DEFINITION = "tau = mean tokens emitted per step (accepted drafted tokens + 1)"
"""What tau is, in the words that every report uses."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. The opening step, in which nothing is drafted, counts in `num_tokens` alone.

    Attributes:
        steps: steps in which the row emitted something.
        num_tokens: tokens emitted, the opening step's included.
        num_accepted: drafted tokens kept, one number a step.
        tau: mean of `num_emitted = num_accepted + 1` over the steps; None if there were none.
        mean_accepted: mean of `num_accepted`; None if there were no steps.
        histogram: `histogram[n]` steps accepted n drafted tokens; as long as the block size; sums to `steps`.

    """

    steps: int
    num_tokens: int
    num_accepted: tuple[int, ...]
    tau: float | None
    mean_accepted: float | None
    histogram: tuple[int, ...]


def summarize(infos: Sequence[StepInfo], row: int | None = 0) -> Summary:
    """Sum up a run.

    Args:
        infos: what the run's steps reported, in any number of `rounds` one after the other.
        row: whose statistics; None takes all rows together, each step of each row counting once.

    Example:
        >>> infos = [
        ...     StepInfo(1, 4, ((5, 6, 7), (5, 6, 7)), ((5, 6, 7, 8), (5, 6)), (3, 1), None),
        ...     StepInfo(2, 4, ((9, 9, 9), (9, 9, 9)), ((9, 9, 4), (3,)), (2, 0), None),
        ... ]
        >>> both = summarize(infos, row=None)
        >>> both.mean_accepted, both.tau, both.histogram
        (1.5, 2.5, (1, 1, 1, 1))

    """
    counts = tuple(
        count for info in infos if info.step > 0 for count in _of(info.num_accepted, row) if count is not None
    )
    sizes = [info.block_size for info in infos]
    tally = Counter(counts)
    steps = len(counts)
    return Summary(
        steps=steps,
        num_tokens=sum(len(emitted) for info in infos for emitted in _of(info.emitted, row)),
        num_accepted=counts,
        tau=(sum(counts) + steps) / steps if steps else None,
        mean_accepted=sum(counts) / steps if steps else None,
        histogram=tuple(tally[count] for count in range(max(sizes, default=0))),
    )


def _of(rows: tuple, row: int | None) -> tuple:
    return rows if row is None else (rows[row],)
