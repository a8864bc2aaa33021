"""When to stop before the end: a time budget, or Ctrl-C."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dflash_fn import errors

__all__ = ["Budget", "asked_by_ctrl_c", "parse_duration"]

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Return seconds.

    Args:
        text: such as `45s`, `90m`, `1.5h` or `1h30m`.

    Raises:
        InputError: anything else.

    Example:
        >>> parse_duration("1h30m")
        5400.0
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise errors.InputError(f"time budget: got {text!r}, expected a duration such as 45s, 90m or 1h30m")
    return sum(float(number) * UNITS[unit] for number, unit in parts)


@dataclass(slots=True)
class Budget:
    """Time that a process may take, over all stages; it changes when a run pauses, never what it computes.

    Attributes:
        seconds: in all; None for no limit.
        clock: where time is read.
        began: when the budget was made.
        interrupted: whether someone asked to stop.
    """

    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def spent(self) -> bool:
        """Whether it is time to save and stop."""
        return self.interrupted or (self.seconds is not None and self.clock() - self.began >= self.seconds)


@contextmanager
def asked_by_ctrl_c(budget: Budget, told: Callable[[], None] | None = None) -> Iterator[None]:
    """Let the first Ctrl-C only mark the budget, so that a step is never cut in two; the second one interrupts.

    `told` is called, inside the signal handler, at the first one.

    Outside the main thread, where signals cannot be handled, and where Ctrl-C is ignored, nothing changes.
    """
    deaf = signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None)
    if deaf or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: object) -> None:
        del frame
        if budget.interrupted:
            signal.default_int_handler(number, None)
        budget.interrupted = True
        if told:
            told()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
