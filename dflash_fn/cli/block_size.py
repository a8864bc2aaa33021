"""`--block-size`: a number, or `auto`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dflash_fn.cli.options import AUTO, Options

if TYPE_CHECKING:
    from dflash_fn.records import DecodeState, Pace, Pair

__all__ = ["block_size", "pace_of"]


def block_size(text: str) -> int | str:
    """Read the flag.

    Raises:
        typer.BadParameter: what is neither a number nor `auto`.
    """
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor {AUTO!r}") from None


def pace_of(options: Options, state: DecodeState, pair: Pair, fixed: int) -> int | Pace:
    """Return the block size to decode with, or what chooses it; costs are measured now."""
    from dflash_fn import pacing
    from dflash_fn.cli.pairs import proposer_of

    return pacing.auto(state, pair, proposer=proposer_of(options.load)) if options.block_size == AUTO else fixed
