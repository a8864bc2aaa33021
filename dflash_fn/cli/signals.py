"""Ctrl-C: one line and one exit code, wherever it comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["INTERRUPTED", "as_exception", "at_once", "end_at_once", "ignore"]

INTERRUPTED = 130
"""The exit code of Ctrl-C, as shells report it."""

SHOW_CURSOR, CLEAR_LINE = b"\x1b[?25h", b"\r\x1b[2K"


def end_at_once() -> None:
    """From here on, let Ctrl-C end the process on the spot; what has something to keep asks for `as_exception`."""
    if _ours():
        signal.signal(signal.SIGINT, _end)


def ignore() -> None:
    """From here on, do nothing on Ctrl-C: all is done, and the interpreter would only complain while it ends."""
    if _ours():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def at_once() -> Iterator[None]:
    """Let Ctrl-C end the process on the spot, while there is nothing to keep or to clean up.

    That is for imports, which a KeyboardInterrupt does not always come through as what it is: it turns into an
    ImportError, or aborts the process inside a C++ library.
    """
    with _handler(_end):
        yield


@contextmanager
def as_exception() -> Iterator[None]:
    """Let Ctrl-C be a KeyboardInterrupt, which can be caught."""
    with _handler(signal.default_int_handler):
        yield


@contextmanager
def _handler(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    if not _ours():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _ours() -> bool:
    """Whether the signal is ours to handle: not in a thread, and not where the shell started us deaf to it."""
    known = signal.getsignal(signal.SIGINT)
    return threading.current_thread() is threading.main_thread() and known not in (signal.SIG_IGN, None)


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    # Not through sys.stderr: the signal may have come in the middle of one of its writes.
    codes = CLEAR_LINE + SHOW_CURSOR if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else b""
    try:
        os.write(2, codes + b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)
