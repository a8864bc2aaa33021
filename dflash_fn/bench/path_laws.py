"""How far a policy's text is from the target's law, along the path that it took: exactly where that can be said.

Two numbers. The **divergence** is the total variation between the law of the token that a judged slot emits, given the
text before it, and the target's p. It is 0 where a policy is lossless, which is proven by enumeration (P13) and not
measured. Where drafted tokens are a function of the text and the rule decides on them without chance, the law is known
too: all of it stands at a token that is kept, so the distance is 1 - p(x); what follows a rejection is drawn from p,
or is a function of the text itself, again at 1 - p(x). Other policies have none.

The **surprise** is measured for every policy: the mean over emitted tokens of -log p(x) - H(p). If each token has the
law p given the text before it, every term has mean 0 whatever came before: the terms are a martingale's differences.
Their variances are known too, sum p (log p)^2 - H^2, so the interval needs no repetition: 1.96 times the root of the
variances' sum. A surprise beyond it shows another law; one within it shows nothing, for laws may differ and agree in
this. The interval is the normal's, and -log p(x) is skewed: with a few hundred tokens it is a hint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dflash_fn.draws import draw
from dflash_fn.policies import Policy

__all__ = ["Seen", "divergences", "law_is_known", "surprises"]


NEAR = 1e-6
"""How near to a border of its intervals a draw in float32 may fall on the other side of it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A block as the rule saw it, one row, on the host.

    Attributes:
        drafted: B - 1 tokens.
        p: [B, V] what the target's tokens are drawn from, in float64.
        num_accepted: the verdict.
        next_token: the same.
        uniforms: [B] by stream.
        steady: whether the rule kept as many when asked with other numbers; None where it has none.
    """

    drafted: list[int]
    p: np.ndarray
    num_accepted: int
    next_token: int
    uniforms: Mapping[str, np.ndarray] = field(default_factory=dict)
    steady: bool | None = None

    @property
    def kept(self) -> list[int]:
        """The accepted tokens and the next."""
        return [*self.drafted[: self.num_accepted], self.next_token]


def law_is_known(policy: Policy) -> bool:
    """Whether `divergences` can say anything of a policy that is not lossless."""
    return not policy.drafting.streams and set(policy.streams) <= {"target"}


def divergences(policy: Policy, seen: Seen, count: int) -> list[float] | None:
    """Return how far the laws of the first `count` emitted tokens are from p, in total variation.

    Args:
        policy: for which `law_is_known`.
        seen: the block.
        count: how many of the kept tokens were emitted.

    Returns:
        numbers from 0 to 1, none for a token after the last drafted one. None where the block shows that the rule is
        not what the module's docstring supposes.
    """
    if seen.steady is False:
        return None
    found = [1.0 - float(seen.p[slot, token]) for slot, token in enumerate(seen.kept[:count])]
    if count > seen.num_accepted and "target" in policy.streams:
        slot = seen.num_accepted
        u = seen.uniforms["target"][slot] + np.array([-NEAR, 0.0, NEAR])
        if seen.next_token not in draw(np, np.stack([seen.p[slot]] * 3), np.clip(u, 0.0, 1.0)):
            return None
        found[slot] = 0.0
    return found[: len(seen.drafted)]


def surprises(seen: Seen, count: int) -> tuple[list[tuple[float, float]], int]:
    """Look at the first `count` kept tokens.

    Returns:
        -log p(x) - H(p) of each, and its variance under p; and how many have p = 0 and are left out.
    """
    found, impossible = [], 0
    for slot, token in enumerate(seen.kept[:count]):
        own = float(seen.p[slot, token])
        if own > 0:
            inside = seen.p[slot][seen.p[slot] > 0]
            logs = np.log(inside)
            entropy = -float((inside * logs).sum())
            found.append((-float(np.log(own)) - entropy, float((inside * logs * logs).sum()) - entropy**2))
        else:
            impossible += 1
    return found, impossible
