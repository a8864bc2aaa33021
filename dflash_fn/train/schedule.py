"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from dflash_fn.train.options import FitOptions

__all__ = ["rate_at"]


def rate_at(step: int, options: FitOptions) -> float:
    """Return the learning rate of a step, from 0 to `options.steps - 1`.

    It grows in a line over `warmup` steps, stays until `hold` of the steps are done, and falls along half a cosine or
    a line to `last_rate` of itself.

    Example:
        >>> options = FitOptions(steps=10, rate=1.0, warmup=2, last_rate=0.0, decay="linear")
        >>> [round(rate_at(step, options), 2) for step in range(10)]
        [0.5, 1.0, 1.0, 0.88, 0.75, 0.62, 0.5, 0.38, 0.25, 0.12]
    """
    if step < options.warmup:
        return options.rate * (step + 1) / options.warmup
    start = max(options.warmup, options.hold * options.steps)
    done = min(1.0, max(0.0, (step - start) / max(1.0, options.steps - start)))
    left = 1.0 - done if options.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return options.rate * (options.last_rate + (1.0 - options.last_rate) * left)
