"""How long a stream says nothing: servers keep a connection alive with comments, and those are no answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["within"]

DATA = b"data:"


def within(response: Any, limit: float) -> None:
    """Let a response's bytes raise TimeoutError once a comment comes `limit` seconds or more after the last data.

    What sends nothing at all is left to the client, whose own limit is for the time between two bytes.

    Args:
        response: of the client's, before its bytes are read.
        limit: seconds.
    """
    read = response.iter_bytes
    response.iter_bytes = lambda *args, **options: checked(read(*args, **options), limit)


def checked(chunks: Iterable[bytes], limit: float) -> Iterator[bytes]:
    """Pass chunks of server-sent events on, as long as lines of data come often enough.

    Raises:
        TimeoutError: they do not.
    """
    seen, rest = time.monotonic(), b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).splitlines(keepends=True) or [b""]
        if rest.endswith((b"\n", b"\r")):
            lines, rest = [*lines, rest], b""
        if any(line.startswith(DATA) for line in (*lines, rest)):
            seen = time.monotonic()
        elif time.monotonic() - seen >= limit:
            raise TimeoutError(f"no data for {limit:g} s")
        yield chunk
