"""What an acceptance policy is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from dflash_fn.records import Array, Verdict
from dflash_fn.sampling import GREEDY, Sampling

__all__ = ["Constraint", "DraftRule", "Drafting", "Policy", "Rule"]

Constraint: TypeAlias = Callable[[np.ndarray, tuple[int, ...], int], np.ndarray]
"""A function (logits [V] float32, tokens of the row so far, row) -> logits [V], on the host; see
`dflash_fn.constraints`."""


class Rule(Protocol):
    """The function inside a policy."""

    def __call__(
        self, xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]
    ) -> Verdict:
        """Judge a block.

        Args:
            xp: the port's array namespace.
            drafted: [R, B - 1] integers, the draft's tokens.
            logits: [R, B, V] of the target; `logits[:, i]` is its opinion on the token after slot i, if the drafted
                tokens before it are kept.
            q: [R, B - 1, V], the distributions that the tokens were drawn from, or None where `needs_q` is False.
            uniforms: one array [R, B] a stream that the policy names, with numbers in [0, 1); stream `noise` is
                [R, B, 2], integers below 2 ** 31 (see `dflash_fn.draws.race`).

        Returns:
            a `Verdict`. Whether a slot is kept may depend on slots after it only where the output's law has been
            worked out with that (as block verification's has).
        """
        ...


class DraftRule(Protocol):
    """The function inside a `Drafting`."""

    def __call__(self, xp: Any, logits: Array, uniforms: Mapping[str, Array]) -> tuple[Array, Array | None]:
        """Draw the drafted tokens.

        Args:
            xp: the port's array namespace.
            logits: [R, B - 1, V] of the draft.
            uniforms: one array a stream that the drafting names, its first B - 1 slots.

        Returns:
            tokens [R, B - 1], in any integer type; and q [R, B - 1, V], the distributions that they were drawn from.
            None stands for a q that is 1 at the tokens: they are a function of what came before.
        """
        ...


@dataclass(frozen=True, slots=True)
class Drafting:
    """How the draft's tokens are drawn from its logits.

    Attributes:
        name: for reports.
        rule: the function.
        streams: names of the random streams that it reads.
        drawn_by: where `rule` hands on a q that the tokens were not drawn from, as `confidence_cut` does for rules that
            need none, the drafting whose q it is; None where it is this one's. Reports of q ask it.
    """

    name: str
    rule: DraftRule
    streams: tuple[str, ...] = ()
    drawn_by: Drafting | None = None


def _first_largest(xp: Any, logits: Array, uniforms: Mapping[str, Array]) -> tuple[Array, Array | None]:
    del uniforms
    return xp.argmax(logits, axis=-1), None


ARGMAX = Drafting("argmax", _first_largest)
"""The draft's most probable tokens; ties go to the first index."""


@dataclass(frozen=True, slots=True)
class Policy:
    """An acceptance rule and what must be known of it.

    Attributes:
        name: for reports.
        rule: the function.
        lossless: whether the output has the target's own law (under `sampling` and `constraint`).
        needs_q: whether the rule reads q.
        streams: names of the random streams (see `dflash_fn.rng`) whose numbers the rule reads.
        sampling: what makes p of the target's logits; the rule applies it, and reports of log probabilities do.
        drafting: how the draft's tokens are drawn. A proposer's are a function of the state, so their q is 1 at them.
        invariant: whether the text itself, not only its law, is that of plain decoding with the same seed, whatever
            the draft and the block size.
        constraint: changes the target's logits before all else; None leaves them.
    """

    name: str
    rule: Rule
    lossless: bool
    needs_q: bool = False
    streams: tuple[str, ...] = ()
    sampling: Sampling = GREEDY
    drafting: Drafting = ARGMAX
    invariant: bool = False
    constraint: Constraint | None = None
