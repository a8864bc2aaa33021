"""The two streams: text on stdout, exactly as it is; everything said about it on stderr."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import Progress
from rich.status import Status
from rich.text import Text

__all__ = ["console", "note", "plain", "print_entry", "progress", "reading", "status", "whole_lines", "write"]


class Writer(Protocol):
    """What `write` is."""

    def __call__(self, text: str, *, dim: bool = False) -> None: ...


DIM, RESET, CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[2K"

VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Control characters, which a model may emit and a terminal would obey, and what is shown of them."""


def console(*, stderr: bool = True) -> Console:
    """Return a console for reports; without escape codes where NO_COLOR is set or nobody watches."""
    watched = sys.stderr.isatty() if stderr else sys.stdout.isatty()
    colour = "auto" if watched and not os.environ.get("NO_COLOR") else None
    return Console(stderr=stderr, color_system=colour, highlight=False, soft_wrap=not watched, markup=False)


def print_entry(to: Console, name: str, value: str, *, indent: int = 19) -> None:
    """Print a name and its value; on a terminal that is too narrow, the value goes on below itself."""
    room = max(20, to.width - indent)
    lines = (textwrap.wrap(value, room) if to.is_terminal else None) or [value]
    for first, line in zip([name, *[""] * len(lines)], lines, strict=False):
        to.print(Text(f"{first:<{indent}}", style="bold").append(line, style="not bold"))


def write(text: str, *, dim: bool = False) -> None:
    """Write a piece of text to stdout at once; only on a terminal is it dimmed, or stripped of control characters."""
    if not text:
        return
    if sys.stdout.isatty():
        text = text.translate(VISIBLE)
        if dim and not plain():
            text = f"{DIM}{text}{RESET}"
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def whole_lines() -> Iterator[Writer]:
    """Hand out `write`, and end the line that it leaves unfinished, whatever happens: an error gets its own."""
    last = "\n"

    def write_on(text: str, *, dim: bool = False) -> None:
        nonlocal last
        last = text or last
        write(text, dim=dim)

    try:
        yield write_on
    finally:
        if not last.endswith("\n"):
            write("\n")


def plain() -> bool:
    """Whether escape codes are unwanted on stdout."""
    return not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@contextmanager
def status(line: str) -> Iterator[Status | None]:
    """Show that something goes on, for as long as it does; silent where nobody watches."""
    screen = console()
    if screen.color_system is None:
        yield None
        return
    with screen.status(line, spinner="dots") as shown:
        yield shown


@contextmanager
def progress(line: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar for as long as the work goes on, and hand out what moves it; silent where nobody watches."""
    screen = console()
    if screen.color_system is None:
        yield lambda: None
        return
    with Progress(console=screen, transient=True) as bar:
        task = bar.add_task(line, total=total)
        yield lambda: bar.advance(task)


def reading(done: int, total: int) -> None:
    """Say how far a prompt has been read, on a line that is gone when all is; silent where nobody watches."""
    if console().color_system is None:
        return
    sys.stderr.write(CLEAR_LINE + (f"reading the prompt: {done} of {total} tokens" if done < total else ""))
    sys.stderr.flush()


@contextmanager
def note(line: str) -> Iterator[None]:
    """Say what goes on without moving anything, for work whose time is measured."""
    if console().color_system is None:
        yield
        return
    sys.stderr.write(line)
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write(CLEAR_LINE)
        sys.stderr.flush()
