"""What the target says of a block, before and after constraints.

A constraint is a function of the tokens before a slot, so it follows the drafted path: slot i sees the row's tokens and
the first i drafted ones, which are in the text exactly where slot i matters. Rejected tokens are seen by no slot that
does. It works on the host, one slot at a time, and so gives each slot the same bits in any block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_fn import errors
from dflash_fn.policies import Constraint, Policy
from dflash_fn.records import Array, Branches, DecodeState, Pair, Proposal

__all__ = ["Opinions", "opinions"]


@dataclass(frozen=True, slots=True)
class Opinions:
    """The target's logits over a block.

    Attributes:
        logits: [R, B, V] as the target gave them.
        constrained: [R, B, V] after the policy's constraint, in float32; the same array where it has none.
        problems: by (row, slot), what is wrong with what the constraint returned.
    """

    logits: Array
    constrained: Array
    problems: dict[tuple[int, int], str]

    def check(self, state: DecodeState, num_accepted: Sequence[int]) -> None:
        """Raise InputError for a problem in a slot that a token was taken from; later slots are on a dead path."""
        for (row, slot), problem in self.problems.items():
            if slot <= num_accepted[row] and state.stop[row] is None:
                position = len(state.tokens[row]) + slot
                raise errors.InputError(f"row {row}, position {position}: the constraint {problem}")


def opinions(state: DecodeState, pair: Pair, policy: Policy, proposal: Proposal, branches: Branches) -> Opinions:
    """Return the target's logits over a block; with a constraint, drafted tokens and logits are fetched for it."""
    logits = branches.logits[:, : proposal.tokens.shape[1] + 1]
    if policy.constraint is None:
        return Opinions(logits, logits, {})
    port, problems = pair.port, {}
    drafted, known = port.to_numpy(proposal.tokens).tolist(), port.to_numpy(logits).astype(np.float32)
    made = np.empty_like(known)
    for row, tokens in enumerate(state.tokens):
        for slot in range(known.shape[1]):
            path = (*tokens, *drafted[row][:slot])
            made[row, slot], problem = _constrained(policy.constraint, known[row, slot], path, row)
            if problem:
                problems[row, slot] = problem
    return Opinions(logits, port.asarray(made, pair.target.device), problems)


def _constrained(
    constraint: Constraint, logits: np.ndarray, path: tuple[int, ...], row: int
) -> tuple[np.ndarray, str | None]:
    """Return what the constraint makes of a slot; the logits themselves, and the reason, if that is of no use."""
    before = logits.view()
    before.flags.writeable = False
    made = np.asarray(constraint(before, path, row), dtype=np.float32)
    if made.shape != logits.shape:
        return logits, f"returned logits of shape {made.shape}, expected {logits.shape}"
    if np.isfinite(logits).all() and (np.isnan(made).any() or np.isposinf(made).any()):
        return logits, "returned NaN or infinity; expected numbers, and -infinity for what it bans"
    if np.isneginf(made).all():
        return logits, "leaves no token to emit; it must allow at least one"
    return made, None
