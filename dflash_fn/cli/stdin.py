"""Text from stdin and from arguments, and what is wrong with it where it is none."""

from __future__ import annotations

import io
import sys
from typing import BinaryIO

from dflash_fn.errors import InputError

__all__ = ["checked", "read_line", "read_text", "source", "watched"]


def watched() -> bool:
    """Whether a person types it."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_text() -> str:
    """Return all of it; for bytes that are no text see `checked`.

    Raises:
        InputError: it is closed or cannot be read.
    """
    return io.StringIO(_read(whole=True), newline=None).read()


def read_line() -> str:
    r"""Return the next line, less its end (\n or \r\n); for bytes that are no text see `checked`.

    Raises:
        EOFError: there is none.
        InputError: stdin is closed or cannot be read.
    """
    line = _read(whole=False)
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


def checked(text: str, name: str) -> str:
    """Return text in which nothing stands for a byte that is none, as Python hands over such bytes in arguments.

    Raises:
        InputError: there is such a byte; the message names the first.
    """
    data = text.encode(errors="surrogateescape")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InputError(f"{name} is no UTF-8 text ({where}); expected UTF-8") from None


def source() -> BinaryIO:
    """Return its bytes, or raise InputError where it is closed."""
    if sys.stdin is None:
        raise InputError("stdin is closed, and there is text to be read from it; connect it to a file or a pipe")
    return sys.stdin.buffer  # its text layer would stop at one bad byte for good


def _read(*, whole: bool) -> str:
    try:
        data = source().read() if whole else source().readline()
    except OSError as error:
        raise InputError(f"stdin cannot be read ({error.strerror or error})") from None
    return data.decode(errors="surrogateescape")
