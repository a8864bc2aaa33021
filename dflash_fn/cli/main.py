"""The entry point of `dflash-fn`: what must be right before anything else is imported, and after all is done."""

from __future__ import annotations

import os
import sys

from dflash_fn.cli import signals, streams, waiting

__all__ = ["run"]


def run() -> None:
    """Run the command line and exit with its code."""
    signals.end_at_once()
    from dflash_fn.cli import exits  # the rest is imported only now, when Ctrl-C is provided for

    waiting.wait_kindly(os.environ, waiting.load())
    try:
        streams.guard()
        from dflash_fn.cli.commands import app

        app()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except exits.TOLD as error:
        code = exits.tell(error)
    signals.ignore()
    sys.exit(code)
