"""The algorithm, as functions from records to records.

    step(state) = select(verify(state, propose(state)), policy's verdict)

`propose` lets the draft guess a block, `verify` describes every state that could follow, `select` takes one. Nothing
is undone, because nothing was done to the state that one started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_fn import errors, inputs
from dflash_fn.blocks import asked, check_block, check_counts
from dflash_fn.judging import certain, finite, judged_by
from dflash_fn.logprobs import logprobs_of
from dflash_fn.opinions import Opinions, opinions
from dflash_fn.origin import check_state, origin_of
from dflash_fn.policies import Policy
from dflash_fn.records import (
    Array,
    Branches,
    Cache,
    ContextFeatures,
    DecodeState,
    Pair,
    Proposal,
    Proposer,
    StepInfo,
    StopReason,
)
from dflash_fn.streams import Streams, numbers

__all__ = ["Room", "cut", "narrowed", "propose", "select", "step", "verify"]


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens a row may still emit.

    Attributes:
        tokens: the number.
        reason: why the row stops when they are spent.
    """

    tokens: int
    reason: StopReason


def propose(
    state: DecodeState,
    pair: Pair,
    *,
    policy: Policy | None = None,
    block_size: int | None = None,
    proposer: Proposer | None = None,
) -> Proposal:
    """Let the draft read the pending context features and guess the B - 1 tokens after each row's anchor.

    Args:
        state: where to go on from.
        pair: target, draft and port.
        policy: which says how the draft's tokens are drawn, and whether q is needed; None takes `policies.match()`,
            for which they are the draft's argmax.
        block_size: B; None takes the draft's. 1 drafts nothing, and so does a pair without a draft.
        proposer: a function to ask in place of the draft. Its tokens are a function of the state, so the q of each is
            1 at the token itself.

    Raises:
        InputError: B is above the state's width; the proposer returned another shape, another kind of array, or ids
            that the target does not have; the state is another pair's.
    """
    check_state(state, pair)
    inputs.check_proposer(proposer)
    policy = inputs.as_policy(policy)
    size = inputs.check_block_size(pair, block_size, state.width)
    cache = _absorbed(state, pair)
    if size == 1 or state.step == 0 or not (pair.draft or proposer):
        none = pair.port.asarray(np.zeros((len(state.tokens), 0), dtype=np.int64), pair.target.device)
        return Proposal(none, q=certain(pair, policy, none), draft_cache=cache)
    if proposer:
        # The proposer may ask the draft too, which has read everything by now.
        seen = replace(state, draft_cache=cache, context_features=None)
        tokens = asked(proposer, seen, pair, size)
        return Proposal(tokens, q=certain(pair, policy, tokens), draft_cache=cache)
    return _drafted(state, pair, policy, size, cache)


def verify(state: DecodeState, pair: Pair, proposal: Proposal) -> Branches:
    """Run the target once over the anchor and the drafted tokens, W slots wide whatever B is.

    Where a slot's bits do not hang on how many there are (`Model.narrows`), only B slots are run.

    Raises:
        InputError: the block is wider than the state, has other rows, or the state is another pair's.

    Guarantees:
        P01: `logits[r, i]` has the same bits whatever the tokens after slot i are, and whatever B and the slot are, as
            long as the keys and values of all slots are finite. A slot whose keys or values are not spoils the whole
            block: `step` then takes the block again without what was drafted.
    """
    check_state(state, pair)
    check_block(state, proposal)
    port = pair.port
    block = _padded(state, pair, proposal.tokens)
    taps = pair.draft.spec.target_layer_ids if pair.draft else ()
    made = port.target_pass(pair.target, state.target_cache, block, taps=taps, head=True, exact_rows=state.exact_rows)
    return Branches(made.logits, made.family, made.features)


def select(
    state: DecodeState,
    pair: Pair,
    proposal: Proposal,
    branches: Branches,
    emitted: Sequence[Sequence[int]],
    stop: Sequence[StopReason | None] | None = None,
) -> DecodeState:
    """Take the state after these tokens: of all that the verification describes, the one where they were emitted.

    Args:
        state: the state that was verified.
        pair: target, draft and port.
        proposal: its block.
        branches: what `verify` made of them.
        emitted: the tokens that each row gains, at most B; none leaves a row as it was.
        stop: why each row stops now; None where it goes on. Rows that had stopped stay so.

    Raises:
        InputError: more tokens than the block holds, other rows, or another pair's state.

    Guarantees:
        P02: `state` and every other record handed in stay valid, bit for bit.
        P03: states that are selected from one state do not see each other, whatever follows each of them.
    """
    check_state(state, pair)
    counts = tuple(len(tokens) for tokens in emitted)
    check_counts(state, proposal, counts)
    stop = stop or (None,) * len(counts)
    features = ContextFeatures(branches.features, counts) if pair.draft else None
    return DecodeState(
        tokens=tuple(old + tuple(new) for old, new in zip(state.tokens, emitted, strict=True)),
        target_cache=pair.port.select(branches.family, counts),
        draft_cache=proposal.draft_cache if pair.draft else None,
        context_features=features,
        step=state.step + 1,
        seed=state.seed,
        stop=tuple(old or new for old, new in zip(state.stop, stop, strict=True)),
        width=state.width,
        exact_rows=state.exact_rows,
        origin=origin_of(pair),
    )


