"""Curves: what was logged, as JSON lines and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dflash_fn import errors
from dflash_fn.train.files import replaced, write_text

__all__ = ["draw", "read", "write"]

SEEN = "_seen"
"""What the name of a quantity ends with where it is taken on texts that were trained on."""


def write(path: Path, points: Iterable[Mapping[str, Any]]) -> None:
    """Write a curve, one JSON object a line, in place of what was there."""
    write_text(path, "".join(json.dumps(point) + "\n" for point in points))


def read(path: Path) -> list[dict[str, Any]]:
    """Read a curve.

    Raises:
        InputError: the file is damaged.
    """
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise errors.InputError(f"{path}: is no curve ({error}); the next checkpoint writes it anew") from None


def draw(
    path: Path, points: Iterable[Mapping[str, Any]], *, names: tuple[str, ...] = ("loss", "tau"), title: str = ""
) -> None:
    """Draw a PNG of some quantities against the step, one below the other; those that no point has are left out.

    Where points have a quantity on texts that were trained on too (`tau_seen`), it goes beside the other.

    Raises:
        BackendMissing: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise errors.BackendMissing(
            f"a picture of the curve needs matplotlib; run: {errors.install_line('plot')}"
        ) from None
    known = list(points)
    shown = [name for name in names if any(name in point for point in known)] or [names[0]]
    figure = Figure(figsize=(7, 2.6 * len(shown)), layout="constrained")
    for axes, name in zip(figure.subplots(len(shown), squeeze=False, sharex=True)[:, 0], shown, strict=True):
        for line, label in ((name, "not trained on"), (f"{name}{SEEN}", "trained on")):
            here = [(point["step"], point[line]) for point in known if line in point]
            if here:
                axes.plot([step for step, _ in here], [value for _, value in here], linewidth=1.2, label=label)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    if title:
        figure.suptitle(title, fontsize="medium")
    figure.axes[-1].set_xlabel("step")
    with replaced(path) as place:
        FigureCanvasAgg(figure).print_png(str(place))
