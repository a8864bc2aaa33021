"""Block verification: exact in law like token rejection, and never accepts less on average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_fn.draws import total
from dflash_fn.policies.base import Policy
from dflash_fn.policies.blocks import at_tokens
from dflash_fn.policies.token_rejection import by_rejection, recovered
from dflash_fn.records import Array, Verdict
from dflash_fn.sampling import GREEDY, Sampling, as_sampling, probabilities

__all__ = ["block_verification", "carried"]


def block_verification(sampling: Sampling = GREEDY) -> Policy:
    """Return block verification: judge the drafted tokens together and keep the longest prefix that passes.

        c[0] = 1,  c[i] = min(1, c[i-1] * p[i-1](x[i-1]) / q[i-1](x[i-1]))    after i drafted tokens
        S[i] = sum_v max(c[i] * p[i](v) - q[i](v), 0)
        h[i] = S[i] / (S[i] + 1 - c[i]) for i < B - 1,  h[B-1] = c[B-1]
        keep the largest i with u[i-1] < h[i];  then draw from max(c[i] * p[i] - q[i], 0), or from p after all of them

    A prefix that token rejection would drop at an unlikely token may be kept because what follows it makes up for it.
    Where S[i] = 0 and c[i] = 1, p and q agree and h[i] is 1.

    Args:
        sampling: what makes p of the target's logits and q of the draft's: the same for both.

    Guarantees:
        P13: the law of the text is the target's, worked out by enumeration.
        P14: mean num_accepted is never below token rejection's.

    Source:
        Sun et al. 2403.10444, algorithm 2 and equations 3 and 4, whose p_i is c[i] here. `u < h` in place of
        `u <= h`, for u is in [0, 1).
    """
    as_sampling(sampling)

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        assert q is not None
        p = probabilities(xp, logits, sampling)
        q = xp.astype(q, p.dtype)
        c, h = carried(xp, drafted, p, q)
        passed = xp.astype(xp.astype(uniforms["accept"], p.dtype)[:, :-1] < h, drafted.dtype)
        # the largest index that passed: how many slots have one at or after them
        later = [xp.max(passed[:, i:], axis=-1, keepdims=True) for i in range(drafted.shape[1])]
        none = xp.zeros_like(xp.astype(c[:, :1], drafted.dtype))
        num_accepted = xp.sum(xp.concat([none, *later], axis=1), axis=1, dtype=drafted.dtype)
        weighed = xp.concat([c[:, :-1, None] * p[:, :-1, :], p[:, -1:, :]], axis=1)
        return recovered(xp, num_accepted, weighed, q, uniforms["recover"])

    return by_rejection("block_verification", rule, sampling)


def carried(xp: Any, drafted: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """Return c [R, B], which the docstring above defines, and h [R, B - 1] after 1 to B - 1 drafted tokens."""
    own_p, own_q = at_tokens(xp, p, drafted), at_tokens(xp, q, drafted)
    c = [xp.ones_like(p[:, :1, 0])]
    for i in range(drafted.shape[1]):
        up = c[-1] * own_p[:, i : i + 1]
        one, below = xp.ones_like(up), up < own_q[:, i : i + 1]
        # at or above q the ratio is 1; but a token of p = 0 is never kept, not even where q is 0 too
        capped = xp.where(up > 0, one, xp.zeros_like(up))
        c.append(xp.where(below, up / xp.where(below, own_q[:, i : i + 1], one), capped))
    carry = xp.concat(c, axis=1)
    if drafted.shape[1] == 0:
        return carry, own_p
    inner = carry[:, 1:-1]
    gain = inner[:, :, None] * p[:, 1 : drafted.shape[1], :] - q[:, 1:, :]
    mass = total(xp, xp.where(gain > 0, gain, xp.zeros_like(gain)))[:, :, 0]
    slack = mass + (1.0 - inner)
    h = xp.where(slack > 0, mass / xp.where(slack > 0, slack, xp.ones_like(slack)), xp.ones_like(slack))
    return carry, xp.concat([h, carry[:, -1:]], axis=1)
