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

__all__ = ["Checkpoint", "advice", "latest", "load", "save", "saved"]

KIND = "training"
CALM = 1.2
"""How many times its lowest value the smoothed loss of a good checkpoint is at most."""

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
                f"step {checkpoint.step}: {name} holds NaN or infinity, and is not saved; {advice(folder)}"
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


def advice(folder: Path) -> str:
    """Return what a message says of a fit that went wrong: where the last good checkpoint is, and what to do.

    Good is one whose smoothed loss had not begun to grow.
    """
    again = "resuming ends here again, as steps repeat; begin in another folder with a lower fit.rate or fit.clip"
    for path in reversed(saved(folder)):
        try:
            found = load(path)
        except errors.StateFileError:
            continue
        if found.smoothed is None or found.lowest is None or found.smoothed <= CALM * found.lowest:
            loss = "" if found.smoothed is None else f" (smoothed loss {found.smoothed:.3g})"
            return f"the last good checkpoint is {path}{loss}; {again}"
    return f"the last good checkpoint is none, as none was kept from before; {again}"
