"""Looking at states: what prefill and `propose` make, fetched to the host, for recording and for checking alike.

Steps are functions, so a state can be looked at by calling `propose` on it; whoever steps it does the same again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash_fn.container import Bits
from dflash_fn.opening import prefill
from dflash_fn.policies import Policy
from dflash_fn.port import Port
from dflash_fn.records import Array, Cache, DecodeState, Model, Pair, Proposal, Proposer, Verdict
from dflash_fn.steps import propose
from dflash_fn.trace.records import CacheView, RowStart
from dflash_fn.trace.summary import floats, row_bits, summarize, view_cache

__all__ = ["Look", "heard_by", "look", "prefilled", "view_start"]


@dataclass(frozen=True, slots=True)
class Look:
    """What `propose` makes of a state, fetched to the host.

    Attributes:
        features: each row's pending context features; None where none are.
        draft_cache: each row of the draft's cache after it read them; None without a draft.
        draft_logits: each row's; None where no draft was asked.
        proposal: itself.
    """

    features: list[Bits] | None
    draft_cache: list[CacheView] | None
    draft_logits: list[Bits] | None
    proposal: Proposal


def look(state: DecodeState, pair: Pair, *, policy: Policy, block_size: int, proposer: Proposer | None = None) -> Look:
    """Propose, and keep what can be seen of it."""
    port, pending = pair.port, state.context_features
    proposal = propose(state, pair, policy=policy, block_size=block_size, proposer=proposer)
    rows, slots = proposal.tokens.shape
    return Look(
        features=row_bits(port, pending.values, pending.counts) if pending else None,
        draft_cache=view_cache(port, proposal.draft_cache, port.lengths(state.draft_cache)) if pair.draft else None,
        draft_logits=row_bits(port, proposal.logits, [slots] * rows) if proposal.logits is not None else None,
        proposal=proposal,
    )


def heard_by(policy: Policy) -> tuple[Policy, dict[str, Array]]:
    """Return a policy that says the same, and a dict that it fills with the uniforms that it is handed."""
    heard: dict[str, Array] = {}

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        heard.update(uniforms)
        return policy.rule(xp, drafted, logits, q, uniforms)

    return replace(policy, rule=rule), heard


@dataclass(frozen=True, slots=True)
class Listening:
    """A port that keeps the context features which it hands to the draft.

    Attributes:
        port: which does everything.
        heard: [count, L * H] of each call and row, in order.
    """

    port: Port
    heard: list[Bits]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)

    def draft_context(
        self, draft: Model[Any], cache: Cache, features: Array, counts: tuple[int, ...], *, exact_rows: bool
    ) -> Cache:
        """Keep the features, and do as the port does."""
        self.heard.extend(row_bits(self.port, features, counts))
        return self.port.draft_context(draft, cache, features, counts, exact_rows=exact_rows)


def prefilled(
    pair: Pair, prompts: tuple[tuple[int, ...], ...], *, seed: Sequence[int], width: int, exact_rows: bool
) -> tuple[DecodeState, list[np.ndarray] | None]:
    """Prefill, and return each row's context features [n - 1, L * H] too; None without a draft."""
    heard: list[Bits] = []
    listening: Any = Listening(pair.port, heard)
    state = prefill(replace(pair, port=listening), prompts, seed=seed, width=width, exact_rows=exact_rows)
    if pair.draft is None:
        return state, None
    size = len(pair.draft.spec.target_layer_ids) * pair.target.spec.hidden_size
    # prefill reads one row after the other
    read = np.concatenate([np.zeros((0, size), dtype=np.float32), *(floats(bits) for bits in heard)])
    ends = np.cumsum([len(ids) - 1 for ids in prompts])
    return state, np.split(read, ends[:-1])


def view_start(state: DecodeState, pair: Pair, features: list[np.ndarray] | None) -> tuple[RowStart, ...]:
    """Look at each row of a state that prefill made."""
    port, begins = pair.port, [0] * len(state.tokens)
    targets = view_cache(port, state.target_cache, begins)
    if pair.draft is None or features is None:
        return tuple(RowStart(view, None, None) for view in targets)
    size = pair.target.spec.hidden_size
    summaries = [summarize(known.reshape(len(known), known.shape[1] // size, size)) for known in features]
    drafts = view_cache(port, state.draft_cache, begins)
    return tuple(RowStart(*row) for row in zip(targets, summaries, drafts, strict=True))
