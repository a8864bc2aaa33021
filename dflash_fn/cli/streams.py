"""The standard streams as the shell hands them over: closed, full, or read by someone who has gone."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TextIO

from dflash_fn.errors import InputError

__all__ = ["OutputLost", "abandon_stdout", "guard"]


class OutputLost(Exception):
    """Stdout does not take what is written to it.

    Not an OSError, because click and rich have ideas of their own about some of those.

    Attributes:
        reader_gone: whether it is a pipe that nobody reads any more.
        reason: what the system says.
    """

    def __init__(self, reason: str, *, reader_gone: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.reader_gone = reason, reader_gone


class _Stdout(io.FileIO):
    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # pyright: ignore[reportArgumentType, reportReturnType]
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputLost(reason, reader_gone=error.errno == errno.EPIPE) from None


class _Stderr(io.FileIO):
    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # pyright: ignore[reportArgumentType, reportReturnType]
        except OSError:  # what is said about the work must not end the work
            return memoryview(data).nbytes  # pyright: ignore[reportArgumentType]


def guard() -> None:
    """Make the streams fit to work with.

    A closed one is opened on the null device, or the next file that is opened would take its place. What cannot be
    written to stdout is an `OutputLost`; what cannot be written to stderr is dropped.

    Raises:
        InputError: stdout is closed.
    """
    closed = sys.stdout is None
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # told as an error where the text is used
    _fill_gaps()
    sys.stderr = _guarded(sys.stderr, _Stderr(2, "w", closefd=False))
    if closed:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 (it stays open)
        raise InputError("stdout is closed, and all results go there; send it to a file or to /dev/null")
    sys.stdout = _guarded(sys.stdout, _Stdout(1, "w", closefd=False))


def _fill_gaps() -> None:
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # the system hands out the lowest free number
        pass
    os.close(number)


def _guarded(stream: TextIO | None, raw: io.FileIO) -> TextIO:
    """Return a stream that writes by `raw`; a terminal's is left as it is, for Windows has a special one."""
    if isinstance(stream, io.TextIOWrapper) and stream.isatty():
        # Text is whatever the model writes; a terminal that lacks a letter must not end the run.
        stream.reconfigure(errors="replace")
        return stream
    encoding = stream.encoding if stream is not None else "utf-8"
    by_lines = isinstance(raw, _Stderr)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors="replace", line_buffering=by_lines)


def abandon_stdout() -> None:
    """Let what is left in buffers go nowhere: the interpreter flushes once more at its end, and would complain."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # no file at all, as in tests
        return
