"""The loop of a fit: steps, curve, checkpoints, and every way to stop. It knows nothing of what is trained."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_fn import errors
from dflash_fn.train import checkpoints, curve
from dflash_fn.train.budget import Budget
from dflash_fn.train.checkpoints import Checkpoint
from dflash_fn.train.options import FitOptions
from dflash_fn.train.schedule import rate_at
from dflash_fn.train.trainer import Measured, Task

__all__ = ["CURVE", "Fitted", "Report", "fit"]

SMOOTHING = 0.95
CURVE = "curve.jsonl"
"""The file beside the checkpoints that holds what was logged, one JSON object a line."""

Report = Callable[[int, dict[str, Any]], None]
"""Is told, after each step, how many steps are done and what the last one measured."""


class Ended(enum.Enum):
    """Why a fit stopped; the value is the message for people."""

    DONE = "all steps are done"
    BUDGET = "the time budget is spent; resume to go on"
    INTERRUPTED = "interrupted; resume to go on"


@dataclass(frozen=True, slots=True)
class Fitted:
    """How a fit ended.

    Attributes:
        steps: done in all.
        ended: why it stopped.
        curve: all of it.
        seconds: of this call.
    """

    steps: int
    ended: Ended
    curve: tuple[dict[str, Any], ...]
    seconds: float

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.ended is Ended.DONE


def fit(
    task: Task,
    options: FitOptions,
    folder: Path,
    *,
    made_with: str,
    budget: Budget | None = None,
    report: Report | None = None,
) -> Fitted:
    """Train until all steps are done, from the last whole checkpoint in `folder` where there is one.

    Args:
        task: what is trained.
        options: how.
        folder: for checkpoints and curve.
        made_with: digest of what the weights depend on; a checkpoint with another is refused.
        budget: when to pause; what is done then is saved.
        report: is told of every step.

    Raises:
        InputError: the folder's checkpoint belongs to other options or data.
        NonFiniteError: loss or gradients are NaN or infinite.
        TrainingDiverged: the loss grew and grew. Both name the last good checkpoint, which stays as it is.

    Guarantees:
        P20: killed at any moment and resumed, it ends with the bits of an undisturbed run.
    """
    began, now = time.monotonic(), _begin(task, folder, made_with)
    first = now.step
    while now.step < options.steps and not (budget and budget.spent):
        try:
            now = _advanced(task, options, folder, now)
        except errors.DflashError:
            curve.write(folder / CURVE, now.curve)  # how it came to this is wanted most now
            raise
        if report:
            report(now.step, now.curve[-1] if now.curve else {})
        if now.step % options.checkpoint_every == 0:
            _keep(task, options, folder, now)
    if now.step > first and now.step % options.checkpoint_every:
        _keep(task, options, folder, now)
    return Fitted(now.step, _reason(now.step, options, budget), now.curve, time.monotonic() - began)


def _reason(step: int, options: FitOptions, budget: Budget | None) -> Ended:
    if step >= options.steps:
        return Ended.DONE
    return Ended.INTERRUPTED if budget and budget.interrupted else Ended.BUDGET


def _begin(task: Task, folder: Path, made_with: str) -> Checkpoint:
    found = checkpoints.latest(folder)
    if found is None:
        return Checkpoint(0, {}, (), None, None, made_with)
    if found.made_with != made_with:
        raise errors.InputError(
            f"{folder}: its checkpoint was made with other options, data or threads ({found.made_with}, now "
            f"{made_with}); give the same ones, or another folder"
        )
    task.restore(found.step, found.arrays)
    return replace(found, arrays={})


def _advanced(task: Task, options: FitOptions, folder: Path, now: Checkpoint) -> Checkpoint:
    """Take one step, look at what it measured, and log it."""
    rate = rate_at(now.step, options)
    measured = task.step(now.step, rate)
    _check_finite(now.step, measured, folder)
    smoothed = measured.loss if now.smoothed is None else SMOOTHING * now.smoothed + (1 - SMOOTHING) * measured.loss
    lowest = smoothed if now.lowest is None else min(now.lowest, smoothed)
    _check_explosion(now.step, smoothed, lowest, options, folder)
    step = now.step + 1
    after = replace(now, step=step, smoothed=smoothed, lowest=lowest)
    scored = bool(options.score_every) and step % options.score_every == 0
    if step % options.log_every and not scored and step != options.steps:
        return after
    point = {"step": step, "loss": smoothed, "norm": measured.norm, "rate": rate, **measured.more}
    return replace(after, curve=(*now.curve, point | (task.score() if scored else {})))


def _check_finite(step: int, measured: Measured, folder: Path) -> None:
    if math.isfinite(measured.loss) and math.isfinite(measured.norm):
        return
    raise errors.NonFiniteError(
        f"step {step}: the loss is {measured.loss:g} and the gradients' norm {measured.norm:g}; "
        f"{checkpoints.advice(folder)}"
    )


def _check_explosion(step: int, smoothed: float, lowest: float, options: FitOptions, folder: Path) -> None:
    if smoothed <= options.explosion * lowest:
        return
    raise errors.TrainingDiverged(
        f"step {step}: the smoothed loss is {smoothed:.3g}, {smoothed / lowest:.1f} times its lowest value (the limit "
        f"is {options.explosion:g}); {checkpoints.advice(folder)}"
    )


def _keep(task: Task, options: FitOptions, folder: Path, now: Checkpoint) -> None:
    checkpoints.save(folder, replace(now, arrays=task.arrays()), keep=options.keep)
    curve.write(folder / CURVE, now.curve)
