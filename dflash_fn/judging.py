"""Judging a block: ask the policy, and fetch from the device, all at once, what it decided."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_fn import errors
from dflash_fn.blocks import check_verdict_type
from dflash_fn.draws import one_hot
from dflash_fn.opinions import Opinions, opinions
from dflash_fn.policies import Policy
from dflash_fn.records import Array, Branches, DecodeState, Pair, Proposal
from dflash_fn.streams import Streams, numbers

__all__ = ["certain", "finite", "judge", "judged_by"]


def certain(pair: Pair, policy: Policy, tokens: Array) -> Array | None:
    """Return the q of tokens that no chance had a part in: 1 at each of them; None where nobody asks for it."""
    if not policy.needs_q:
        return None
    like = pair.port.asarray(np.zeros((1, 1, pair.target.spec.vocab_size), dtype=np.float32), pair.target.device)
    return one_hot(pair.port.xp, tokens, like)


def judge(
    state: DecodeState, pair: Pair, policy: Policy, proposal: Proposal, branches: Branches
) -> tuple[tuple[tuple[int, ...], ...], list[tuple[int, ...]]]:
    """Ask the policy, and fetch from the device, all at once, what it decided.

    Where a constraint failed, the target's own logits are judged: whether that matters is known once the tokens are cut
    to what is emitted, which `step` does.

    Returns:
        the drafted tokens, B - 1 a row; and the kept ones with the extra one, `num_accepted + 1` a row.

    Raises:
        InputError: the policy accepted more tokens than were drafted, or emits one that there is not.
        NonFiniteError: the target's or the draft's logits hold NaN or infinity.
    """
    return judged_by(state, pair, policy, proposal, opinions(state, pair, policy, proposal, branches))


def judged_by(
    state: DecodeState, pair: Pair, policy: Policy, proposal: Proposal, heard: Opinions
) -> tuple[tuple[tuple[int, ...], ...], list[tuple[int, ...]]]:
    """Judge, from what the target says after its constraints; see `judge`, and `Opinions.check` for their problems."""
    xp, size = pair.port.xp, proposal.tokens.shape[1] + 1
    uniforms = numbers(state, pair, policy.streams, size)
    verdict = policy.rule(
        xp, proposal.tokens, heard.constrained, proposal.q, Streams(f"policy {policy.name!r}", uniforms)
    )
    check_verdict_type(policy.name, verdict, proposal.tokens)
    columns = [
        proposal.tokens,
        verdict.num_accepted[:, None],
        verdict.next_token[:, None],
        xp.astype(finite(xp, heard.logits), proposal.tokens.dtype)[:, None],
    ]
    if proposal.finite is not None:
        columns.append(xp.astype(proposal.finite, proposal.tokens.dtype)[:, None])
    fetched = pair.port.to_numpy(xp.concat(columns, axis=1)).tolist()
    _check_finite(state, pair, [row[size + 1 :] for row in fetched])
    _check_verdict(policy, size, pair.target.spec.vocab_size, [row[size - 1 : size + 1] for row in fetched])
    drafted = tuple(tuple(row[: size - 1]) for row in fetched)
    return drafted, [(*row[: row[size - 1]], row[size]) for row in fetched]


def _check_verdict(policy: Policy, size: int, vocab_size: int, verdicts: list[list[int]]) -> None:
    for row, (count, token) in enumerate(verdicts):
        if not 0 <= count < size or not 0 <= token < vocab_size:
            raise errors.InputError(
                f"row {row}: policy {policy.name!r} accepted {count} of {size - 1} drafted tokens and emits token "
                f"{token}; expected 0 to {size - 1}, and an id below {vocab_size}"
            )


def finite(xp: Any, logits: Array) -> Array:
    """[R] booleans; the maximum of a slot is NaN or infinite exactly where something that matters is."""
    return xp.all(xp.isfinite(xp.max(logits, axis=-1)), axis=-1)


def _check_finite(state: DecodeState, pair: Pair, flags: list[list[int]]) -> None:
    for row, (reason, found) in enumerate(zip(state.stop, flags, strict=True)):
        for model, name, fine in zip((pair.target, pair.draft), ("target", "draft"), found, strict=False):
            if reason is None and model and not fine:
                raise errors.NonFiniteError(
                    f"row {row}, step {state.step}: the {name}'s logits hold NaN or infinity "
                    f"(port {pair.port.name}, {model.dtype}); "
                    + ("load the pair in bfloat16 or float32" if model.dtype == "float16" else "check the weights")
                )
