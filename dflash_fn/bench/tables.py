"""Figures as tables, as Markdown, and as one object for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_fn.bench.asking import Record
from dflash_fn.bench.clock import PARTS
from dflash_fn.bench.common import markdown
from dflash_fn.bench.contenders import ENGINES, LEAD
from dflash_fn.bench.estimates import LEAST, Estimate, written
from dflash_fn.bench.figures import Figures
from dflash_fn.metrics import TAU_DEFINITION

__all__ = ["Grid", "as_markdown", "as_object", "failures", "grids", "notes"]

NONE = "-"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as text.

    Attributes:
        title: what it shows; "" where the columns say it.
        head: names of the columns, that of the ways first.
        rows: cells, as many as the head has.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Column = Callable[[Figures], str]


def grids(figures: Sequence[Figures]) -> list[Grid]:
    """Return the tables: speed, where the time goes, and what was accepted by slot.

    Columns without a figure are left out, and so are tables without columns, and below the first rows without figures.
    """
    engine = next((one.name for one in figures if one.name in ENGINES.values()), "the engine")
    speed: dict[str, Column] = {
        "tokens/s": lambda one: written(one.rate, 1),
        f"x {LEAD}": lambda one: written(one.speedup, 2),
        f"x {engine}": lambda one: written(one.over_engine, 2),
        "tau": lambda one: written(one.tau, 2) + (" (server)" if one.tau_told_by else ""),
        "efficiency": lambda one: written(one.efficiency, 2),
        f"same text as {LEAD}": lambda one: NONE if one.same is None else f"{one.same} of {one.compared}",
        "failed": lambda one: str(one.failed) if one.failed else NONE,
    }
    where: dict[str, Column] = {
        "first token, ms": lambda one: _number(one.first_median, 1e3, 0),
        "90 %, ms": lambda one: _number(one.first_p90, 1e3, 0),
        "whole, tokens/s": lambda one: written(one.whole_rate, 1),
        "all at once, tokens/s": _at_once,
        **{f"{part} %": _share_of(part) for part in PARTS},
        "peak, GB": lambda one: NONE if one.memory is None or one.memory != one.memory else f"{one.memory:.3g}",
    }
    most = max((len(one.by_slot) for one in figures), default=0)
    slots = {str(slot): _slot(slot) for slot in range(1, most + 1)}
    tables = (("", speed), ("time, and memory", where), ("accepted by slot after the anchor, %", slots))
    made = [_grid(title, figures, columns) for title, columns in tables]
    return [grid for grid in made if len(grid.head) > 1]


def _at_once(one: Figures) -> str:
    """Say the throughput only where replies overlapped: elsewhere it is the rate of whole replies."""
    if one.throughput is None or one.whole_rate is None or one.throughput < 1.02 * one.whole_rate.value:
        return NONE
    return f"{one.throughput:.1f}"


def _share_of(part: str) -> Column:
    return lambda one: _number(one.shares.get(part), 100, 0)


def _slot(slot: int) -> Column:
    return lambda one: written(one.by_slot[slot - 1], 0, scale=100) if len(one.by_slot) >= slot else NONE


def _number(value: float | None, scale: float, digits: int) -> str:
    return NONE if value is None or value != value else f"{scale * value:.{digits}f}"


def _grid(title: str, figures: Sequence[Figures], columns: Mapping[str, Column]) -> Grid:
    cells = {name: [column(one) for one in figures] for name, column in columns.items()}
    kept = {name: column for name, column in cells.items() if any(cell != NONE for cell in column)}
    rows = [(one.name, *(column[index] for column in kept.values())) for index, one in enumerate(figures)]
    told = [row for row in rows if set(row[1:]) != {NONE}]
    return Grid(title, ("way", *kept), tuple(told if title else rows))


def notes(figures: Sequence[Figures]) -> list[str]:
    """Return what must be said beside the tables."""
    made = ["tokens/s and speed-ups: after the first token; whole: prompt included"]
    if any(one.tau is not None for one in figures):
        made.insert(0, TAU_DEFINITION + "; efficiency = speed-up over plain / tau")
    if any(one.rate is not None and one.rate.half is not None for one in figures):
        made.append("intervals: 95 %, over questions, by the jackknife and Student's t")
    else:
        made.append(f"no intervals: they take {LEAST} questions")
    return made


def failures(records: Sequence[Record]) -> list[str]:
    """Return a line for each reply that is none."""
    return [
        f"{record.question}{f', turn {record.turn + 1}' if record.turn else ''}, {record.way}: {record.reply.error}"
        for record in records
        if record.reply.error is not None
    ]


def as_markdown(line: str, figures: Sequence[Figures], records: Sequence[Record]) -> str:
    """Return all tables, notes and failures as Markdown, below a line that says what was run."""
    parts = [line]
    for grid in grids(figures):
        rows = [[f"`{row[0]}`", *row[1:]] for row in grid.rows]
        parts += [grid.title] * bool(grid.title) + [markdown(grid.head, rows)]
    parts.append("\n".join(f"* {note}" for note in notes(figures)))
    lost = failures(records)
    if lost:
        parts.append(f"{len(lost)} of {len(records)} replies failed:\n\n" + "\n".join(f"* {one}" for one in lost))
    return "\n\n".join(parts)


def as_object(setting: Mapping[str, Any], figures: Sequence[Figures], records: Sequence[Record]) -> dict[str, Any]:
    """Return all of it for JSON; what is not known is null. A figure with an interval is an object."""
    return {**setting, "replies": len(records), "ways": [_entry(one) for one in figures], "failed": failures(records)}


def _entry(one: Figures) -> dict[str, Any]:
    numbers = {
        name: _estimate(getattr(one, name))
        for name in ("tau", "rate", "whole_rate", "speedup", "over_engine", "efficiency")
    }
    plain = (
        "replies", "failed", "tokens", "steps", "tau_told_by", "throughput", "first_median", "first_p90", "same",
        "compared",
    )  # fmt: skip
    return {
        "name": one.name,
        **{name: getattr(one, name) for name in plain},
        **numbers,
        "histogram": list(one.histogram),
        "by_slot": [_estimate(value) for value in one.by_slot],
        "shares": dict(one.shares) or None,
        "memory": None if one.memory is None or one.memory != one.memory else one.memory,
    }


def _estimate(value: Estimate | None) -> dict[str, float | None] | None:
    return None if value is None else {"value": value.value, "half": value.half}
