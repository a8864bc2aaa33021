"""Policies made of policies: a budget, a cut by confidence, constraints. What they wrap does not know of them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_fn import errors
from dflash_fn.checks import check_count, check_number
from dflash_fn.policies.base import Constraint, Drafting, Policy
from dflash_fn.policies.blocks import leading
from dflash_fn.records import Array, Verdict
from dflash_fn.sampling import Sampling, probabilities
from dflash_fn.streams import Streams

__all__ = ["budget", "confidence_cut", "constrained"]


def budget(policy: Policy, most: int) -> Policy:
    """Return the same policy over blocks of at most `most` drafted tokens: it never sees those after them.

    Lossless where the policy is, since a shorter block is a block like any other.

    Raises:
        InputError: a budget that is no integer of at least 0; what is no policy.
    """
    _check_policy("budget", policy)
    most = check_count("budget", most, least=0)

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        return _shortened(policy, min(most, drafted.shape[1]), xp, drafted, logits, q, uniforms)

    return replace(policy, name=f"{policy.name}, at most {most}", rule=rule)


def confidence_cut(policy: Policy, threshold: float) -> Policy:
    """Return the same policy over blocks that end where the draft becomes unsure.

        keep slot i in the block while max_v q[j](v) >= threshold for all j <= i

    How long the block is depends on q, and so on what came before each token, never on the token that was drawn; hence
    it is lossless where the policy is. (To drop a slot where the *drawn* token has a low q is another law: 0.2 off in
    total variation on the example of `properties/test_law_properties.py`.)

    For a policy that needs no q, the draft's distribution at the policy's temperature (1 at temperature 0) says how
    sure it is, however the tokens were drawn; no law depends on it.

    Args:
        policy: what judges the block.
        threshold: from 0 (never cut) to 1.

    Raises:
        InputError: a threshold out of range; what is no policy.

    Guarantees:
        P13: as for the policy that it wraps.
    """
    _check_policy("confidence_cut", policy)
    threshold = check_number("confidence_cut: threshold", threshold, 0, 1)

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        assert q is not None
        given = q if policy.needs_q else None
        length = leading(xp, xp.max(q, axis=-1) >= threshold, drafted)
        made = _shortened(policy, 0, xp, drafted, logits, given, uniforms)
        for size in range(1, drafted.shape[1] + 1):
            longer, taken = _shortened(policy, size, xp, drafted, logits, given, uniforms), length >= size
            made = Verdict(
                xp.where(taken, longer.num_accepted, made.num_accepted),
                xp.where(taken, longer.next_token, made.next_token),
            )
        return made

    drafting = policy.drafting if policy.needs_q else _with_confidence(policy.drafting, policy.sampling)
    name = f"{policy.name}, cut below {threshold:g}"
    return replace(policy, name=name, rule=rule, needs_q=True, drafting=drafting)


def _check_policy(name: str, policy: Any) -> None:
    if not isinstance(policy, Policy):
        raise errors.InputError(
            f"{name}: got {reprlib.repr(policy)} of type {type(policy).__name__}, expected a Policy, such as "
            "dflash_fn.match()"
        )


def _shortened(
    policy: Policy,
    size: int,
    xp: Any,
    drafted: Array,
    logits: Array,
    q: Array | None,
    uniforms: Mapping[str, Array],
) -> Verdict:
    """Ask a policy about the first `size` drafted tokens, as if no others had been."""
    known = {name: values[:, : size + 1, ...] for name, values in uniforms.items()}
    numbers = Streams(f"policy {policy.name!r}", known)
    return policy.rule(xp, drafted[:, :size], logits[:, : size + 1, :], None if q is None else q[:, :size, :], numbers)


def _with_confidence(drafting: Drafting, sampling: Sampling) -> Drafting:
    plain = Sampling(sampling.temperature or 1.0)

    def rule(xp: Any, logits: Array, uniforms: Mapping[str, Array]) -> tuple[Array, Array | None]:
        return drafting.rule(xp, logits, uniforms)[0], probabilities(xp, logits, plain)

    return Drafting(f"{drafting.name}, with confidence", rule, drafting.streams, drawn_by=drafting)


def constrained(policy: Policy, *constraints: Constraint) -> Policy:
    """Return the same policy for the target under constraints, applied one after the other.

    They change the target's logits, slot by slot along the drafted path, before the rule and its sampling see them.
    What the policy promises of the target it promises of the constrained target. The draft is left as it is.

    Args:
        policy: what judges the block; constraints that it has already come first.
        constraints: see `dflash_fn.constraints`.

    Raises:
        InputError: what is no policy; a constraint that cannot be called.

    Guarantees:
        P16: the text is that of plain decoding with the same policy and constraints, where the policy is invariant.
    """
    _check_policy("constrained", policy)
    for index, change in enumerate(constraints):
        if not callable(change):
            raise errors.InputError(
                f"constrained: constraint {index}: got {reprlib.repr(change)}, expected a function (logits, tokens, "
                "row) -> logits, such as dflash_fn.constraints makes"
            )
    chain = (*([policy.constraint] if policy.constraint else []), *constraints)

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        for change in chain:
            logits = change(logits, tokens, row)
        return logits

    return replace(policy, name=f"{policy.name}, constrained", constraint=constraint)
