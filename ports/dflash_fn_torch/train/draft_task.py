"""A draft in training: `dflash_fn.train.trainer.Task`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from torch import Tensor

from dflash_fn.config import DraftSpec, parse_draft
from dflash_fn.container import Bits
from dflash_fn.train import order
from dflash_fn.train.options import DraftOptions, TrainOptions
from dflash_fn.train.texts import Texts
from dflash_fn.train.trainer import Measured
from dflash_fn_torch.train import features as states_of
from dflash_fn_torch.train.checkpoint import fetch, put_back, write_model
from dflash_fn_torch.train.draft_model import draft_config, random_weights, with_copied_layers
from dflash_fn_torch.train.features import Ends
from dflash_fn_torch.train.forward import draft_hidden
from dflash_fn_torch.train.loss import block_loss, leading_matches, slot_weights
from dflash_fn_torch.train.optimiser import Optimiser, new
from dflash_fn_torch.train.ridge import Sample, ridge_start
from dflash_fn_torch.train.step import autocast, gradients, moved

__all__ = ["DraftTask", "open_draft"]

SCORED = 64
"""Texts that scores are taken on, seen and unseen."""

SAMPLED = 128
"""Texts that a start is fitted to."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of some texts, ready for a pass.

    Attributes:
        features: [S, T, L * H].
        embedded: [S, N, B, H].
        anchors: [S, N].
        labels: [S, N, B - 1] token ids.
        counts: [S, N, B - 1] whether the text has a token there.
        final: [S, N, B - 1, H] the target's final states that predict the labels.
    """

    features: Tensor
    embedded: Tensor
    anchors: Tensor
    labels: Tensor
    counts: Tensor
    final: Tensor


@dataclass(frozen=True, slots=True)
class DraftTask:
    """See `Task`; weights and moments are changed in place.

    Attributes:
        run: the options.
        config: the draft's config.json.
        spec: the same, parsed.
        weights: in upstream's names.
        optimiser: of them.
        ends: the target's embedding and head.
        texts: what to learn from; the last ones are scored on only.
        cache: of features; None where the target computes them.
        target: a transformers model, or None where there is a cache.
        common: ids that occur in the texts, for a softmax over these and some others.
    """

    run: TrainOptions
    config: dict[str, Any]
    spec: DraftSpec
    weights: dict[str, Tensor]
    optimiser: Optimiser
    ends: Ends
    texts: Texts
    cache: np.ndarray | None
    target: Any
    common: np.ndarray

    @property
    def options(self) -> DraftOptions:
        """Of the draft."""
        return self.run.draft

    @property
    def trained(self) -> int:
        """How many of the texts are trained on."""
        return len(self.texts) - max(1, int(len(self.texts) * self.options.held_out))

    def step(self, index: int, rate: float) -> Measured:
        """Draw texts and anchors, and move the weights."""
        chosen = order.batch(self.run.seed, "texts", index, self.options.sequences, self.trained)
        starts, lengths = self.texts.starts[chosen], self.texts.lengths[chosen]
        anchors, real = order.anchors(self.run.seed, index, starts, lengths, self.options.anchors)
        blocks = self.blocks(chosen, anchors, real)
        with autocast(self.ends.head.device, self.run.autocast):
            loss, right, count = self.loss(blocks, index)
        grads, norm = gradients(loss, self.weights)
        value = float(loss.detach())
        moved(self.optimiser, self.weights, grads, norm, value, index, rate)
        return Measured(value, norm, count, {"accuracy": right})

    def loss(self, blocks: Blocks, index: int) -> tuple[Tensor, float, int]:
        """Return the loss, the share of right guesses, and how many slots count."""
        hidden = draft_hidden(self.spec, self.weights, blocks.features, blocks.embedded, blocks.anchors)
        weights = slot_weights(hidden.shape[2], self.options.gamma).to(hidden.device).expand(blocks.counts.shape)
        kept = blocks.counts.flatten()
        head, labels = self.candidates(blocks.labels.flatten()[kept], index)
        teacher = None
        if self.options.kl:
            with torch.no_grad():
                teacher = F.linear(blocks.final.flatten(0, 2)[kept], head)
        logits = F.linear(hidden.flatten(0, 2)[kept], head)
        loss, right = block_loss(logits, labels, weights.flatten()[kept], teacher=teacher, kl=self.options.kl)
        return loss, right, int(kept.sum())

    def candidates(self, labels: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return the head's rows that the softmax runs over, and which of them the labels are."""
        if self.options.negatives is None:
            return self.ends.head, labels
        size = len(self.ends.head)
        drawn = order.numbers(self.run.seed, "negatives", index, self.options.negatives) * size
        ids = np.union1d(self.common, drawn.astype(np.int64))
        known = torch.from_numpy(ids).to(labels.device)
        return self.ends.head[known], torch.searchsorted(known, labels)

    def blocks(self, chosen: np.ndarray, anchors: np.ndarray, real: np.ndarray) -> Blocks:
        """Gather what a pass over these blocks needs."""
        ids, lengths = states_of.padded(self.texts, chosen)
        device, size = self.ends.head.device, self.spec.block_size
        states = self.states(chosen, ids).to(device)
        wide = self.spec.hidden_size * len(self.spec.target_layer_ids)
        places = anchors[:, :, None] + np.arange(1, size)
        counts = (places < lengths[:, None, None]) & real[:, :, None]
        places = np.minimum(places, ids.shape[1] - 1)
        rows = np.arange(len(chosen))[:, None, None]
        tokens = np.full((*anchors.shape, size), self.spec.mask_token_id)
        tokens[:, :, 0] = np.take_along_axis(ids, anchors, axis=1)
        before = torch.from_numpy(np.maximum(places - 1, 0)).to(device)
        return Blocks(
            states[..., :wide],
            F.embedding(torch.from_numpy(tokens).to(device), self.ends.embedding),
            torch.from_numpy(anchors).to(device),
            torch.from_numpy(ids[rows, places]).to(device),
            torch.from_numpy(counts).to(device),
            states[..., wide:][torch.from_numpy(rows).to(device), before],
        )

    def states(self, chosen: np.ndarray, ids: np.ndarray) -> Tensor:
        """Return the target's states of texts, from the cache or computed."""
        if self.cache is not None:
            return states_of.unpacked(self.cache, self.texts, chosen, ids.shape[1])
        known = torch.from_numpy(ids).to(self.ends.head.device)
        return states_of.hidden_states(self.target, known, self.spec.target_layer_ids)

    def score(self) -> dict[str, float]:
        """Measure tau where decoding would draft: unseen texts, and as many seen ones."""
        unseen = np.arange(self.trained, len(self.texts))[:SCORED]
        return {"tau": self.tau(unseen), "tau_seen": self.tau(np.arange(min(len(unseen), self.trained)))}

    @torch.no_grad()
    def tau(self, chosen: np.ndarray) -> float:
        """Return tau over texts: from each accepted token the next block is drafted, as in decoding."""
        steps = tokens = 0
        for index in chosen:
            start, length = int(self.texts.starts[index]), int(self.texts.lengths[index])
            matches = self.matches(np.array([index]), start, length)
            for emitted in _walk(matches, length - start):
                steps, tokens = steps + 1, tokens + emitted
        return tokens / steps if steps else 0.0

    def matches(self, chosen: np.ndarray, start: int, length: int) -> np.ndarray:
        """Return how many drafted tokens would be accepted at each anchor of one text."""
        anchors = np.arange(start, length - 1)[None]
        blocks = self.blocks(chosen, anchors, np.ones_like(anchors, dtype=bool))
        hidden = draft_hidden(self.spec, self.weights, blocks.features, blocks.embedded, blocks.anchors)
        guess = F.linear(hidden[0], self.ends.head).argmax(dim=-1)
        return leading_matches(guess, torch.where(blocks.counts[0], blocks.labels[0], -1)).cpu().numpy()

    def arrays(self) -> dict[str, Bits]:
        """Fetch weights and moments."""
        return fetch(self.weights, self.optimiser)

    def restore(self, index: int, arrays: Mapping[str, Bits]) -> None:
        """Put weights and moments back."""
        del index
        put_back(self.weights, self.optimiser, arrays)

    def export(self, folder: Path) -> None:
        """Write the draft in upstream's format."""
        write_model(folder, self.config, self.weights)


