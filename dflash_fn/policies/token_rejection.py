"""Token rejection, the classic rule of speculative sampling: exact in law, one token after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_fn.draws import draw, total
from dflash_fn.policies.base import Policy, Rule
from dflash_fn.policies.blocks import at_slot, at_tokens, leading
from dflash_fn.policies.drafting import inverse
from dflash_fn.records import Array, Verdict
from dflash_fn.sampling import GREEDY, Sampling, as_sampling, probabilities

__all__ = ["by_rejection", "recovered", "token_rejection"]


def token_rejection(sampling: Sampling = GREEDY) -> Policy:
    """Return token rejection: keep drafted token x with probability min(1, p(x) / q(x)).

        keep while u[i] * q[i](x[i]) < p[i](x[i]);  then draw from max(p - q, 0) at the first rejected slot, or from
        p after a full acceptance

    The comparison is strict, so that a token of p = 0 is never kept. Where max(p - q, 0) is 0 everywhere, which exact
    arithmetic never reaches, the token is drawn from p.

    Args:
        sampling: what makes p of the target's logits and q of the draft's: the same for both.

    Guarantees:
        P13: the law of the text is the target's, worked out by enumeration.

    Source:
        Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2. No difference but in bookkeeping:
        the tests of all slots are made at once. A proposer's token counts as drawn from a q that is 1 at it, which is
        exact, for it is a function of the state.
    """
    as_sampling(sampling)

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        assert q is not None
        p = probabilities(xp, logits, sampling)
        q = xp.astype(q, p.dtype)
        u = xp.astype(uniforms["accept"], p.dtype)[:, :-1]
        kept = u * at_tokens(xp, q, drafted) < at_tokens(xp, p, drafted)
        num_accepted = leading(xp, kept, drafted)
        return recovered(xp, num_accepted, p, q, uniforms["recover"])

    return by_rejection("token_rejection", rule, sampling)


def by_rejection(name: str, rule: Rule, sampling: Sampling) -> Policy:
    """Return a lossless policy that judges draws of the draft's own against q, and draws anew after a rejection."""
    return Policy(
        f"{name}, {sampling}",
        rule,
        lossless=True,
        needs_q=True,
        streams=("accept", "recover"),
        sampling=sampling,
        drafting=inverse(sampling, "draft"),
        invariant=sampling.temperature == 0,
    )


def recovered(xp: Any, num_accepted: Array, p: Array, q: Array, u: Array) -> Verdict:
    """Draw what follows: from max(p - q, 0) at slot num_accepted, where q after the last drafted token is 0.

    Args:
        xp: the port's array namespace.
        num_accepted: [R].
        p: [R, B, V], each slot's up to a factor that q shares.
        q: [R, B - 1, V].
        u: [R, B], of which the slot's is used.
    """
    q = xp.concat([q, xp.zeros_like(p[:, :1, :])], axis=1)
    p_there, q_there = at_slot(xp, p, num_accepted), at_slot(xp, q, num_accepted)
    residual = xp.where(p_there > q_there, p_there - q_there, xp.zeros_like(p_there))
    residual = xp.where(total(xp, residual) > 0, residual, p_there)
    return Verdict(num_accepted, xp.astype(draw(xp, residual, at_slot(xp, u, num_accepted)), num_accepted.dtype))
