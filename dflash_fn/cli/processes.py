"""Commands that several processes run alike: one of them speaks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import typer

from dflash_fn.cli import exits, signals
from dflash_fn.errors import InputError

__all__ = ["check_alone", "first_speaks"]


def check_alone(command: str, instead: str = "") -> None:
    """Refuse a command that each of the processes of `torchrun` would do, and print, for itself.

    Args:
        command: its name.
        instead: what the user may have meant, for the message.

    Raises:
        InputError: there are several; in the first alone.
        typer.Exit: the same, silently, in the others.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" not in os.environ or not size.isdecimal() or int(size) < 2:
        return
    if os.environ["RANK"] != "0":
        raise typer.Exit(exits.BAD_INPUT)
    raise InputError(
        f"{command}: got {size} processes (WORLD_SIZE), which would all do and print the same; start it without "
        f"torchrun{instead}"
    )


@contextmanager
def first_speaks(processes: int | None) -> Iterator[None]:
    """Let only the process of rank 0 write to the streams, where several share a model.

    All of them end with the same code, for all of them meet the same errors; what is no error of ours keeps its
    traceback. Ctrl-C ends each at once: stopped at different tokens, they would wait for each other for ever.

    Args:
        processes: how many there are to be; None where there is one, and nothing changes.
    """
    if processes is None:
        yield
        return
    with signals.at_once():
        if os.environ.get("RANK", "0") == "0":
            yield
            return
        with (
            Path(os.devnull).open("w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            try:
                yield
            except exits.TOLD as error:
                raise typer.Exit(exits.tell(error)) from None