def _walk(matches: np.ndarray, length: int) -> Iterator[int]:
    """Yield what each step would emit of an answer whose first token is there already."""
    place = 0
    while place < length - 1:
        emitted = min(int(matches[place]) + 1, length - 1 - place)
        yield emitted
        place += emitted


def open_draft(run: TrainOptions, target: Path, texts: Texts, cache: np.ndarray | None, device: str) -> DraftTask:
    """Make a draft and its start.

    Raises:
        InputError: options that do not fit the target.
    """
    config = draft_config(run.draft, states_of.text_config(target))
    spec = parse_draft(config)
    model = states_of.load_model(target, device) if cache is None else None
    weights = random_weights(spec, run.seed)
    common = np.unique(texts.tokens).astype(np.int64)
    ends = states_of.read_ends(target, device)
    task = DraftTask(run, config, spec, weights, new(run.draft.fit, weights), ends, texts, cache, model, common)
    started = _started(task, target)
    leaves = {name: weight.detach().to(device).requires_grad_() for name, weight in started.items()}
    return DraftTask(run, config, spec, leaves, new(run.draft.fit, leaves), ends, texts, cache, model, common)


def _started(task: DraftTask, target: Path) -> dict[str, Tensor]:
    options = task.options
    if options.start == "random":
        return task.weights
    chosen = np.arange(min(SAMPLED, task.trained))
    starts, lengths = task.texts.starts[chosen], task.texts.lengths[chosen]
    anchors, real = order.anchors(order.subseed(task.run.seed, "start"), 0, starts, lengths, options.anchors)
    blocks = task.blocks(chosen, anchors, real)
    parts = [part.cpu() for part in (blocks.features, blocks.embedded, blocks.anchors, blocks.final, blocks.counts)]
    if options.start == "ridge":
        return ridge_start(task.spec, task.weights, Sample(*parts))
    taps = parts[0].unflatten(-1, (len(options.taps), -1))
    scales = taps.square().mean(dim=(0, 1, 3)).sqrt().numpy()
    return with_copied_layers(task.weights, task.spec, options, target, scales)
