"""Pictures of a benchmark, by matplotlib, which is an optional extra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_fn import errors
from dflash_fn.bench.estimates import Estimate
from dflash_fn.bench.figures import Figures

__all__ = ["draw"]

MARKERS = "osD^vPX*"


def draw(figures: Sequence[Figures], line: str, folder: Path) -> list[Path]:
    """Draw tokens per second by way, and what was accepted by slot, where there is something to draw.

    Returns:
        the files: `speed.png` and `slots.png`.

    Raises:
        BackendMissing: matplotlib is not installed.
        CacheFolderError: a file cannot be written.
    """
    made = []
    if any(one.rate for one in figures):
        made.append(_saved(_speed(figures, line), folder / "speed.png"))
    if any(one.by_slot for one in figures):
        made.append(_saved(_slots(figures, line), folder / "slots.png"))
    return made


def _canvas(width: float, height: float, line: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise errors.BackendMissing(
            f"pictures need matplotlib, which is not installed; run: {errors.install_line('plot')}"
        ) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(line, fontsize="small", wrap=True)
    return figure, figure.subplots()


def _saved(figure: Any, path: Path) -> Path:
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise errors.CacheFolderError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path


def _halves(known: Sequence[Estimate]) -> list[float] | None:
    """Return what to draw as intervals, NaN for an estimate without one; None where none has one."""
    if all(one.half is None for one in known):
        return None
    return [math.nan if one.half is None else one.half for one in known]


def _speed(figures: Sequence[Figures], line: str) -> Any:
    known = [(one.name, one.rate) for one in figures if one.rate is not None]
    figure, axes = _canvas(8, 1.6 + 0.4 * len(known), line)
    places = range(len(known))
    values = [rate.value for _, rate in known]
    halves = _halves([rate for _, rate in known])
    axes.barh(places, values, xerr=halves, color="C0", ecolor="0.3", capsize=3)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f"{value:.1f}", (0, place), xytext=(4, 0), textcoords="offset points", va="center", color="w")
    axes.set_yticks(places, [name for name, _ in known])
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s after the first token" + ("" if halves is None else "; bars: intervals of 95 %"))
    axes.grid(axis="x", alpha=0.3)
    return figure


def _slots(figures: Sequence[Figures], line: str) -> Any:
    figure, axes = _canvas(8, 4.5, line)
    drawn = [one for one in figures if one.by_slot]
    for index, one in enumerate(drawn):
        known = [(slot, value) for slot, value in enumerate(one.by_slot, start=1) if value is not None]
        axes.errorbar([slot for slot, _ in known], [value.value for _, value in known],
                      yerr=_halves([value for _, value in known]), marker=MARKERS[index % len(MARKERS)], capsize=2,
                      label=one.name)  # fmt: skip
    axes.set(xlabel="slot after the anchor", ylabel="accepted it, of the steps that drafted it", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure
