"""Typical acceptance: keep what the target finds likely enough. Not lossless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_fn import errors
from dflash_fn.checks import check_number
from dflash_fn.draws import draw, total
from dflash_fn.policies.base import Policy
from dflash_fn.policies.blocks import at_tokens, judged
from dflash_fn.records import Array, Verdict
from dflash_fn.sampling import Sampling, as_sampling, probabilities

__all__ = ["typical"]


def typical(sampling: Sampling = Sampling(1.0), *, epsilon: float = 0.09, delta: float | None = None) -> Policy:  # noqa: B008 (a value)
    """Return typical acceptance: keep drafted token x while p(x) > min(epsilon, delta * exp(-H(p))).

    H is the entropy of p in nats. After the kept tokens one is drawn from p, with the number of its position.

    Not lossless: a kept token is the draft's, not drawn from p; the more certain the draft, the further the law is from
    the target's.

    Args:
        sampling: what makes p of the target's logits; temperature 0 would make every p one-hot.
        epsilon: the bar where p is sharp, above 0 and below 1.
        delta: scales the bar where p is flat; None takes sqrt(epsilon).

    Raises:
        InputError: temperature 0, or a number out of range.

    Source:
        Cai et al. 2401.10774 (Medusa), section 3.3, whose epsilon and alpha are 0.09 and 0.3. Medusa keeps the first
        drafted token whatever its p, and takes the longest of several candidates; here every token passes the bar, and
        there is one block.
    """
    as_sampling(sampling)
    if sampling.temperature == 0:
        raise errors.InputError("typical: got temperature 0, where p has no entropy; give a temperature, or use match")
    epsilon = check_number("typical: epsilon", epsilon)
    if delta is not None:
        delta = check_number("typical: delta", delta)
    scale = max(epsilon, 0.0) ** 0.5 if delta is None else delta
    if not 0 < epsilon < 1 or not scale > 0:
        raise errors.InputError(
            f"typical: got epsilon {epsilon} and delta {scale}, expected 0 < epsilon < 1, delta > 0"
        )

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        del q
        p = probabilities(xp, logits, sampling)
        inside = xp.where(p > 0, p, xp.ones_like(p))
        bar = scale * xp.exp(total(xp, inside * xp.log(inside)))[:, :-1, 0]
        own = at_tokens(xp, p, drafted)
        return judged(xp, drafted, (own > bar) | (own > epsilon), draw(xp, p, uniforms["target"]))

    return Policy(
        f"typical {epsilon:g} {scale:g}, {sampling}", rule, lossless=False, streams=("target",), sampling=sampling
    )
