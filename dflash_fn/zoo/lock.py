"""A lock file between processes, let go by the system when its holder dies."""

from __future__ import annotations

import enum
import errno
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["held"]

PAUSE = 0.2
"""Seconds between two tries."""

BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}


class Try(enum.Enum):
    """How a try to take the lock ended."""

    HELD = "it is ours"
    BUSY = "another process has it"
    UNKNOWN = "the file system knows no locks"


@contextmanager
def held(path: Path, *, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file `path`, waiting for as long as another process does.

    Yields whether the lock is held: on a file system that knows no locks the body runs without one.

    Args:
        path: the file; it is made and left there, since deleting a lock file is a race.
        waiting: called once if the lock is not free.
    """
    with path.open("a+b") as file:
        told = False
        while (got := _try_lock(file)) is Try.BUSY:
            if not told:
                waiting()
                told = True
            time.sleep(PAUSE)
        yield got is Try.HELD


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _try_lock(file: IO[bytes]) -> Try:
    try:
        _lock(file)
    except OSError as error:
        return Try.BUSY if error.errno in BUSY else Try.UNKNOWN
    return Try.HELD
