"""What a trace tells, block by block: which tokens were kept, which were not, and how likely both models found them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_fn.metrics import Summary, summarize
from dflash_fn.records import StepInfo, StopReason
from dflash_fn.trace.records import LawsView, RowStep, Trace

__all__ = ["Block", "Candidate", "Mark", "Slot", "Story", "infos_of", "kept_by_slot", "stories_of"]


class Mark(enum.Enum):
    """What became of a token; the value is the word for people."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNREACHED = "not reached"
    BONUS = "bonus"
    RECOVERED = "recovered"
    OPENING = "opening"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that might have stood in a slot.

    Attributes:
        token: its id.
        p: what the target's token is drawn from.
        q: what the drafted token was drawn from; None after the last one.
        target: the target's softmax.
        draft: the draft's; None where none was asked.
    """

    token: int
    p: float
    q: float | None
    target: float
    draft: float | None


@dataclass(frozen=True, slots=True)
class Slot:
    """A token of a block.

    Attributes:
        index: 1 for the token after the anchor.
        position: where it stands, or would stand, in the row.
        token: its id.
        mark: what became of it.
        emitted: whether it is in the text: a stop token or the budget may cut off what was accepted.
        own: itself among the candidates; None where the trace does not say.
        candidates: the likeliest ones of both models.
        overlap: sum of min(p, q) over all tokens; None where nothing was drafted, or where the trace does not say.
    """

    index: int
    position: int
    token: int
    mark: Mark
    emitted: bool
    own: Candidate | None
    candidates: tuple[Candidate, ...]
    overlap: float | None


@dataclass(frozen=True, slots=True)
class Block:
    """A row's step: the drafted tokens, then the one that came after the accepted ones.

    Attributes:
        step: its index; 0 is the opening step.
        anchor: the token before the block.
        drafted: the B - 1 drafted tokens.
        extra: the bonus or recovered token.
        num_accepted: the verdict.
        stop: why the row stops here; None where it goes on.
    """

    step: int
    anchor: int
    drafted: tuple[Slot, ...]
    extra: Slot
    num_accepted: int
    stop: StopReason | None

    @property
    def emitted(self) -> tuple[Slot, ...]:
        """The tokens that the text gained."""
        return tuple(slot for slot in (*self.drafted[: self.num_accepted], self.extra) if slot.emitted)


@dataclass(frozen=True, slots=True)
class Story:
    """A row.

    Attributes:
        row: its index.
        seed: its seed.
        prompt: its tokens.
        blocks: one a step.
        summary: its statistics.
    """

    row: int
    seed: int
    prompt: tuple[int, ...]
    blocks: tuple[Block, ...]
    summary: Summary


def infos_of(trace: Trace) -> list[StepInfo]:
    """Return what the steps of a trace reported, for `dflash_fn.metrics.summarize`; it holds no arrays."""
    return [
        StepInfo(
            step=step,
            block_size=max(len(row.block) for row in rows if row),
            drafted=tuple(row.block[1:] if row else () for row in rows),
            emitted=tuple(row.emitted if row else () for row in rows),
            num_accepted=tuple(len(row.emitted) - 1 if row else None for row in rows),
            logits=None,
        )
        for step, rows in enumerate(trace.steps)
    ]


def stories_of(trace: Trace) -> list[Story]:
    """Return each row's story."""
    infos = infos_of(trace)
    return [
        Story(row, trace.seed[row], prompt, tuple(_blocks(trace, row)), summarize(infos, row))
        for row, prompt in enumerate(trace.prompts)
    ]


def kept_by_slot(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """Return, for each slot after the anchor, how many blocks kept what was drafted there, and how many had it.

    A block that a stop token or the budget cut counts with what was emitted, less the extra token, as in
    `dflash_fn.metrics`; so the first numbers add up to its accepted tokens.
    """
    counts = [(len(block.drafted), len(block.emitted) - 1) for block in blocks if block.step]
    longest = max((size for size, _ in counts), default=0)
    return [
        (sum(kept >= slot for _, kept in counts), sum(size >= slot for size, _ in counts))
        for slot in range(1, longest + 1)
    ]


def _blocks(trace: Trace, row: int) -> list[Block]:
    made, position = [], len(trace.prompts[row])
    for step, rows in enumerate(trace.steps):
        if found := rows[row]:
            made.append(_block(step, found, position))
            position += len(found.emitted)
    return made


def _block(step: int, row: RowStep, position: int) -> Block:
    drafted = tuple(
        _slot(
            row,
            index,
            position,
            token,
            _mark(index, row.num_accepted),
            index <= min(row.num_accepted, len(row.emitted)),
        )
        for index, token in enumerate(row.block[1:], start=1)
    )
    full = row.num_accepted == len(row.block) - 1
    mark = Mark.OPENING if step == 0 else Mark.BONUS if full else Mark.RECOVERED
    extra = _slot(row, row.num_accepted + 1, position, row.next_token, mark, len(row.emitted) > row.num_accepted)
    return Block(step, row.block[0], drafted, extra, row.num_accepted, row.stop)


def _mark(index: int, num_accepted: int) -> Mark:
    if index <= num_accepted:
        return Mark.ACCEPTED
    return Mark.REJECTED if index == num_accepted + 1 else Mark.UNREACHED


def _slot(row: RowStep, index: int, position: int, token: int, mark: Mark, emitted: bool) -> Slot:
    candidates = _candidates(row.laws, index - 1) if row.laws else ()
    own = next((one for one in candidates if one.token == token), None)
    overlap = float(row.laws.overlap[index - 1]) if row.laws and index <= len(row.laws.overlap) else None
    return Slot(index, position + index - 1, token, mark, emitted, own, candidates, overlap)


def _candidates(laws: LawsView, place: int) -> tuple[Candidate, ...]:
    nothing = [None] * laws.ids.shape[1]

    def column(values: np.ndarray | None) -> list:
        return nothing if values is None or place >= len(values) else values[place].tolist()

    columns = (laws.ids, laws.p, laws.q, laws.target, laws.draft)
    return tuple(Candidate(*one) for one in zip(*map(column, columns), strict=True))
