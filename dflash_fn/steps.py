"""The algorithm, as functions from records to records.

    step(state) = select(verify(state, propose(state)), policy's verdict)

`prefill` and `extend` make a state, `propose` lets the draft guess a block, `verify` describes every state that
could follow, `select` takes one. Nothing is undone, because nothing was done to the state that one started from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_fn import errors, inputs, rng
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
    Verdict,
)

__all__ = ["Room", "extend", "prefill", "propose", "select", "step", "verify"]

LEAST_CHUNK = 8
"""The shortest prefill chunk; shorter remainders are padded to it."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens a row may still emit.

    Attributes:
        tokens: the number.
        reason: why the row stops when they are spent.
    """

    tokens: int
    reason: StopReason


def prefill(
    pair: Pair,
    prompts: inputs.Prompts,
    *,
    seed: int | Sequence[int] = 0,
    width: int | None = None,
    exact_rows: bool = False,
) -> DecodeState:
    """Read prompts and return the state from which decoding starts.

    Every token but the last of each prompt goes into the caches, in chunks whose size and place depend only on the
    position: whole chunks of `port.prefill_width`, then one that is padded to a power of two. So the same tokens
    give the same bits, whether they come at once or by `extend`.

    Args:
        pair: target, draft and port.
        prompts: text or token ids; one prompt, or one a row. Text goes through the tokenizer as it is (no chat
            template; see `dflash_fn.text.chat_prompt`).
        seed: from 0 to 2**64 - 1; one for all rows or one a row.
        width: rows W of every verification, at least the block size one will decode with; None takes the draft's
            block size, 1 without a draft.
        exact_rows: compute several rows so that each has the bits of its single-row run; slower on a CPU in float32.
            Tokens do not depend on neighbours either way, except where two logits tie within rounding.

    Raises:
        InputError: an empty prompt, one that leaves no room in the context, an unknown id, a bad width or seed.

    Guarantees:
        P06: a row's tokens equal those of its single-row run.
    """
    rows = inputs.as_rows(pair, prompts)
    inputs.check_fit(pair, rows)
    width = inputs.check_width(pair, width)
    seeds = inputs.as_seeds(seed, len(rows))
    made = [_read(pair, ids, *_empty_caches(pair, len(ids) + width)) for ids in rows]
    return _opening(pair, rows, made, seeds, width, exact_rows)


def extend(state: DecodeState, pair: Pair, tokens: inputs.Prompts) -> DecodeState:
    """Add tokens to a state, such as a user's next turn, exactly as if they had been in the prompt.

    The state goes back to its last whole prefill chunk and reads from there: the answer since then, and the new
    tokens. What decoding left in the caches is not reused, since its bits are those of another shape.

    Args:
        state: any state; it stays valid.
        pair: the pair that it was made with.
        tokens: token ids (or text) to add; with several rows, one sequence a row, of which some may be empty.

    Raises:
        InputError: nothing to add, another number of rows, an unknown id, or no room in the context.

    Guarantees:
        P05: `extend(state, pair, t)` equals `prefill(pair, state.tokens + t)` with the state's seed, bit for bit.
    """
    added = inputs.as_rows(pair, tokens) if len(tokens) else ()
    if len(added) != len(state.tokens) or not any(added):
        raise errors.InputError(
            f"extend: got tokens for {len(added)} rows, expected at least one token, "
            f"and one sequence for each of the state's {len(state.tokens)} rows"
        )
    rows = tuple(old + new for old, new in zip(state.tokens, added, strict=True))
    inputs.check_fit(pair, rows)
    made = [_read(pair, ids, *caches) for ids, caches in zip(rows, _rewound(state, pair), strict=True)]
    return _opening(pair, rows, made, state.seed, state.width, state.exact_rows)


def propose(
    state: DecodeState, pair: Pair, *, block_size: int | None = None, proposer: Proposer | None = None
) -> Proposal:
    """Let the draft read the pending context features and guess the B - 1 tokens after each row's anchor.

    Args:
        state: where to go on from.
        pair: target, draft and port.
        block_size: B; None takes the draft's. 1 drafts nothing, and so does a pair without a draft.
        proposer: a function to ask in place of the draft.

    Raises:
        InputError: B is above the state's width, or the proposer returned another shape.
    """
    size = inputs.check_block_size(pair, block_size, state.width)
    cache = _absorbed(state, pair)
    if size == 1 or state.step == 0 or not (pair.draft or proposer):
        none = pair.port.asarray(np.zeros((len(state.tokens), 0), dtype=np.int64), pair.target.device)
        return Proposal(none, draft_cache=cache)
    if proposer:
        return Proposal(_asked(proposer, state, pair, size), draft_cache=cache)
    return _drafted(state, pair, size, cache)


def verify(state: DecodeState, pair: Pair, proposal: Proposal) -> Branches:
    """Run the target once over the anchor and the drafted tokens, W slots wide whatever B is.

    Guarantees:
        P01: `logits[r, i]` has the same bits whatever the tokens after slot i are, and whatever B and the slot are.
    """
    port, xp = pair.port, pair.port.xp
    anchors = _anchors(state, pair)
    padding = [anchors] * (state.width - 1 - proposal.tokens.shape[1])
    block = xp.concat([anchors, proposal.tokens, *padding], axis=1)
    taps = pair.draft.spec.target_layer_ids if pair.draft else ()  # pyright: ignore[reportAttributeAccessIssue]
    made = port.target_pass(
        pair.target, state.target_cache, block, taps=taps, head=True, exact_rows=state.exact_rows
    )
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

    Guarantees:
        P02: `state` and every other record handed in stay valid, bit for bit.
    """
    counts = tuple(len(tokens) for tokens in emitted)
    stop = stop or (None,) * len(counts)
    features = ContextFeatures(branches.features, counts) if pair.draft else None
    return DecodeState(
        tokens=tuple(old + tuple(new) for old, new in zip(state.tokens, emitted, strict=True)),
        target_cache=pair.port.select(branches.family, counts),
        draft_cache=proposal.draft_cache,
        context_features=features,
        step=state.step + 1,
        seed=state.seed,
        stop=tuple(old or new for old, new in zip(state.stop, stop, strict=True)),
        width=state.width,
        exact_rows=state.exact_rows,
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
) -> tuple[DecodeState, StepInfo]:
    """Propose, verify, judge and select: one round for all rows that have not stopped.

    Args:
        state: where to go on from; stays valid.
        pair: target, draft and port.
        policy: which drafted tokens are kept, and what is emitted after them.
        room: how much each row may still emit, at least 1 for rows that go on.
        stop_token_ids: ids that end a row; the first of them in a block is its last token.
        block_size: see `propose`.
        proposer: see `propose`.

    Returns:
        the next state, and what there is to report.

    Raises:
        NonFiniteError: the target's or the draft's logits hold NaN or infinity.
    """
    proposal = propose(state, pair, block_size=block_size, proposer=proposer)
    branches = verify(state, pair, proposal)
    drafted, kept = _judged(state, pair, policy, proposal, branches)
    cuts = [
        cut(tokens, stop_token_ids, limit) if reason is None else ((), None)
        for tokens, limit, reason in zip(kept, room, state.stop, strict=True)
    ]
    emitted, stop = tuple(tokens for tokens, _ in cuts), tuple(reason for _, reason in cuts)
    info = StepInfo(
        step=state.step,
        block_size=proposal.tokens.shape[1] + 1,
        drafted=drafted,
        emitted=emitted,
        num_accepted=tuple(len(tokens) - 1 if tokens else None for tokens in emitted),
        logits=branches.logits,
    )
    return select(state, pair, proposal, branches, emitted, stop), info


