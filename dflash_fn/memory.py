"""How much memory this process has used at most, for ports whose arrays lie in main memory."""

from __future__ import annotations

import math
import sys

__all__ = ["peak_host_memory"]


def peak_host_memory() -> float:
    """Return the most main memory that the process has held so far, in GB (1e9 bytes); NaN where no one counts it."""
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9
