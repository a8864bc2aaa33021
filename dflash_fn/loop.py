"""The one loop: steps until every row has stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dflash_fn import errors, inputs
from dflash_fn.checks import check_count
from dflash_fn.origin import check_state
from dflash_fn.policies import Policy
from dflash_fn.records import DecodeState, Pace, Pair, Proposer, StepInfo, StopReason
from dflash_fn.steps import Room, step

__all__ = ["decode", "rounds"]

RESERVE_AT_MOST = 1024
"""Tokens that a decode makes room for beforehand; caches that outgrow it grow by half."""


def decode(
    state: DecodeState,
    pair: Pair,
    *,
    policy: Policy | None = None,
    max_new_tokens: int = 256,
    stop_token_ids: int | Iterable[int] | None = None,
    block_size: int | Pace | None = None,
    proposer: Proposer | None = None,
) -> DecodeState:
    """Emit tokens until every row has stopped, and return the state then.

    Args:
        state: from `prefill`, `extend`, or an earlier `decode`; it stays valid.
        pair: target, draft and port.
        policy: which drafted tokens are kept; None takes `policies.match()`, which is lossless.
        max_new_tokens: how many tokens each row may emit in this call.
        stop_token_ids: ids that end a row, themselves included; None takes the target's own, () takes none.
        block_size: B, at most the state's width; None takes the draft's; 1 is plain decoding. A pace, such as that of
            `pacing.auto`, chooses it anew for each step.
        proposer: a function to ask in place of the draft.

    Returns:
        The state after the last step. Its `stop` says why each row ended. A row that ended at its budget goes on in
        the next call; one that ended at a stop token does not, until `extend` adds to it.

    Raises:
        InputError: a negative budget, a block size above the width, a stop id that the target does not have; a state
            of another pair; what is no policy or no function; a pace with a policy that is not invariant.
        NonFiniteError: a model's logits hold NaN or infinity.

    Guarantees:
        P01: with an invariant policy, such as `match()`, the tokens and the bits of their logits are those of
            `block_size=1`.
        P07: so they are at temperature > 0, from the same seed.
        P04: decoding for n and then for m tokens equals decoding for n + m, where the policy is invariant and the block
            size the same. Other policies judge blocks, whose borders a budget moves.
        P08: a row emits exactly min(max_new_tokens, tokens up to the first stop) tokens.

    Example:
        >>> import dflash_fn
        >>> pair = dflash_fn.load_zoo("tiny-code")
        >>> state = dflash_fn.prefill(pair, "def add(a, b):")
        >>> len(dflash_fn.decode(state, pair, max_new_tokens=8).tokens[0]) - len(state.tokens[0])
        8
    """
    check_state(state, pair)
    last = _reopened(state, pair)
    for last, _ in rounds(  # noqa: B007 (the value is used after the loop)
        state,
        pair,
        policy=policy,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        block_size=block_size,
        proposer=proposer,
    ):
        pass
    return last


def rounds(
    state: DecodeState,
    pair: Pair,
    *,
    policy: Policy | None = None,
    max_new_tokens: int = 256,
    stop_token_ids: int | Iterable[int] | None = None,
    block_size: int | Pace | None = None,
    proposer: Proposer | None = None,
    logprobs: bool = False,
) -> Iterator[tuple[DecodeState, StepInfo]]:
    """Decode step by step: yield each state and what its step reports.

    The arguments, errors and guarantees are those of `decode`, whose result is the last state yielded. Arguments are
    checked by the call, not by the first `next`. One argument more: `logprobs`, whether each `StepInfo` has the log
    probabilities of what was emitted.

    Guarantees:
        P17: log probabilities are those of plain decoding, bit for bit, where the policy is invariant.
    """
    check_state(state, pair)
    inputs.check_proposer(proposer)
    rule = inputs.as_policy(policy)
    budget = check_count("max_new_tokens", max_new_tokens, least=0)
    stop_ids = inputs.as_stop_ids(pair, stop_token_ids)
    pace = _paced(pair, block_size, state.width, rule)
    return _rounds(_reopened(state, pair), pair, rule, budget, stop_ids, pace, proposer, logprobs)


def _rounds(
    state: DecodeState,
    pair: Pair,
    policy: Policy,
    budget: int,
    stop_ids: frozenset[int],
    pace: Pace,
    proposer: Proposer | None,
    logprobs: bool,
) -> Iterator[tuple[DecodeState, StepInfo]]:
    begun = [len(ids) for ids in state.tokens]
    state = _reserved(state, pair, budget)
    while True:
        room = [_room(pair, ids, first, budget) for ids, first in zip(state.tokens, begun, strict=True)]
        if not any(left.tokens and reason is None for left, reason in zip(room, state.stop, strict=True)):
            return
        state, info = step(
            state,
            pair,
            policy=policy,
            room=room,
            stop_token_ids=stop_ids,
            block_size=pace.block_size,
            proposer=proposer,
            logprobs=logprobs,
        )
        pace = pace.after(info)
        yield state, info


@dataclass(frozen=True, slots=True)
class _Fixed:
    """The pace that a number is."""

    block_size: int

    @property
    def largest(self) -> int:
        return self.block_size

    def after(self, info: StepInfo) -> _Fixed:
        del info
        return self


def _paced(pair: Pair, block_size: int | Pace | None, width: int, policy: Policy) -> Pace:
    if not isinstance(block_size, Pace):
        return _Fixed(inputs.check_block_size(pair, block_size, width))
    inputs.check_block_size(pair, block_size.largest, width)
    if not policy.invariant:
        raise errors.InputError(
            f"block_size: got a pace with policy {policy.name!r}, which judges whole blocks: its text would hang on "
            "how fast the machine is; give a number, or an invariant policy such as match()"
        )
    return block_size


def _room(pair: Pair, ids: tuple[int, ...], begun: int, budget: int) -> Room:
    """Return what a row may still emit: the rest of the budget or of the context, whichever ends first."""
    left = begun + budget - len(ids)
    space = pair.target.spec.max_context - len(ids)
    return Room(left, StopReason.MAX_NEW_TOKENS) if left <= space else Room(space, StopReason.CONTEXT)


def _reopened(state: DecodeState, pair: Pair) -> DecodeState:
    """Let rows go on that had only spent an earlier budget, unless it took them to the end of the context."""
    full = pair.target.spec.max_context
    stop = tuple(
        reason if reason is not StopReason.MAX_NEW_TOKENS else StopReason.CONTEXT if len(ids) >= full else None
        for ids, reason in zip(state.tokens, state.stop, strict=True)
    )
    return replace(state, stop=stop)


def _reserved(state: DecodeState, pair: Pair, budget: int) -> DecodeState:
    """Make room beforehand, so that the loop itself copies nothing."""
    longest = max(len(ids) for ids in state.tokens)
    capacity = min(longest + min(budget, RESERVE_AT_MOST), pair.target.spec.max_context) + 2 * state.width
    draft = pair.port.reserve(state.draft_cache, capacity) if pair.draft else None
    return replace(state, target_cache=pair.port.reserve(state.target_cache, capacity), draft_cache=draft)