def cut(
    tokens: Sequence[int], stop_token_ids: frozenset[int], room: Room
) -> tuple[tuple[int, ...], StopReason | None]:
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


def _judged(
    state: DecodeState, pair: Pair, policy: Policy, proposal: Proposal, branches: Branches
) -> tuple[tuple[tuple[int, ...], ...], list[tuple[int, ...]]]:
    """Return drafted tokens and kept tokens (the extra one included) a row, fetched from the device at once."""
    xp, size = pair.port.xp, proposal.tokens.shape[1] + 1
    logits = branches.logits[:, :size]
    verdict = policy.rule(xp, proposal.tokens, logits, proposal.q, _uniforms(state, pair, policy, size))
    columns = [
        proposal.tokens,
        verdict.num_accepted[:, None],
        verdict.next_token[:, None],
        xp.astype(_finite(xp, logits), proposal.tokens.dtype)[:, None],
    ]
    if proposal.finite is not None:
        columns.append(xp.astype(proposal.finite, proposal.tokens.dtype)[:, None])
    fetched = pair.port.to_numpy(xp.concat(columns, axis=1)).tolist()
    _check_finite(state, pair, [row[size + 1 :] for row in fetched])
    drafted = tuple(tuple(row[: size - 1]) for row in fetched)
    return drafted, [(*row[: row[size - 1]], row[size]) for row in fetched]


def _uniforms(state: DecodeState, pair: Pair, policy: Policy, size: int) -> Mapping[str, Array]:
    """Return [R, B] numbers for each stream that the policy names."""
    made = {}
    for name in policy.streams:
        stream = rng.Stream[name.upper()]
        rows = []
        for seed, tokens in zip(state.seed, state.tokens, strict=True):
            first = len(tokens) if stream is rng.Stream.TARGET else state.step << 32
            rows.append(rng.uniforms(seed, stream, first + np.arange(size)))
        made[name] = pair.port.asarray(np.stack(rows), pair.target.device)
    return made


def _finite(xp: object, logits: Array) -> Array:
    """[R] booleans; the maximum of a slot is NaN or infinite exactly where something that matters is."""
    return xp.all(xp.isfinite(xp.max(logits, axis=-1)), axis=-1)  # pyright: ignore[reportAttributeAccessIssue]


