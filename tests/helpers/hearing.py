"""Starting a process that hears Ctrl-C, also where the tests themselves were started deaf to it.

A shell that is not interactive starts its background jobs with SIGINT ignored, and their children inherit that.
"""

from __future__ import annotations

import sys

__all__ = ["HEARING"]

HEARING = [
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
]
"""To put before a command."""
