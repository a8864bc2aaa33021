"""What came of a check: the first quantity that differs, the largest deviation of each, and whether bits agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Deviation", "Report", "report_of"]


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one quantity of one row at one step is from the trace's, where it is furthest.

    Attributes:
        quantity: such as `target_logits` or `draft_cache.keys`.
        step: index of the step; None for prefill.
        row: index of the row.
        slot: of the block; for what a step reads or adds, the token's index among those; in prefill its position.
        layer: of target or draft; for context features the tapped layer; None where layers do not matter.
        size: of the difference; of integers, how many differ.
        bound: of what rounding explains; 0 for integers.
        note: what was recorded and what was found, for people.
        near_tie: whether two right programs may choose differently here.
        same_bits: whether all of the quantity's bits are the trace's; None where that is not known.
    """

    quantity: str
    step: int | None
    row: int
    slot: int | None
    layer: int | None
    size: float
    bound: float
    note: str = ""
    near_tie: bool = False
    same_bits: bool | None = None

    @property
    def beyond(self) -> bool:
        """Whether rounding does not explain it; NaN is beyond every bound."""
        return not self.near_tie and not self.size <= self.bound

    @property
    def ratio(self) -> float:
        """The size in units of the bound."""
        if self.size == 0 or math.isnan(self.size):
            return self.size
        return self.size / self.bound if self.bound else math.inf

    @property
    def where(self) -> str:
        """The place, in words."""
        names = {"row": self.row, "position" if self.step is None else "slot": self.slot, "layer": self.layer}
        place = "prefill" if self.step is None else f"step {self.step}"
        return ", ".join([place, *(f"{name} {value}" for name, value in names.items() if value is not None)])

    def __str__(self) -> str:
        off = f"off by {self.size:.3g}, bound {self.bound:.3g}" if self.bound else "not the same"
        judged = "a near tie" if self.near_tie else off
        return f"{self.quantity} at {self.where}: {judged}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True, slots=True)
class Report:
    """What came of replaying a trace.

    Attributes:
        recorded: what made the trace, in words.
        replayed: what replayed it.
        steps: of the trace.
        num_tokens: of the trace.
        first: the first quantity that differs beyond its bound, in the order in which things are computed; or None.
        near_ties: choices that differ where two right programs may.
        largest: of each quantity the largest deviation, in units of its bound.
        compared: how many comparisons each quantity had.
        bits_identical: whether all known bits are; None where none are known, or they cannot be expected to be.
        first_bits: the first quantity whose bits differ; None where none do.
    """

    recorded: str
    replayed: str
    steps: int
    num_tokens: int
    first: Deviation | None
    near_ties: tuple[Deviation, ...]
    largest: tuple[Deviation, ...]
    compared: dict[str, int]
    bits_identical: bool | None
    first_bits: Deviation | None

    @property
    def fine(self) -> bool:
        """Whether rounding explains every difference."""
        return self.first is None


def report_of(
    found: Iterable[Deviation], *, recorded: str, replayed: str, steps: int, num_tokens: int, comparable_bits: bool
) -> Report:
    """Sum up all comparisons, which come in the order of the computation."""
    seen = list(found)
    largest: dict[str, Deviation] = {}
    for one in seen:
        best = largest.setdefault(one.quantity, one)
        if not one.ratio <= best.ratio and not math.isnan(best.ratio):
            largest[one.quantity] = one
    known = [one for one in seen if one.same_bits is not None] if comparable_bits else []
    return Report(
        recorded=recorded,
        replayed=replayed,
        steps=steps,
        num_tokens=num_tokens,
        first=next((one for one in seen if one.beyond), None),
        near_ties=tuple(one for one in seen if one.near_tie),
        largest=tuple(largest.values()),
        compared=dict(Counter(quantity for quantity, *_ in {(one.quantity, one.step, one.row) for one in seen})),
        bits_identical=all(one.same_bits for one in known) if known else None,
        first_bits=next((one for one in known if not one.same_bits), None),
    )
