"""Exit codes, and how what a command raises becomes one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dflash_fn.cli import signals, streams
from dflash_fn.errors import DflashError

__all__ = ["BAD_INPUT", "BROKEN_PIPE", "DIFFERENT", "INTERRUPTED", "TOLD", "handled", "say_error", "tell"]

DIFFERENT = 1
"""`--check`, `doctor --prove` or `trace check` found a difference."""
BAD_INPUT = 2
"""Input that cannot be used, or any other `DflashError`, or a stdout that cannot be written to; typer's usage errors
have the same code."""
INTERRUPTED = signals.INTERRUPTED
"""Ctrl-C, as shells report it."""
BROKEN_PIPE = 141
"""Whoever read our output has gone, as shells report it."""

TOLD = (DflashError, streams.OutputLost, KeyboardInterrupt)
"""What ends a command with one line; anything else is a bug, and keeps its traceback."""

ONLY_ROW = re.compile(r"\brow 0(: |, )")
"""How the library names the row of a single prompt, to which a user of the command line never gave a number."""


@contextmanager
def handled(*, several_rows: bool = False) -> Iterator[None]:
    """Turn our own errors, Ctrl-C and a stdout that is lost into exit codes."""
    try:
        with signals.as_exception():
            yield
            sys.stdout.flush()
    except TOLD as error:
        raise typer.Exit(tell(error, several_rows=several_rows)) from None


def tell(error: BaseException, *, several_rows: bool = False) -> int:
    """Say what happened, in one line or (where nobody reads on) none, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    if isinstance(error, streams.OutputLost):
        streams.abandon_stdout()
        if error.reader_gone:
            return BROKEN_PIPE
        typer.echo(f"error: stdout cannot be written to ({error.reason}); the output is not whole", err=True)
        return BAD_INPUT
    say_error(error, several_rows=several_rows)
    return BAD_INPUT


def say_error(error: object, *, several_rows: bool = False) -> None:
    """Print an error in one line."""
    message = " ".join(str(error).split())
    typer.echo(f"error: {message if several_rows else ONLY_ROW.sub('', message)}", err=True)
