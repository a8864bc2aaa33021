"""`dflash-fn ports`: which ports are registered, and which of them can run here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from dflash_fn import registry
from dflash_fn.cli import report, signals, terminal
from dflash_fn.errors import BackendMissing, UnknownPort, install_line
from dflash_fn.port import PortInfo

__all__ = ["PortEntry", "look_at", "ports"]

INDENT = 11


@dataclass(frozen=True, slots=True)
class PortEntry:
    """A registered port.

    Attributes:
        name: as registered.
        info: what it runs on; None where it cannot run.
        problem: why it cannot run; "" where it can.
    """

    name: str
    info: PortInfo | None
    problem: str = ""

    def as_object(self) -> dict[str, Any]:
        """Return the entry for JSON."""
        info = asdict(self.info) if self.info else {}
        return {"name": self.name, "installed": self.info is not None, "problem": self.problem or None, **info}


def look_at(name: str) -> PortEntry:
    """Import a port and ask it; one that fails, however, is an entry that says why.

    Raises:
        UnknownPort: there is none of that name.
    """
    try:
        with signals.at_once():
            return PortEntry(name, registry.get_port(name).info())
    except UnknownPort:
        raise
    except BackendMissing as error:
        return PortEntry(name, None, str(error))
    except Exception as error:  # a port may be anyone's code, and a broken one must not hide the others
        return PortEntry(name, None, f"{type(error).__name__}: {error}")


def ports(*, as_json: bool) -> None:
    """Run the command."""
    with terminal.status("looking for ports"):
        entries = [look_at(name) for name in registry.port_names()]
    if as_json:
        report.print_object({"ports": [entry.as_object() for entry in entries]})
        return
    console = terminal.console(stderr=False)
    if not entries:
        console.print(f"no port is registered; run: {install_line('torch')}")
    for entry in entries:
        _print_entry(console, entry)


def _print_entry(console: Console, entry: PortEntry) -> None:
    info = entry.info
    if info is None:
        terminal.print_entry(console, entry.name, f"cannot run: {entry.problem}", indent=INDENT)
        return
    values = {
        entry.name: info.backend,
        "  devices": ", ".join(info.devices),
        "  dtypes": ", ".join(info.dtypes),
        "  threads": str(info.threads),
    }
    for name, value in [*values.items(), *(("  note", note) for note in info.notes)]:
        terminal.print_entry(console, name, value, indent=INDENT)
