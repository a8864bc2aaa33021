"""Checkpoints of a fit: weights, optimiser, step and curve in one file, which is whole or not there.

A run that is killed at any moment finds the last whole file and goes on from its step. Everything that a step draws is
a function of (seed, step), so the step is all the position in the data that there is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn import container, errors
from dflash_fn.container import Bits

__all__ = ["Checkpoint", "latest", "load", "save", "saved"]

KIND = "training"
NAME = re.compile(r"step-(\d{8})\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A point of a run to go on from.

    Attributes:
        step: optimiser steps done.
        arrays: weights and optimiser, by name.
        curve: what was logged so far, oldest first.
        smoothed: the smoothed loss; None before the first step.
        lowest: its lowest value so far; None before the first step.
        made_with: digest of what the run depends on: options, data, threads.
    """

    step: int
    arrays: Mapping[str, Bits]
    curve: tuple[dict[str, Any], ...]
    smoothed: float | None
    lowest: float | None
    made_with: str


def saved(folder: Path) -> list[Path]:
    """Return the checkpoint files of a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*.safetensors") if NAME.fullmatch(path.name))


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint, then forget all but the last `keep`.

    Raises:
        NonFiniteError: a weight is NaN or infinite; nothing is written, and older checkpoints stay.
        CacheFolderError: the folder cannot be written.
    """
    for name, bits in checkpoint.arrays.items():
        if bits.values.dtype.kind == "f" and not np.isfinite(bits.values).all():
            raise errors.NonFiniteError(
                f"step {checkpoint.step}: {name} holds NaN or infinity, and is not saved; "
                f"the last good checkpoint is {_last(folder)}; lower fit.rate and resume from it"
            )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{checkpoint.step:08}.safetensors"
    header = {
        "step": checkpoint.step,
        "curve": list(checkpoint.curve),
        "smoothed": checkpoint.smoothed,
        "lowest": checkpoint.lowest,
        "made_with": checkpoint.made_with,
    }
    container.write(path, KIND, header, checkpoint.arrays)
    for old in saved(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        StateFileError: not a whole checkpoint.
    """
    header, arrays = container.read(path, KIND)
    return Checkpoint(
        header["step"], arrays, tuple(header["curve"]), header["smoothed"], header["lowest"], header["made_with"]
    )


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, or None; a damaged one is passed over."""
    for path in reversed(saved(folder)):
        try:
            return load(path)
        except errors.StateFileError:
            continue
    return None


def _last(folder: Path) -> str:
    files = saved(folder)
    return str(files[-1]) if files else "none"
