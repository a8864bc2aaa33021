"""Where the time of a step goes: a port and a proposer whose calls are timed, and the memory that they take at most.

What is not asked for costs nothing: without a clock the port is the port itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from dflash_fn.port import Port

__all__ = ["CALLS", "PARTS", "Clock", "TimedPort", "finisher", "reset_peaks"]

CALLS = {"draft_context": "draft", "draft_pass": "draft", "target_pass": "verify", "select": "select"}
"""Which part of a step a call to the port belongs to."""

PARTS = ("draft", "verify", "select", "overhead")
"""What a step's time is divided into; overhead is all that is in none of the calls."""


@dataclass(slots=True)
class Clock:
    """Seconds by part. Of calls inside each other the outermost counts.

    Attributes:
        finish: waits until a call's result has been computed, where arrays are computed later than asked for.
        seconds: so far.
        inside: whether a call is being timed.
    """

    finish: Callable[[Any], object] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    inside: bool = False

    def clear(self) -> None:
        """Forget what was timed so far."""
        self.seconds.clear()

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and adds what it took to a part."""

        def run(*args: Any, **options: Any) -> Any:
            if self.inside:
                return call(*args, **options)
            self.inside = True
            begun = time.perf_counter()
            try:
                made = call(*args, **options)
                if self.finish is not None:
                    self.finish(made)
                return made
            finally:
                self.inside = False
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begun

        return run

    def parts(self, seconds: float) -> dict[str, float]:
        """Return the seconds of each of `PARTS`, where all steps together took `seconds`."""
        known = {part: self.seconds.get(part, 0.0) for part in PARTS[:-1]}
        return known | {"overhead": seconds - sum(known.values())}


class TimedPort:
    """A port that is asked by a clock; in all else the port itself."""

    def __init__(self, port: Port, clock: Clock) -> None:
        self._port = port
        for name, part in CALLS.items():
            setattr(self, name, clock.timed(part, getattr(port, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


def finisher(port: str, device: str) -> Callable[[Any], object] | None:
    """Return what waits for a result of a port, or None where a call returns when all is computed."""
    if port == "torch":
        if not device.startswith("cuda"):
            return None
        import torch

        return lambda _: torch.cuda.synchronize()
    if port == "mlx":
        import mlx.core as mx

        return lambda made: mx.eval([array for array in _leaves(made) if isinstance(array, mx.array)])
    if port == "jax":
        import jax

        return lambda made: [array.block_until_ready() for array in _leaves(made) if isinstance(array, jax.Array)]
    return lambda _: None  # of a port that nobody here knows: its parts are timed on request, as they come


def _leaves(value: Any) -> Iterator[Any]:
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, one.name) for one in fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def reset_peaks() -> None:
    """Let `Port.peak_memory` count from here on, where that can be had: accelerators, mlx, and Linux's main memory.

    Elsewhere it goes on counting from the start of the process.
    """
    torch, mlx = sys.modules.get("torch"), sys.modules.get("mlx.core")
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    if mlx is not None:
        mlx.reset_peak_memory()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
