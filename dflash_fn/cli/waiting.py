"""How threads wait for each other: spinning is quickest on a free machine, and ruinous on a busy one."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["load", "wait_kindly"]

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Where one of these is set, somebody has chosen."""

BUSY = 0.4
"""Share of the processors that others keep busy above which threads had better sleep."""


def load() -> float:
    """Return the share of the processors that were busy over the last minute; 0.0 where the system does not say."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return 0.0


def wait_kindly(environment: MutableMapping[str, str], busy: float) -> None:
    """Let OpenMP's threads sleep while they wait, if the machine is busy already and nobody has chosen otherwise.

    It must be known before the library of a port is imported. What is computed does not depend on it.

    Example:
        >>> settings = {}
        >>> wait_kindly(settings, 0.9)
        >>> settings
        {'OMP_WAIT_POLICY': 'PASSIVE'}
    """
    if busy > BUSY and not any(name in environment for name in SETTINGS):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
