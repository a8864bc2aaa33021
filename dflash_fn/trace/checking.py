"""Replaying a trace, forced along its tokens, so that one difference does not bring about the next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dflash_fn import errors
from dflash_fn.judging import certain, judge
from dflash_fn.policies import Policy, match
from dflash_fn.records import Array, Branches, DecodeState, Pair, Proposal, StopReason
from dflash_fn.state_io import fingerprint_of
from dflash_fn.steps import Room, cut, select, verify
from dflash_fn.streams import numbers
from dflash_fn.trace.bounds import bounds_of
from dflash_fn.trace.comparing import Place
from dflash_fn.trace.looking import Look, heard_by, look, prefilled, view_start
from dflash_fn.trace.recording import backend_of
from dflash_fn.trace.records import RowStep, Trace
from dflash_fn.trace.remade import remade
from dflash_fn.trace.report import Deviation, Report, report_of
from dflash_fn.trace.rows import Found, compare_ends, compare_rows, compare_start
from dflash_fn.trace.summary import row_bits, view_cache

__all__ = ["check_trace"]


def check_trace(trace: Trace, pair: Pair, *, policy: Policy | None = None) -> Report:
    """Replay a trace on a pair, and compare everything that it holds.

    Every step starts from the recorded tokens: the draft is asked, and then the recorded block is verified and the
    recorded tokens are selected, whatever was found. Integers are compared exactly, numbers with the bounds of
    `dflash_fn.tolerances`, choices of tokens with regard to near ties.

    Args:
        trace: of `record`, `read_trace`, or another engine.
        pair: the same checkpoints, on any port and in any dtype.
        policy: the one that the trace was made with; None takes the policy with a name (`policies.named`) whose name
            and sampling the trace has.

    Raises:
        InputError: the pair has no draft where the trace has one, or the policy is another.
        StateFileError: the trace is of another pair, or of tokens that the pair does not have.
    """
    policy = _policy_of(trace, policy)
    _check_pair(trace, pair)
    same = (trace.port, trace.dtype) == (pair.port.name, pair.target.dtype)
    return report_of(
        _replay(trace, pair, policy),
        recorded=f"{trace.tool}, port {trace.port}, {trace.dtype} ({trace.backend}, {trace.device})",
        replayed=f"port {pair.port.name}, {pair.target.dtype} ({backend_of(pair)}, {pair.target.device})",
        steps=len(trace.steps),
        num_tokens=trace.num_tokens,
        comparable_bits=same,
    )


def _policy_of(trace: Trace, policy: Policy | None) -> Policy:
    known = policy or remade(trace) or match()
    if (known.name, known.streams) != (trace.policy, trace.streams):
        raise errors.InputError(
            f"check: the trace was made with policy {trace.policy!r} (streams: {', '.join(trace.streams) or 'none'}), "
            f"got {known.name!r}; hand over the one that it was made with"
        )
    return known


def _check_pair(trace: Trace, pair: Pair) -> None:
    if trace.drafts != (pair.draft is not None):
        raise errors.InputError(
            f"check: the trace was made {'with' if trace.drafts else 'without'} a draft, and the pair has "
            f"{'one' if pair.draft else 'none'}"
        )
    for role, model, theirs in (("target", pair.target, trace.target), ("draft", pair.draft, trace.draft)):
        if model is not None and theirs is not None and theirs != (mine := fingerprint_of(model, pair)):
            raise errors.StateFileError(
                f"the trace was made with another {role} (pair {trace.pair!r}, {role} digest {theirs}; "
                f"this pair's is {mine})"
            )
    highest = max(_highest_tokens(trace))
    if highest >= pair.target.spec.vocab_size:
        raise errors.StateFileError(
            f"the trace holds token {highest}; this target's ids end at {pair.target.spec.vocab_size - 1}"
        )


def _highest_tokens(trace: Trace) -> Iterator[int]:
    yield from map(max, trace.prompts)
    for row in (row for rows in trace.steps for row in rows if row):
        yield max(*row.block, row.next_token)
        for view in (row.draft_logits, row.target_logits):
            if view is not None and view.values.values.size:
                yield view.values.values.shape[1] - 1 if view.ids is None else int(view.ids.max())


def _replay(trace: Trace, pair: Pair, policy: Policy) -> Iterator[Deviation]:
    """Yield every comparison, in the order of the computation; end early where there is nothing to compare with."""
    bounds = bounds_of(pair, trace.dtype)
    state, features = prefilled(pair, trace.prompts, seed=trace.seed, width=trace.width, exact_rows=trace.exact_rows)
    yield from compare_start(trace.start, view_start(state, pair, features), bounds)
    for step, rows in enumerate(trace.steps):
        size = max(len(row.block) for row in rows if row)
        seen = look(state, pair, policy=policy, block_size=size)
        forced = _forced(state, trace, pair, policy, seen.proposal, _blocks(pair, rows, size))
        branches = verify(state, pair, forced)
        found = _found(state, pair, policy, seen, forced, branches, size)
        yield from compare_rows(step, rows, found, bounds, free=not trace.proposer, policy=policy)
        yield from _cuts(trace, pair, state, step, rows)
        if found.problem:
            yield Deviation("finite", step, 0, None, None, math.nan, 0.0, found.problem)
            return
        before, state = state, _selected(state, pair, forced, branches, rows)
        yield from compare_ends(
            step, rows, view_cache(pair.port, state.target_cache, pair.port.lengths(before.target_cache)), bounds
        )


def _blocks(pair: Pair, rows: tuple[RowStep | None, ...], size: int) -> Array:
    """Return the recorded drafted tokens [R, B - 1]; zeros in rows that had stopped."""
    drafted = [row.block[1:] if row else (0,) * (size - 1) for row in rows]
    return pair.port.asarray(np.array(drafted, dtype=np.int64).reshape(len(rows), size - 1), pair.target.device)


def _forced(state: DecodeState, trace: Trace, pair: Pair, policy: Policy, asked: Proposal, tokens: Array) -> Proposal:
    """Return what the draft was asked for with the recorded tokens in it, and the q that they were drawn from."""
    q = None
    if policy.needs_q and asked.logits is not None and not trace.proposer:
        drawn = numbers(state, pair, policy.drafting.streams, tokens.shape[1])
        _, q = policy.drafting.rule(pair.port.xp, asked.logits, drawn)
    return replace(asked, tokens=tokens, q=certain(pair, policy, tokens) if q is None else q)


def _found(
    state: DecodeState, pair: Pair, policy: Policy, seen: Look, forced: Proposal, branches: Branches, size: int
) -> Found:
    """Judge the recorded block, and fetch everything."""
    port, rows = pair.port, len(state.tokens)
    policy, heard = heard_by(policy)
    try:
        kept, problem = judge(state, pair, policy, forced, branches)[1], ""
    except errors.NonFiniteError as error:
        kept, problem = None, str(error)
    return Found(
        anchors=[ids[-1] for ids in state.tokens],
        seen=seen,
        drafted=port.to_numpy(seen.proposal.tokens).tolist(),
        logits=row_bits(port, branches.logits, [size] * rows),
        uniforms={stream: port.to_numpy(values) for stream, values in heard.items()},
        kept=kept,
        problem=problem,
    )


def _cuts(
    trace: Trace, pair: Pair, state: DecodeState, step: int, rows: tuple[RowStep | None, ...]
) -> Iterator[Deviation]:
    """Compare what was emitted with what stop tokens, budget and context leave of the recorded verdict."""
    for index, (row, ids, prompt) in enumerate(zip(rows, state.tokens, trace.prompts, strict=True)):
        if row:
            at, left = Place(step, index), len(prompt) + trace.max_new_tokens - len(ids)
            space = pair.target.spec.max_context - len(ids)
            room = Room(left, StopReason.MAX_NEW_TOKENS) if left <= space else Room(space, StopReason.CONTEXT)
            emitted, stop = cut(row.kept, frozenset(trace.stop_token_ids), room)
            yield at.exact("emitted", row.emitted, emitted)
            yield at.exact("stop", row.stop and row.stop.name, stop and stop.name)


def _selected(
    state: DecodeState, pair: Pair, forced: Proposal, branches: Branches, rows: tuple[RowStep | None, ...]
) -> DecodeState:
    emitted = [row.emitted if row else () for row in rows]
    return select(state, pair, forced, branches, emitted, [row.stop if row else None for row in rows])
