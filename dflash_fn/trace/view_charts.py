"""Two small charts, as SVG without a script; the numbers stand beside them in a table too."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from dflash_fn.trace.view_html import Html, tag

__all__ = ["slot_chart", "step_chart"]

WIDTH, HEIGHT = 320, 150
LEFT, RIGHT, TOP, BOTTOM = 32, 4, 16, 18
"""Margins, in units of which a narrow screen has as many as it has pixels."""


def slot_chart(kept: Sequence[tuple[int, int]]) -> Html:
    """Return bars, one a slot after the anchor: the share of blocks in which the text kept what was drafted there."""
    shares = [count / of if of else 0.0 for count, of in kept]
    width = (WIDTH - LEFT - RIGHT) / max(len(shares), 1)
    bars: list[Html] = []
    for index, share in enumerate(shares):
        middle = LEFT + width * (index + 0.5)
        top = _y(share)
        bars.append(_bar(LEFT + width * (index + 0.15), top, width * 0.7))
        bars.append(_text(middle, top - 3, f"{share:.0%}", "middle"))
        bars.append(_text(middle, HEIGHT - 5, str(index + 1), "middle"))
    label = "Share of blocks in which the drafted token was kept, by slot: "
    return _chart(label + ", ".join(f"{share:.0%}" for share in shares), [*_grid((0.0, 0.5, 1.0), "{:.0%}"), *bars])


def step_chart(emitted: Sequence[int], most: int) -> Html:
    """Return bars, one a step: the tokens that it emitted, of at most `most`; and a line, their mean so far, tau."""
    width = (WIDTH - LEFT - RIGHT) / max(len(emitted), 1)
    bars = [_bar(LEFT + width * (index + 0.1), _y(count / most), width * 0.8) for index, count in enumerate(emitted)]
    means = [so_far / count for count, so_far in enumerate(itertools.accumulate(emitted), start=1)]
    points = " ".join(f"{LEFT + width * (index + 0.5):.1f},{_y(mean / most):.1f}" for index, mean in enumerate(means))
    ends = [_text(LEFT, HEIGHT - 5, "1", "start"), _text(WIDTH - RIGHT, HEIGHT - 5, str(len(emitted)), "end")]
    line = [tag("polyline", points=points, class_="line")] if emitted else []
    label = f"Tokens emitted in each of {len(emitted)} steps" + (
        f"; their mean ends at {means[-1]:.2f}" if means else ""
    )
    return _chart(label, [*_grid(sorted({0.0, (most // 2) / most, 1.0}), "{:.0f}", most), *bars, *line, *ends])


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _grid(shares: Iterable[float], form: str, scale: float = 1.0) -> list[Html]:
    made: list[Html] = []
    for share in shares:
        y = f"{_y(share):.1f}"
        made.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        made.append(_text(LEFT - 3, _y(share) + 3, form.format(share * scale), "end"))
    return made


def _bar(x: float, top: float, width: float) -> Html:
    height = HEIGHT - BOTTOM - top
    return tag("rect", x=f"{x:.1f}", y=f"{top:.1f}", width=f"{width:.1f}", height=f"{height:.1f}", class_="bar")


def _text(x: float, y: float, words: str, anchor: str) -> Html:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def _chart(label: str, parts: Sequence[Html]) -> Html:
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
