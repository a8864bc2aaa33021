"""Exit codes, and how what a command raises becomes one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from dflash_fn.errors import DflashError

__all__ = ["BAD_INPUT", "BROKEN_PIPE", "DIFFERENT", "INTERRUPTED", "handled", "interrupted"]

DIFFERENT = 1
"""`--check`, `doctor --prove` or `trace check` found a difference."""
BAD_INPUT = 2
"""Input that cannot be used, or any other `DflashError`; typer's usage errors have the same code."""
INTERRUPTED = 130
"""Ctrl-C, as shells report it."""
BROKEN_PIPE = 141
"""Whoever read our output has gone, as shells report it."""


@contextmanager
def handled() -> Iterator[None]:
    """Turn our own errors, Ctrl-C and a broken pipe into exit codes; anything else keeps its traceback."""
    try:
        yield
        sys.stdout.flush()
    except DflashError as error:
        message = " ".join(str(error).split())
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        raise interrupted() from None
    except BrokenPipeError:
        _abandon_stdout()
        raise typer.Exit(BROKEN_PIPE) from None


def interrupted() -> typer.Exit:
    """Say so, and return what to raise."""
    typer.echo("interrupted", err=True)
    return typer.Exit(INTERRUPTED)


def _abandon_stdout() -> None:
    # The interpreter flushes stdout once more at its end, and would complain.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
