"""What people and programs see of a checked trace."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_fn.cli.render import counted

if TYPE_CHECKING:
    from dflash_fn.trace import Deviation, Report

__all__ = ["as_object", "show"]

TIES_SHOWN = 3
"""Near ties that people see; JSON has them all."""


def show(console: Console, found: Report) -> None:
    """Print who is compared with whom, the table, and the verdict last, where eyes are."""
    console.print(Text("recorded  ", style="bold").append(found.recorded, style="not bold"))
    console.print(Text("replayed  ", style="bold").append(found.replayed, style="not bold"))
    console.print(table(found))
    for tie in found.near_ties[:TIES_SHOWN]:
        console.print(Text(str(tie), style="yellow"))
    if len(found.near_ties) > TIES_SHOWN:
        console.print(Text(f"... and {counted(len(found.near_ties) - TIES_SHOWN, 'near tie')} more", style="yellow"))
    console.print(bits_line(found))
    console.print(verdict_line(found))


def table(found: Report) -> Table:
    """Return a line for each quantity, with its largest deviation."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    made.add_column("quantity", no_wrap=True)
    for name in ("compared", "largest", "bound"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("where", overflow="fold")
    for one in found.largest:
        style = "bold red" if one.beyond else "yellow" if one.near_tie else None
        numbers = (str(found.compared[one.quantity]), f"{one.size:.3g}", f"{one.bound:.3g}" if one.bound else "exact")
        made.add_row(one.quantity, *numbers, one.where if one.size else "", style=style)
    return made


def bits_line(found: Report) -> Text:
    """Say whether bits agree, where they can be expected to."""
    if found.bits_identical is None:
        return Text("bits: not compared; the port or the dtype is another")
    if found.first_bits is None:
        return Text("bits: identical", style="green")
    return Text(f"bits: differ, first in {found.first_bits.quantity} at {found.first_bits.where}")


def verdict_line(found: Report) -> Text:
    """Say what came of it in one line."""
    size = f"{counted(found.steps, 'step')}, {counted(found.num_tokens, 'token')}"
    if found.first is not None:
        return Text(f"trace: differs, first in {found.first} ({size})", style="bold red")
    ties = f", with {counted(len(found.near_ties), 'near tie')}" if found.near_ties else ""
    return Text(f"trace: all within what rounding explains{ties} ({size})", style="green")


def as_object(found: Report) -> dict[str, Any]:
    """Return the report for JSON; a size that is no finite number is null."""
    return {
        "fine": found.fine,
        "first": _entry(found.first) if found.first else None,
        "near_ties": [_entry(one) for one in found.near_ties],
        "bits_identical": found.bits_identical,
        "first_bits": _entry(found.first_bits) if found.first_bits else None,
        "largest": [_entry(one) | {"compared": found.compared[one.quantity]} for one in found.largest],
        "steps": found.steps,
        "tokens": found.num_tokens,
        "recorded": found.recorded,
        "replayed": found.replayed,
    }


def _entry(one: Deviation) -> dict[str, Any]:
    return {
        "quantity": one.quantity,
        "step": one.step,
        "row": one.row,
        "slot": one.slot,
        "layer": one.layer,
        "size": one.size if math.isfinite(one.size) else None,
        "bound": one.bound,
        "note": one.note,
    }