def step(
    state: DecodeState,
    pair: Pair,
    *,
    policy: Policy,
    room: Sequence[Room],
    stop_token_ids: frozenset[int] = frozenset(),
    block_size: int | None = None,
    proposer: Proposer | None = None,
    logprobs: bool = False,
) -> tuple[DecodeState, StepInfo]:
    """Propose, verify, judge and select: one round for all rows that have not stopped.

    Where a block's target logits hold NaN or infinity, it is verified again without what was drafted, since a drafted
    token may be at fault. So the step emits what plain decoding emits there, or fails as it does.

    Args:
        state: where to go on from; stays valid.
        pair: target, draft and port.
        policy: which drafted tokens are kept, and what is emitted after them.
        room: how much each row may still emit, at least 1 for rows that go on.
        stop_token_ids: ids that end a row; the first of them in a block is its last token.
        block_size: see `propose`.
        proposer: see `propose`.
        logprobs: whether to report the log probabilities of what was emitted.

    Returns:
        the next state, and what there is to report.

    Raises:
        InputError: as in `propose`; what is no policy; a constraint that failed in a slot that a token is taken from.
        NonFiniteError: the draft's logits hold NaN or infinity, or the target's do with nothing drafted.
    """
    policy = inputs.as_policy(policy)
    proposal = propose(state, pair, policy=policy, block_size=block_size, proposer=proposer)
    judged = _judged(state, pair, policy, proposal)
    if judged is None:
        proposal = narrowed(proposal, 1)
        judged = _judged(state, pair, policy, proposal)
    assert judged is not None
    branches, heard, drafted, kept = judged
    cuts = [
        cut(tokens, stop_token_ids, limit) if reason is None else ((), None)
        for tokens, limit, reason in zip(kept, room, state.stop, strict=True)
    ]
    emitted, stop = tuple(tokens for tokens, _ in cuts), tuple(reason for _, reason in cuts)
    heard.check(state, emitted)
    info = StepInfo(
        step=state.step,
        block_size=proposal.tokens.shape[1] + 1,
        drafted=drafted,
        emitted=emitted,
        num_accepted=tuple(len(tokens) - 1 if tokens else None for tokens in emitted),
        logits=branches.logits,
        logprobs=logprobs_of(pair, policy, heard, emitted) if logprobs else None,
    )
    return select(state, pair, proposal, branches, emitted, stop), info


def _judged(
    state: DecodeState, pair: Pair, policy: Policy, proposal: Proposal
) -> tuple[Branches, Opinions, tuple[tuple[int, ...], ...], list[tuple[int, ...]]] | None:
    """Verify and judge a block; None where its logits are not finite and what was drafted may be why."""
    branches = verify(state, pair, proposal)
    heard = opinions(state, pair, policy, proposal, branches)
    try:
        return branches, heard, *judged_by(state, pair, policy, proposal, heard)
    except errors.NonFiniteError:
        if proposal.tokens.shape[1] == 0:
            raise
        return None


def narrowed(proposal: Proposal, block_size: int) -> Proposal:
    """Return the same block cut to `block_size` slots, the anchor included."""
    size = block_size - 1
    q = None if proposal.q is None else proposal.q[:, :size]
    return replace(proposal, tokens=proposal.tokens[:, :size], q=q)


def cut(tokens: Sequence[int], stop_token_ids: frozenset[int], room: Room) -> tuple[tuple[int, ...], StopReason | None]:
    """Return what a row may emit of these tokens, and why it stops, if it does.

    Example:
        >>> cut([5, 7, 9], frozenset({7}), Room(8, StopReason.MAX_NEW_TOKENS))
        ((5, 7), <StopReason.STOP_TOKEN: 'a stop token was emitted'>)
    """
    allowed = tuple(tokens[: room.tokens])
    for index, token in enumerate(allowed):
        if token in stop_token_ids:
            return allowed[: index + 1], StopReason.STOP_TOKEN
    return allowed, room.reason if len(allowed) == room.tokens else None


def _padded(state: DecodeState, pair: Pair, drafted: Array) -> Array:
    """Return the anchors, what was drafted, and the anchors again up to the width that is run: [R, W]."""
    size = drafted.shape[1]
    width = size + 1 if pair.target.narrows else state.width
    if size == 0:
        return _anchors(state, pair, width)
    anchors = _anchors(state, pair, 1)
    return pair.port.xp.concat([anchors, drafted, *[anchors] * (width - 1 - size)], axis=1)


def _anchors(state: DecodeState, pair: Pair, slots: int, *rest: int) -> Array:
    """Return each row's anchor `slots` times, and other tokens behind it."""
    tokens = [[*[ids[-1]] * slots, *rest] for ids in state.tokens]
    return pair.port.asarray(np.array(tokens, dtype=np.int64), pair.target.device)


def _absorbed(state: DecodeState, pair: Pair) -> Cache | None:
    """Return the draft's cache after it read the pending context features."""
    pending = state.context_features
    if pair.draft is None or pending is None:
        return state.draft_cache
    return pair.port.draft_context(
        pair.draft, state.draft_cache, pending.values, pending.counts, exact_rows=state.exact_rows
    )


def _drafted(state: DecodeState, pair: Pair, policy: Policy, size: int, cache: Cache) -> Proposal:
    assert pair.draft is not None
    xp, masks = pair.port.xp, (pair.draft.spec.mask_token_id,) * (size - 1)
    block = _anchors(state, pair, 1, *masks)
    logits = pair.port.draft_pass(pair.draft, pair.target, cache, block, exact_rows=state.exact_rows)
    drafting = policy.drafting
    uniforms = Streams(f"drafting {drafting.name!r}", numbers(state, pair, drafting.streams, size - 1))
    tokens, q = drafting.rule(xp, logits, uniforms)
    tokens = xp.astype(tokens, block.dtype)
    if q is None or not policy.needs_q:
        q = certain(pair, policy, tokens)
    return Proposal(tokens, q=q, draft_cache=cache, logits=logits, finite=finite(xp, logits))
