"""Facts of the machine and the installation, collected without importing any framework."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["PACKAGES", "Memory", "free_space", "memory", "versions"]

PACKAGES = (
    "numpy",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "array-api-compat",
    "jinja2",
    "gguf",
    "typer",
    "rich",
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory in bytes; None where the system does not say.

    Attributes:
        total: what the machine has, or the process's control group allows.
        available: what can be had without swapping.
    """

    total: int | None
    available: int | None


def versions() -> dict[str, str | None]:
    """Return versions by name; None for a package that is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True) + " " + platform.machine(),
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def memory() -> Memory:
    """Return how much main memory there is."""
    try:
        total: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        total = None
    allowed, free = _number(Path("/sys/fs/cgroup/memory.max")), _meminfo("MemAvailable")
    used = _number(Path("/sys/fs/cgroup/memory.current"))
    limits = [value for value in (total, allowed) if value is not None]
    rest = [value for value in (free, allowed - used if allowed and used else None) if value is not None]
    return Memory(min(limits, default=None), min(rest, default=None))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not Linux, or "max"
        return None


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = (line.split() for line in lines if line.startswith(f"{key}:"))
    return next((int(parts[1]) * 1024 for parts in values), None)


def free_space(folder: Path) -> int | None:
    """Return the free bytes where `folder` is, or would be made."""
    place = next((part for part in (folder, *folder.parents) if part.exists()), None)
    try:
        return shutil.disk_usage(place).free if place else None
    except OSError:
        return None
