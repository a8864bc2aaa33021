"""`dflash-fn trace expect`: what every rule would keep of a trace's blocks."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from dflash_fn.cli import report, terminal
from dflash_fn.cli.render import counted
from dflash_fn.errors import InputError

__all__ = ["expect"]

NOTE = "tau: 1 and the mean of num_accepted that a rule's draws give, along the recorded path and its drafts"


def expect(path: str, *, as_json: bool) -> None:
    """Run the command.

    Raises:
        DflashError: of any kind.
    """
    from dflash_fn.trace import expected_by_rule, read_trace

    made = read_trace(path)
    found = expected_by_rule(made)
    blocks = len(next(iter(found.values())))
    if not blocks:
        raise InputError(f"{path}: nothing was drafted in this trace; there is nothing to expect")
    taken = [row.num_accepted for rows in made.steps for row in rows if row and len(row.block) > 1]
    taus = {name: 1.0 + sum(kept) / blocks for name, kept in found.items()}
    recorded = 1.0 + sum(taken) / blocks
    if as_json:
        value: dict[str, Any] = {"file": path, "policy": made.policy, "blocks": blocks, "recorded": recorded}
        report.print_object(value | {"expected": taus})
        return
    console = terminal.console(stderr=False)
    console.print(Text(f"{made.policy}, {counted(blocks, 'block')}", style="bold"))
    console.print(_table(recorded, taus))
    console.print(Text(NOTE, style="dim"))


def _table(recorded: float, taus: dict[str, float]) -> Table:
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    made.add_column("rule", no_wrap=True)
    made.add_column("tau", justify="right", no_wrap=True)
    made.add_row("as recorded", f"{recorded:.3f}")
    for name, tau in taus.items():
        made.add_row(name, f"{tau:.3f}")
    return made
