"""p and q in a trace: of the tokens that matter, exactly, however few logits are kept.

What is drawn from is a function of all V logits of a slot (a softmax divides by their sum, top-p ranks them), so it
cannot be worked out from the best few afterwards. It is taken from the port while they are all there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_fn.draws import one_hot
from dflash_fn.opinions import Opinions
from dflash_fn.policies import Policy
from dflash_fn.records import Array, DecodeState, Pair, Proposal
from dflash_fn.sampling import Sampling, probabilities
from dflash_fn.streams import numbers
from dflash_fn.trace.records import LawsView

__all__ = ["Laws", "laws_of", "view_laws"]

PLAIN = Sampling(1.0)


@dataclass(frozen=True, slots=True)
class Laws:
    """Probabilities of all V tokens in a block of B, on the host.

    Attributes:
        p: [R, B, V] what the target's tokens are drawn from.
        q: [R, B - 1, V] what the drafted ones were drawn from.
        target: [R, B, V] softmax of the target's logits.
        draft: [R, B - 1, V] of the draft's; None where no draft was asked.
    """

    p: np.ndarray
    q: np.ndarray
    target: np.ndarray
    draft: np.ndarray | None


def laws_of(state: DecodeState, pair: Pair, policy: Policy, proposal: Proposal, said: Opinions) -> Laws:
    """Return the laws of a block, as the port computes them.

    Args:
        state: before the step.
        pair: target, draft and port.
        policy: whose sampling and drafting they are.
        proposal: the block.
        said: what the target says of it.
    """
    port, xp = pair.port, pair.port.xp
    p = port.to_numpy(probabilities(xp, said.constrained, policy.sampling))
    target = port.to_numpy(probabilities(xp, said.logits, PLAIN))
    size = proposal.tokens.shape[1]
    if size == 0:
        return Laws(p, p[:, :0], target, None if proposal.logits is None else target[:, :0])
    if proposal.logits is None:
        return Laws(p, port.to_numpy(one_hot(xp, proposal.tokens, said.logits)), target, None)
    logits = proposal.logits[:, :size]
    draft = port.to_numpy(probabilities(xp, logits, PLAIN))
    return Laws(p, port.to_numpy(_drawn_from(state, pair, policy, proposal, logits)), target, draft)


def _drawn_from(state: DecodeState, pair: Pair, policy: Policy, proposal: Proposal, logits: Array) -> Array:
    """Return q whether the rule reads it or not: `propose` keeps it only for rules that do, and as they want it."""
    xp, drafting = pair.port.xp, policy.drafting.drawn_by or policy.drafting
    _, q = drafting.rule(xp, logits, numbers(state, pair, drafting.streams, logits.shape[1]))
    return one_hot(xp, proposal.tokens, logits) if q is None else q


def view_laws(laws: Laws, row: int, drafted: Sequence[int], kept: Sequence[int], top_k: int | None) -> LawsView:
    """Keep a row's probabilities of the `top_k` best of p and of q, of the drafted tokens and of the verdict's.

    Args:
        laws: of the block.
        row: whose.
        drafted: its B - 1 tokens.
        kept: the accepted ones and the next.
        top_k: None keeps all V.
    """
    p, q, target = laws.p[row], laws.q[row], laws.target[row]
    ids = _chosen(laws, row, drafted, kept, top_k)
    slots = np.arange(len(ids))[:, None]
    return LawsView(
        ids=ids,
        p=p[slots, ids],
        q=q[slots[:-1], ids[:-1]],
        target=target[slots, ids],
        draft=None if laws.draft is None else laws.draft[row][slots[:-1], ids[:-1]],
        overlap=np.minimum(p[:-1], q).sum(axis=-1),
    )


def _chosen(laws: Laws, row: int, drafted: Sequence[int], kept: Sequence[int], top_k: int | None) -> np.ndarray:
    """Return [B, m] tokens: all that are wanted in any slot, filled up with the next best of p."""
    p, q, target = laws.p[row], laws.q[row], laws.target[row]
    order = _ranked(p, target)
    if top_k is None or top_k >= p.shape[1]:
        return order
    wanted = [set(ids) for ids in order[:, :top_k].tolist()]
    others = _ranked(q, q if laws.draft is None else laws.draft[row])[:, :top_k].tolist()
    for tokens in (others, [[token] for token in drafted], [[token] for token in kept]):
        for found, more in zip(wanted, tokens, strict=False):
            found.update(more)
    size = max(map(len, wanted))
    for found, ids in zip(wanted, order[:, :size].tolist(), strict=True):
        found.update(itertools.islice((token for token in ids if token not in set(found)), size - len(found)))
    rows = [np.array(sorted(found)) for found in wanted]
    return np.stack([ids[_ranked(p[slot, ids], target[slot, ids])] for slot, ids in enumerate(rows)])


def _ranked(law: np.ndarray, then: np.ndarray) -> np.ndarray:
    """Return the ids of [..., V] probabilities, the largest first; among equals those that are larger in `then`."""
    return np.lexsort((-then, -law), axis=-1)
