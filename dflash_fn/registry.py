"""Ports by name, found through the entry-point group `dflash_fn.ports`, so that a port can live in any package."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from dflash_fn import errors
from dflash_fn.port import Port

__all__ = ["get_port", "port_names"]

GROUP = "dflash_fn.ports"
OWN_PACKAGE = "dflash-fn"


def port_names() -> tuple[str, ...]:
    """Names of all registered ports, sorted; importing none of them."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def get_port(name: str) -> Port:
    """Import a port and return it.

    Args:
        name: as registered, such as `torch`.

    Raises:
        UnknownPort: no installed package registers that name.
        BackendMissing: the port is there but its array library is not.
    """
    entry = _entry(name)
    try:
        load: Callable[[], Port] = entry.load()
    except ImportError as error:
        missing = error.name or str(error)
        raise errors.BackendMissing(
            f"port {name!r} needs {missing!r}, which is not installed; {_advice(entry)}"
        ) from error
    return load()


def _advice(entry: EntryPoint) -> str:
    package = entry.dist.name if entry.dist else OWN_PACKAGE
    if package == OWN_PACKAGE:
        return f"run: {errors.install_line(entry.name)}"
    return f"the port comes with the package {package!r}, which says what it needs"


def _entry(name: str) -> EntryPoint:
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return entry
    known = ", ".join(port_names()) or "none"
    raise errors.UnknownPort(f"unknown port {name!r}; installed ports: {known}")
