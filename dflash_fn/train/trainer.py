"""What a port must do to train: the protocol that `fitting` and `stages` drive. These docstrings are the specification.

A port that can train has a method `trainer()` (`Trains`); the core never asks for more, so another package's port can
train too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dflash_fn.container import Bits
from dflash_fn.train.options import TargetOptions, TrainOptions
from dflash_fn.train.texts import Texts

__all__ = ["Measured", "Task", "Trainer", "Trains"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one step reports.

    Attributes:
        loss: of the step's data, before its update.
        norm: of all gradients together, before clipping.
        tokens: that the loss is a mean over.
        more: other figures for the curve.
    """

    loss: float
    norm: float
    tokens: int
    more: Mapping[str, float]


@runtime_checkable
class Task(Protocol):
    """A model in training."""

    def step(self, index: int, rate: float) -> Measured:
        """Take the step `index`: read its data, move the weights.

        The result and the weights after it depend on nothing but the weights before and `index`. Where loss or norm
        is not finite, the weights stay as they are.
        """
        ...

    def score(self) -> dict[str, float]:
        """Measure on data that is not trained on; changes nothing."""
        ...

    def arrays(self) -> dict[str, Bits]:
        """Fetch weights and optimiser."""
        ...

    def restore(self, index: int, arrays: Mapping[str, Bits]) -> None:
        """Put back what `arrays` fetched when `index` steps were done."""
        ...

    def export(self, folder: Path) -> None:
        """Write config.json and model.safetensors, in bfloat16, into an empty folder."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """A port's side of training."""

    def set_threads(self, threads: int | None) -> int:
        """Use so many threads for products, and return how many are used; None changes nothing."""
        ...

    def target_task(self, options: TargetOptions, run: TrainOptions, corpus: np.ndarray, held_out: np.ndarray) -> Task:
        """Return a target to be trained on a stream of tokens ([T] integers), and scored on another."""
        ...

    def draft_task(self, run: TrainOptions, target: Path, texts: Texts, cache: np.ndarray | None) -> Task:
        """Return a draft to be trained.

        Args:
            run: the options.
            target: the target's checkpoint folder.
            texts: what to learn from.
            cache: [tokens of all texts, (L + 1) * H] that `write_features` wrote; None computes them anew.
        """
        ...

    def feature_width(self, run: TrainOptions, target: Path) -> int:
        """Return (L + 1) * H: how many values `write_features` writes a token."""
        ...

    def write_features(
        self, run: TrainOptions, target: Path, texts: Texts, out: np.ndarray, first: int, advance: Callable[[int], bool]
    ) -> None:
        """Write the tapped hidden states of every token, then its final one, side by side.

        Args:
            run: the options.
            target: the target's checkpoint folder.
            texts: what to run the target over.
            out: [tokens, (L + 1) * H], float32, or uint16 that holds bfloat16.
            first: the text to begin with.
            advance: is told how many texts are done; returns whether to go on.
        """
        ...


@runtime_checkable
class Trains(Protocol):
    """A port that can train."""

    def trainer(self) -> Any:
        """Return the port's `Trainer`."""
        ...