def _check_finite(state: DecodeState, pair: Pair, flags: list[list[int]]) -> None:
    for row, (reason, found) in enumerate(zip(state.stop, flags, strict=True)):
        for model, name, fine in zip((pair.target, pair.draft), ("target", "draft"), found, strict=False):
            if reason is None and model and not fine:
                raise errors.NonFiniteError(
                    f"row {row}, step {state.step}: the {name}'s logits hold NaN or infinity "
                    f"(port {pair.port.name}, {model.dtype}); "
                    + ("load the pair in bfloat16 or float32" if model.dtype == "float16" else "check the weights")
                )


def _anchors(state: DecodeState, pair: Pair) -> Array:
    return pair.port.asarray(np.array([[ids[-1]] for ids in state.tokens], dtype=np.int64), pair.target.device)


def _absorbed(state: DecodeState, pair: Pair) -> Cache | None:
    """Return the draft's cache after it read the pending context features."""
    pending = state.context_features
    if pair.draft is None or pending is None:
        return state.draft_cache
    return pair.port.draft_context(
        pair.draft, state.draft_cache, pending.values, pending.counts, exact_rows=state.exact_rows
    )


def _drafted(state: DecodeState, pair: Pair, size: int, cache: Cache) -> Proposal:
    assert pair.draft is not None
    xp, masks = pair.port.xp, np.full((len(state.tokens), size - 1), pair.draft.spec.mask_token_id)  # pyright: ignore[reportAttributeAccessIssue]
    block = xp.concat([_anchors(state, pair), pair.port.asarray(masks, pair.target.device)], axis=1)
    logits = pair.port.draft_pass(pair.draft, pair.target, cache, block, exact_rows=state.exact_rows)
    tokens = xp.astype(xp.argmax(logits, axis=-1), block.dtype)
    return Proposal(tokens, draft_cache=cache, finite=_finite(xp, logits))


def _asked(proposer: Proposer, state: DecodeState, pair: Pair, size: int) -> Array:
    tokens = proposer(state, pair, size)
    expected = (len(state.tokens), size - 1)
    if tuple(tokens.shape) != expected:
        raise errors.InputError(f"proposer: got tokens of shape {tuple(tokens.shape)}, expected {expected}")
    return tokens


def _empty_caches(pair: Pair, capacity: int) -> tuple[Cache, Cache | None]:
    draft = pair.port.new_cache(pair.draft, capacity) if pair.draft else None
    return pair.port.new_cache(pair.target, capacity), draft


def _rewound(state: DecodeState, pair: Pair) -> list[tuple[Cache, Cache | None]]:
    """Return each row's caches at its last whole prefill chunk."""
    port = pair.port
    targets = [port.rewind(cache) for cache in port.split_rows(state.target_cache)]
    if pair.draft is None:
        return [(cache, None) for cache in targets]
    return list(zip(targets, (port.rewind(cache) for cache in port.split_rows(state.draft_cache)), strict=True))


def _read(pair: Pair, ids: tuple[int, ...], target: Cache, draft: Cache | None) -> tuple[Cache, Cache | None]:
    """Read a row's tokens but the last, from where the caches stand, a chunk at a time."""
    port, size = pair.port, pair.port.prefill_width
    (start,) = port.lengths(target)
    for first in range(start, len(ids) - 1, size):
        chunk = ids[first : min(first + size, len(ids) - 1)]
        target, draft = _read_chunk(pair, chunk, target, draft)
        if len(chunk) == size:
            target, draft = port.mark(target), port.mark(draft) if pair.draft else None
    return target, draft


def _read_chunk(
    pair: Pair, chunk: tuple[int, ...], target: Cache, draft: Cache | None
) -> tuple[Cache, Cache | None]:
    port, count = pair.port, len(chunk)
    padded = max(LEAST_CHUNK, 1 << (count - 1).bit_length())
    tokens = port.asarray(np.array([[*chunk, *[chunk[-1]] * (padded - count)]], dtype=np.int64), pair.target.device)
    taps = pair.draft.spec.target_layer_ids if pair.draft else ()  # pyright: ignore[reportAttributeAccessIssue]
    made = port.target_pass(pair.target, target, tokens, taps=taps, head=False, exact_rows=False)
    if pair.draft:
        draft = port.draft_context(pair.draft, draft, made.features, (count,), exact_rows=False)
    return port.select(made.family, (count,)), draft


def _opening(
    pair: Pair,
    rows: tuple[tuple[int, ...], ...],
    made: Sequence[tuple[Cache, Cache | None]],
    seeds: tuple[int, ...],
    width: int,
    exact_rows: bool,
) -> DecodeState:
    return DecodeState(
        tokens=rows,
        target_cache=pair.port.join_rows(tuple(target for target, _ in made)),
        draft_cache=pair.port.join_rows(tuple(draft for _, draft in made)) if pair.draft else None,
        context_features=None,
        step=0,
        seed=seeds,
        stop=(None,) * len(rows),
        width=width,
        exact_rows=exact_rows,
    )
