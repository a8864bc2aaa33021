"""The torch port's side of training: `dflash_fn.train.trainer.Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash_fn import errors
from dflash_fn.train.options import TargetOptions, TrainOptions
from dflash_fn.train.texts import Texts
from dflash_fn.train.trainer import Task
from dflash_fn_torch.train import features
from dflash_fn_torch.train.draft_task import open_draft
from dflash_fn_torch.train.target_task import TargetTask

__all__ = ["TorchTrainer"]


@dataclass(frozen=True, slots=True)
class TorchTrainer:
    """Training on a CPU or on CUDA.

    Attributes:
        devices: of the port, the default first.
    """

    devices: tuple[str, ...]

    def set_threads(self, threads: int | None) -> int:
        """Set torch's threads for operations."""
        if threads is not None:
            torch.set_num_threads(threads)
        return torch.get_num_threads()

    def target_task(self, options: TargetOptions, run: TrainOptions, corpus: np.ndarray, held_out: np.ndarray) -> Task:
        """Make a model of transformers and train it."""
        return TargetTask(options, run, corpus, held_out, self._device(run))

    def draft_task(self, run: TrainOptions, target: Path, texts: Texts, cache: np.ndarray | None) -> Task:
        """Make a draft and train it; without a cache, transformers runs the target."""
        return open_draft(run, target, texts, cache, self._device(run))

    def feature_width(self, run: TrainOptions, target: Path) -> int:
        """Read it off the target's config."""
        return (len(run.draft.taps) + 1) * features.text_config(target)["hidden_size"]

    def write_features(
        self, run: TrainOptions, target: Path, texts: Texts, out: np.ndarray, first: int, advance: Callable[[int], bool]
    ) -> None:
        """Let transformers run the target."""
        features.write(features.load_model(target, self._device(run)), texts, run.draft.taps, out, first, advance)

    def _device(self, run: TrainOptions) -> str:
        name = "cuda:0" if run.device == "cuda" else run.device or self.devices[0]
        if name not in self.devices:
            raise errors.InputError(f"port torch has no device {run.device!r} here; it has: {', '.join(self.devices)}")
        return name
