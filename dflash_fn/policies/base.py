"""What an acceptance policy is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_fn.records import Array, Verdict

__all__ = ["Policy", "Rule"]


class Rule(Protocol):
    """The function inside a policy."""

    def __call__(
        self, xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]
    ) -> Verdict:
        """Judge a block.

        Args:
            xp: the port's array namespace.
            drafted: [R, B - 1] integers, the draft's tokens.
            logits: [R, B, V] of the target; `logits[:, i]` is its opinion on the token after slot i.
            q: [R, B - 1, V], the distributions that the tokens were drawn from, or None.
            uniforms: one array a stream that the policy names, with numbers in [0, 1).

        Returns:
            a `Verdict`; its `num_accepted` may not depend on anything after the first rejected slot.
        """
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """An acceptance rule and what must be known of it.

    Attributes:
        name: for reports.
        rule: the function.
        lossless: whether the output has the target's own law.
        needs_q: whether the rule reads q.
        streams: names of the random streams (see `dflash_fn.rng`) whose uniforms the rule reads.
    """

    name: str
    rule: Rule
    lossless: bool
    needs_q: bool = False
    streams: tuple[str, ...] = ()
