"""What the target says of a block, before and after constraints.

A constraint is a function of the tokens before a slot, so it follows the drafted path: slot i sees the row's tokens and
the first i drafted ones, which are in the text exactly where slot i matters. Rejected tokens are seen by no slot that
does. It works on the host, one slot at a time, and so gives each slot the same bits in any block.

Plain decoding asks a constraint about no slot that nothing is emitted from: not behind a rejected token, a stop token
or the end of a budget. So whatever goes wrong in a slot is kept, and raised where a token of that slot is emitted.
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
        problems: by row, the first slot that the constraint failed in, and the error. From there on a row's
            constrained logits are those of the target: a token of a later slot is not emitted without one of this.
    """

    logits: Array
    constrained: Array
    problems: dict[int, tuple[int, Exception]]

    def check(self, state: DecodeState, emitted: Sequence[Sequence[int]]) -> None:
        """Raise what went wrong in a slot that one of these tokens, one sequence a row, was taken from.

        Raises:
            InputError: the constraint returned what cannot be used, or refused its arguments so.
            Exception: whatever else it raised, with a note of the row and the position.
        """
        for row, (slot, problem) in self.problems.items():
            if slot < len(emitted[row]):
                where = f"row {row}, position {len(state.tokens[row]) + slot}"
                if isinstance(problem, errors.InputError):
                    raise errors.InputError(f"{where}: the constraint {problem}") from problem
                problem.add_note(f"{where}: raised by the policy's constraint")
                raise problem


def opinions(state: DecodeState, pair: Pair, policy: Policy, proposal: Proposal, branches: Branches) -> Opinions:
    """Return the target's logits over a block; with a constraint, drafted tokens and logits are fetched for it."""
    logits = branches.logits[:, : proposal.tokens.shape[1] + 1]
    if policy.constraint is None:
        return Opinions(logits, logits, {})
    port, problems = pair.port, {}
    drafted, known = port.to_numpy(proposal.tokens).tolist(), port.to_numpy(logits).astype(np.float32)
    made = known.copy()
    for row, (tokens, stop) in enumerate(zip(state.tokens, state.stop, strict=True)):
        for slot in range(0 if stop else known.shape[1]):
            path = (*tokens, *drafted[row][:slot])
            try:
                made[row, slot] = _constrained(policy.constraint, known[row, slot], path, row)
            except Exception as problem:
                problems[row] = slot, problem
                break
    return Opinions(logits, port.asarray(made, pair.target.device), problems)


def _constrained(constraint: Constraint, logits: np.ndarray, path: tuple[int, ...], row: int) -> np.ndarray:
    """Return what the constraint makes of a slot, or raise InputError if that is of no use."""
    before = logits.view()
    before.flags.writeable = False
    made = np.asarray(constraint(before, path, row), dtype=np.float32)
    if made.shape != logits.shape:
        raise errors.InputError(f"returned logits of shape {made.shape}, expected {logits.shape}")
    if np.isfinite(logits).all() and (np.isnan(made).any() or np.isposinf(made).any()):
        raise errors.InputError("returned NaN or infinity; expected numbers, and -infinity for what it bans")
    if np.isneginf(made).all():
        raise errors.InputError("leaves no token to emit; it must allow at least one")
    return made
