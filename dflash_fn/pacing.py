"""Choosing the block size while decoding: as many slots as this machine's costs and the draft's luck make worth while.

The width stays what it is, and with it the bits of every logit; a block size only says how much of the width is
drafted. So under an invariant policy the text cannot depend on what is chosen here, nor on how long anything took.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dflash_fn import errors
from dflash_fn.loop import decode
from dflash_fn.policies import match
from dflash_fn.records import DecodeState, Pace, Pair, Proposer, StepInfo, StopReason
from dflash_fn.steps import Room, step

__all__ = ["Adaptive", "Seen", "auto", "block_sizes", "measure", "worth"]

MEMORY = 0.9
"""What a step's observations weigh after each later step: some ten steps count."""

PRIOR = 0.8, 4.0
"""Before anything was seen: the share of slots that are kept, and how many observations that is worth. It fades too."""

LOOK_AGAIN = 8
"""Steps without a draft after which one is drafted again, to see whether the text has become easier."""

REPEATS = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of drafted slots, the latest steps first in weight.

    Attributes:
        reached: by slot, from 1: how often all slots before it were kept.
        kept: by slot: how often it was kept too.
    """

    reached: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()

    def after(self, info: StepInfo) -> Seen:
        """Return what is known after one more step; a step that drafted nothing teaches nothing."""
        slots = info.block_size - 1
        if not slots:
            return self
        counts = [count for count in info.num_accepted if count is not None]
        share, weight = PRIOR
        length = max(slots, len(self.reached))
        reached = [MEMORY * value for value in _padded(self.reached, length, weight)]
        kept = [MEMORY * value for value in _padded(self.kept, length, share * weight)]
        for slot in range(slots):
            reached[slot] += sum(count >= slot for count in counts)
            kept[slot] += sum(count > slot for count in counts)
        return Seen(tuple(reached), tuple(kept))

    def share(self, slot: int) -> float:
        """Return how likely slot 1, 2, ... is kept if it is reached."""
        return self.kept[slot - 1] / self.reached[slot - 1] if slot <= len(self.reached) else PRIOR[0]


def _padded(values: tuple[float, ...], length: int, value: float) -> tuple[float, ...]:
    return values + (value,) * (length - len(values))


def worth(seen: Seen, block_size: int) -> float:
    """Return the tokens that a step with B slots is expected to emit: 1 + the sum over slots of reaching and keeping.

    Example:
        >>> worth(Seen(), 1), round(worth(Seen(), 3), 2)
        (1.0, 2.44)
    """
    total = chance = 1.0
    for slot in range(1, block_size):
        chance *= seen.share(slot)
        total += chance
    return total


@dataclass(frozen=True, slots=True)
class Adaptive:
    """A pace that picks the block size with the most expected tokens a second.

    Attributes:
        costs: seconds of a step, by block size; those are the sizes to pick from.
        seen: what became of drafted slots so far.
        undrafted: steps since something was drafted.
    """

    costs: Mapping[int, float]
    seen: Seen = Seen()
    undrafted: int = 0

    def __post_init__(self) -> None:
        if not self.costs or any(size < 1 or not cost > 0 for size, cost in self.costs.items()):
            raise errors.InputError(
                f"costs: got {dict(self.costs)}, expected seconds above 0 by block size, at least one"
            )

    @property
    def block_size(self) -> int:
        """B of the next step."""
        if self.undrafted >= LOOK_AGAIN:
            return max(self.costs)
        return max(sorted(self.costs), key=lambda size: worth(self.seen, size) / self.costs[size])

    @property
    def largest(self) -> int:
        """The largest B that may be picked."""
        return max(self.costs)

    def after(self, info: StepInfo) -> Adaptive:
        """Return the pace after one more step."""
        return replace(self, seen=self.seen.after(info), undrafted=0 if info.block_size > 1 else self.undrafted + 1)


def block_sizes(most: int) -> tuple[int, ...]:
    """Return the sizes to pick from: powers of two, and the most.

    Example:
        >>> block_sizes(10), block_sizes(1)
        ((1, 2, 4, 8, 10), (1,))
    """
    powers = [1 << power for power in range(most.bit_length())]
    return tuple(sorted({*powers, most}))


def measure(
    state: DecodeState, pair: Pair, *, proposer: Proposer | None = None, most: int | None = None
) -> dict[int, float]:
    """Return the seconds that a step from this state takes, by block size.

    A step is a pure function, so that it can be timed on a state that is then used as if nothing had been. The first
    round is not counted; of the next ones the quickest is, since whatever else the machine does only adds.

    Args:
        state: from `prefill`; stays valid. A longer one shows larger costs of attention.
        pair: target, draft and port.
        proposer: as in `decode`.
        most: the largest block size; None takes the width, or the draft's own block size if that is smaller.
    """
    own = pair.draft.spec.block_size if pair.draft and not proposer else state.width
    sizes = block_sizes(min(state.width, own if most is None else most))
    state = replace(state, stop=(None,) * len(state.tokens))
    if state.step == 0:
        state = decode(state, pair, max_new_tokens=1, block_size=1, stop_token_ids=())
    state = replace(state, stop=(None,) * len(state.tokens))
    found = {size: [_timed(state, pair, proposer, size) for _ in range(REPEATS + 1)][1:] for size in sizes}
    return {size: min(times) for size, times in found.items()}


def _timed(state: DecodeState, pair: Pair, proposer: Proposer | None, size: int) -> float:
    room = [Room(size, StopReason.MAX_NEW_TOKENS)] * len(state.tokens)
    begun = time.perf_counter()
    step(state, pair, policy=match(), room=room, block_size=size, proposer=proposer)
    return time.perf_counter() - begun


def auto(state: DecodeState, pair: Pair, *, proposer: Proposer | None = None) -> Pace:
    """Measure the costs on this machine, and return a pace to decode with: `decode(..., block_size=auto(state, pair))`.

    Args:
        state: where decoding is to go on from; stays valid.
        pair: target, draft and port.
        proposer: as in `decode`.

    Raises:
        InputError: the pair is shared by several processes, whose clocks differ.

    Guarantees:
        P01: whatever is picked, an invariant policy's tokens and the bits of their logits are those of `block_size=1`
            at the same width. `decode` refuses other policies, whose text would hang on the machine's speed.

    Example:
        >>> import dflash_fn
        >>> from dflash_fn import pacing
        >>> pair = dflash_fn.load_zoo("tiny-code")
        >>> state = dflash_fn.prefill(pair, "def add(a, b):")
        >>> state = dflash_fn.decode(state, pair, max_new_tokens=8, block_size=pacing.auto(state, pair))
    """
    if pair.target.processes > 1:
        raise errors.InputError(
            "block_size auto: the pair is shared by several processes, whose clocks would choose different blocks; "
            "give a number, or the same costs to each: pacing.Adaptive({1: ..., 8: ...})"
        )
    return Adaptive(measure(state, pair, proposer=proposer))
