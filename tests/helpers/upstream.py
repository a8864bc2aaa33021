"""Upstream's generation loop, step by step, beside ours."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest

from dflash_fn import DecodeState, Pair, StepInfo, prefill, propose, rounds
from dflash_fn.divergence import Divergence, explain_divergence, first_difference
from dflash_fn.tolerances import bound

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")


@dataclass(frozen=True)
class Round:
    """One of upstream's steps; its prefill is the first, with nothing drafted.

    Attributes:
        position: of the first token that it emitted.
        drafted: tokens of the block after the anchor.
        emitted: tokens gained.
        target_logits: [tokens in the block, V].
        draft_logits: [drafted tokens, V].
    """

    position: int
    drafted: tuple[int, ...]
    emitted: tuple[int, ...]
    target_logits: Tensor
    draft_logits: Tensor


@dataclass(frozen=True)
class OurRound:
    """One of our steps: the state that it started from, and what it reported."""

    before: DecodeState
    info: StepInfo

    @property
    def position(self) -> int:
        """Position of the first token that it emitted."""
        return len(self.before.tokens[0])


@contextmanager
def recorded(upstream: ModuleType, draft: Any, target: Any) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Collect the logits of target and draft, pass by pass; upstream's clock asks for CUDA and is replaced."""
    target_logits: list[Tensor] = []
    draft_logits: list[Tensor] = []
    compute = draft.compute_logits

    def compute_and_keep(hidden: Tensor, head: Any) -> Tensor:
        draft_logits.append(compute(hidden, head)[0])
        return draft_logits[-1][None]

    hook = target.register_forward_hook(lambda module, given, out: target_logits.append(out.logits[0]))
    with (
        patch.object(upstream, "_cuda_time", time.perf_counter),
        patch.object(draft, "compute_logits", compute_and_keep),
    ):
        try:
            yield target_logits, draft_logits
        finally:
            hook.remove()


def upstream_rounds(
    upstream: ModuleType, draft: Any, target: Any, ids: Sequence[int], *, max_new_tokens: int, stop: Sequence[int]
) -> list[Round]:
    """Run upstream's greedy generation and return its prefill and its steps that ran a whole block.

    Close to its budget upstream shortens the block, and a draft whose layers see the whole block then guesses
    otherwise: those steps are left out.
    """
    with recorded(upstream, draft, target) as (target_logits, draft_logits):
        out = upstream.dflash_generate(
            draft, target, torch.tensor([ids]), max_new_tokens, list(stop), return_stats=True
        )
    text = out.output_ids[0].tolist()
    nothing = torch.empty(0)
    made = [Round(len(ids), (), (text[len(ids)],), target_logits[0], nothing)]
    position = len(ids) + 1
    for count, logits, guess in zip(out.acceptance_lengths, target_logits[1:], draft_logits, strict=False):
        if len(logits) < draft.block_size:
            break
        drafted = tuple(guess.argmax(dim=-1).tolist())
        made.append(Round(position, drafted, tuple(text[position : position + count]), logits, guess))
        position += count
    return made


def our_rounds(pair: Pair, ids: Sequence[int], *, max_new_tokens: int, stop: Sequence[int]) -> list[OurRound]:
    """Run ours, and keep every state on the way."""
    state, made = prefill(pair, ids), []
    for after, info in rounds(state, pair, max_new_tokens=max_new_tokens, stop_token_ids=stop):
        made.append(OurRound(state, info))
        state = after
    return made


def first_divergence(pair: Pair, ours: Sequence[OurRound], theirs: Sequence[Round]) -> Divergence | None:
    """Compare drafted and emitted tokens step by step; return where they first differ.

    Raises:
        AssertionError: they differ in something that is no choice between tokens.
    """
    assert len(ours) >= len(theirs)
    for mine, other in zip(ours, theirs, strict=False):
        assert mine.position == other.position
        slot = first_difference(mine.info.drafted[0], other.drafted)
        if slot is not None:
            return _draft_divergence(pair, mine, other, slot)
        slot = first_difference(mine.info.emitted[0], other.emitted)
        if slot is not None:
            return _target_divergence(pair, mine, other, slot)
        assert mine.info.emitted[0] == other.emitted
    return None


def _target_divergence(pair: Pair, mine: OurRound, other: Round, slot: int) -> Divergence:
    return explain_divergence(
        f"target, step {mine.info.step}, slot {slot}",
        mine.position + slot,
        as_numpy(mine.info.logits[0, slot]),
        as_numpy(other.target_logits[slot]),
        relative_bound=bound(pair.target.dtype, "logits", pair.target.spec),
    )


def _draft_divergence(pair: Pair, mine: OurRound, other: Round, slot: int) -> Divergence:
    assert pair.draft is not None
    tapped = max(pair.draft.spec.target_layer_ids) + 1
    return explain_divergence(
        f"draft, step {mine.info.step}, slot {slot + 1}",
        mine.position + slot,
        as_numpy(our_draft_logits(pair, mine.before)[slot]),
        as_numpy(other.draft_logits[slot]),
        relative_bound=bound(
            pair.draft.dtype, "draft_logits", pair.draft.spec, layers=pair.draft.spec.num_layers + tapped
        ),
    )


def our_draft_logits(pair: Pair, before: DecodeState) -> Tensor:
    """Compute once more what the draft said in the step after a state: [B - 1, V]."""
    logits = propose(before, pair).logits
    assert logits is not None
    return logits[0]


def as_numpy(logits: Tensor) -> np.ndarray:
    """Fetch a row of logits."""
    return logits.detach().float().numpy()
