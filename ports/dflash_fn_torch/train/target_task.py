"""A target in training, from scratch: `dflash_fn.train.trainer.Task`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from torch import Tensor

from dflash_fn import errors
from dflash_fn.container import Bits
from dflash_fn.train import order
from dflash_fn.train.options import TargetOptions, TrainOptions
from dflash_fn.train.trainer import Measured
from dflash_fn_torch.train.checkpoint import fetch, put_back, write_model
from dflash_fn_torch.train.optimiser import Optimiser, new
from dflash_fn_torch.train.step import autocast, gradients, moved
from dflash_fn_torch.train.target_model import deepened, fit_bigrams, make

__all__ = ["TargetTask"]

SCORED = 32
"""Held-out windows that scores are taken on."""


class TargetTask:
    """See `Task`. A model of transformers, which is shallow until `grow_at` of the steps are done.

    Attributes:
        model: the model.
        weights: its parameters, by name.
        optimiser: of them.
    """

    model: Any
    weights: dict[str, Tensor]
    optimiser: Optimiser

    def __init__(
        self, options: TargetOptions, run: TrainOptions, stream: np.ndarray, held_out: np.ndarray, device: str
    ) -> None:
        corpus = run.corpus
        if corpus is None or len(stream) <= options.sequence:
            raise errors.InputError(
                f"corpus: got {len(stream)} tokens, expected more than a sequence, which has {options.sequence}"
            )
        self.options, self.run, self.device = options, run, torch.device(device)
        self.stream, self.held_out, self.vocab = stream, held_out, corpus.vocab_size
        self._take(make(options, self.vocab, options.grow_from or options.layers, run.seed))

    @property
    def grows(self) -> int | None:
        """The step before which layers are added; None where it begins with all of them."""
        small = self.options.grow_from
        if small is None or small == self.options.layers:
            return None
        return max(1, int(self.options.grow_at * self.options.fit.steps))

    def _take(self, model: Any) -> None:
        self.model = model.to(self.device)
        self.weights = dict(self.model.named_parameters())
        self.optimiser = new(self.options.fit, self.weights)

    def _grow(self) -> None:
        old, (model, origin) = self.optimiser, deepened(self.model, self.options)
        self._take(model)
        for name, source in origin.items():
            self.optimiser.first[name].copy_(old.first[source])
            if name in self.optimiser.second:
                self.optimiser.second[name].copy_(old.second[source])

    def step(self, index: int, rate: float) -> Measured:
        """Draw windows of the corpus, and move the weights."""
        if index == 0 and self.options.bigrams:
            fit_bigrams(self.model, np.asarray(self.stream), self.options.bigrams)
        if index == self.grows:
            self._grow()
        count = (len(self.stream) - 1) // self.options.sequence
        chosen = order.batch(self.run.seed, "windows", index, self.options.batch, count)
        ids = self._windows(self.stream, chosen)
        with autocast(self.device, self.run.autocast):
            loss = self._loss(ids)
        grads, norm = gradients(loss, self.weights)
        value = float(loss.detach())
        moved(self.optimiser, self.weights, grads, norm, value, index, rate)
        return Measured(value, norm, ids[:, 1:].numel(), {})

    def _windows(self, stream: np.ndarray, chosen: np.ndarray) -> Tensor:
        size = self.options.sequence
        rows = np.stack([stream[i * size : (i + 1) * size + 1] for i in chosen.tolist()])
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)

    def _loss(self, ids: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = F.linear(hidden, self.model.get_output_embeddings().weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    @torch.no_grad()
    def score(self) -> dict[str, float]:
        """Measure the loss on windows of held-out files."""
        count = (len(self.held_out) - 1) // self.options.sequence
        if not count:
            return {}
        chosen = np.arange(0, count, max(1, count // SCORED))[:SCORED]
        losses = [self._loss(self._windows(self.held_out, part)) for part in np.array_split(chosen, 4) if len(part)]
        return {"held_out": float(torch.stack(losses).mean())}

    def arrays(self) -> dict[str, Bits]:
        """Fetch weights and moments."""
        return fetch(self.weights, self.optimiser)

    def restore(self, index: int, arrays: Mapping[str, Bits]) -> None:
        """Put weights and moments back, into a model that has grown if `index` says so."""
        if self.grows is not None and index > self.grows:
            self._take(deepened(self.model, self.options)[0])
        put_back(self.weights, self.optimiser, arrays)

    def export(self, folder: Path) -> None:
        """Write the model as transformers does, in bfloat16."""
        config = {**self.model.config.to_dict(), "architectures": [type(self.model).__name__], "dtype": "bfloat16"}
        write_model(folder, config, self.weights)
