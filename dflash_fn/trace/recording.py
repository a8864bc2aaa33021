"""Making a trace: decode as ever, and look at each state before its step and after it.

The looks take nothing from the loop and give nothing to it: steps are functions, so calling one twice is harmless.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from dflash_fn import errors, inputs
from dflash_fn.checks import check_count
from dflash_fn.judging import judged_by
from dflash_fn.loop import rounds
from dflash_fn.opinions import opinions
from dflash_fn.policies import Policy, match
from dflash_fn.records import Branches, DecodeState, Pair, Proposer, StepInfo
from dflash_fn.state_io import fingerprint_of
from dflash_fn.steps import narrowed
from dflash_fn.trace.laws import laws_of, view_laws
from dflash_fn.trace.looking import Look, heard_by, look, prefilled, view_start
from dflash_fn.trace.records import RowStep, Trace
from dflash_fn.trace.summary import digest_of, row_bits, view_cache, view_logits

__all__ = ["backend_of", "record"]


def record(
    state: DecodeState,
    pair: Pair,
    *,
    top_k: int | None = 8,
    policy: Policy | None = None,
    max_new_tokens: int = 256,
    stop_token_ids: int | Iterable[int] | None = None,
    block_size: int | None = None,
    proposer: Proposer | None = None,
) -> tuple[DecodeState, Trace]:
    """Decode, and keep what every step saw and made.

    Args:
        state: from `prefill` or `extend`, so that another port can make the same one from its tokens.
        pair: target, draft and port.
        top_k: how many of each slot's logits, and of its p and q, to keep, at least 2; None keeps all of them.
        policy: as `decode` takes it, like the arguments after it.
        max_new_tokens: budget of each row.
        stop_token_ids: ids that end a row.
        block_size: B.
        proposer: a function to ask in place of the draft; its tokens are kept, and the draft's logits are not there.

    Returns:
        what `decode` returns, with the same bits; and the trace.

    Raises:
        InputError: the state is not one to begin with, or an argument that `decode` refuses.
        NonFiniteError: a model's logits hold NaN or infinity.
    """
    if state.step:
        raise errors.InputError(
            f"record: got a state after {state.step} steps, expected one from prefill or extend, which another port "
            "can make from its tokens; prefill them anew"
        )
    if top_k is not None:
        check_count("top_k", top_k, least=2)
    policy, size = policy or match(), inputs.check_block_size(pair, block_size, state.width)
    stop_ids = inputs.as_stop_ids(pair, stop_token_ids)
    begun = _unfinished(state, pair, policy, size, max_new_tokens, stop_ids)
    steps = []
    seen = _lasting(look(state, pair, policy=policy, block_size=size, proposer=proposer))
    for after, info in rounds(
        state,
        pair,
        policy=policy,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_ids,
        block_size=size,
        proposer=proposer,
    ):
        steps.append(_rows(state, after, pair, policy, seen, info, top_k))
        state = after
        if not all(state.stop):
            seen = _lasting(look(state, pair, policy=policy, block_size=size, proposer=proposer))
    return state, replace(begun, proposer=proposer is not None, steps=tuple(steps))


def _lasting(seen: Look) -> Look:
    """Drop the proposal's cache: while it lives, the loop's own step would have to copy what it writes to."""
    return replace(seen, proposal=replace(seen.proposal, draft_cache=None))


def _rows(
    before: DecodeState,
    after: DecodeState,
    pair: Pair,
    policy: Policy,
    seen: Look,
    info: StepInfo,
    top_k: int | None,
) -> tuple[RowStep | None, ...]:
    """Return a step's rows: what was seen before it, what it reports, and what it led to."""
    port = pair.port
    policy, heard = heard_by(policy)
    proposal = narrowed(seen.proposal, info.block_size)
    said = opinions(before, pair, policy, proposal, Branches(info.logits, None, None))
    kept = judged_by(before, pair, policy, proposal, said)[1]
    laws = laws_of(before, pair, policy, proposal, said)
    logits = row_bits(port, info.logits, [info.block_size] * len(kept))
    caches = view_cache(port, after.target_cache, port.lengths(before.target_cache))
    uniforms = {stream: port.to_numpy(values).astype(np.float64) for stream, values in heard.items()}
    return tuple(
        RowStep(
            features=seen.features[row] if seen.features else None,
            features_digest=digest_of({"features": seen.features[row]}) if seen.features else None,
            draft_cache=seen.draft_cache[row] if seen.draft_cache else None,
            draft_logits=view_logits(seen.draft_logits[row], top_k) if seen.draft_logits else None,
            block=(before.tokens[row][-1], *info.drafted[row]),
            target_logits=view_logits(logits[row], top_k),
            uniforms={stream: values[row] for stream, values in uniforms.items()},
            num_accepted=len(kept[row]) - 1,
            next_token=kept[row][-1],
            emitted=info.emitted[row],
            stop=after.stop[row],
            target_cache=caches[row],
            laws=view_laws(laws, row, info.drafted[row], kept[row], top_k),
        )
        if before.stop[row] is None
        else None
        for row in range(len(kept))
    )


def _unfinished(
    state: DecodeState, pair: Pair, policy: Policy, size: int, budget: int, stop_ids: frozenset[int]
) -> Trace:
    from dflash_fn import __version__

    _, features = prefilled(pair, state.tokens, seed=state.seed, width=state.width, exact_rows=state.exact_rows)
    return Trace(
        tool=f"dflash_fn {__version__}",
        port=pair.port.name,
        backend=backend_of(pair),
        device=pair.target.device,
        dtype=pair.target.dtype,
        pair=pair.name,
        target=fingerprint_of(pair.target, pair),
        draft=fingerprint_of(pair.draft, pair) if pair.draft else None,
        drafts=pair.draft is not None,
        proposer=False,
        width=state.width,
        exact_rows=state.exact_rows,
        block_size=size,
        seed=state.seed,
        policy=policy.name,
        streams=policy.streams,
        max_new_tokens=budget,
        stop_token_ids=tuple(sorted(stop_ids)),
        prompts=state.tokens,
        start=view_start(state, pair, features),
        steps=(),
        sampling=str(policy.sampling),
        drafting=policy.drafting.name if pair.draft else None,
        lossless=policy.lossless,
    )


def backend_of(pair: Pair) -> str:
    """Return what computes: the array library with its version, the kind of machine, and how many threads."""
    info = pair.port.info()
    return f"{info.backend}, {platform.system()} {platform.machine()}, threads {info.threads}"
