"""What is known of the policies that have names: for lists, and for who must choose one."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_fn.policies.named import POLICIES, named
from dflash_fn.sampling import Sampling

__all__ = ["About", "catalogue"]

WORDS = {
    "match": ("keep what the target itself draws; noise a token, shared with the draft", "2211.17192, 2408.07978"),
    "match-inverse": ("the same with one uniform a position", "2211.17192, section 2.2"),
    "token_rejection": ("keep x with probability min(1, p(x) / q(x))", "2211.17192, algorithm 1; 2302.01318"),
    "block_verification": ("judge the drafted tokens together", "2403.10444, algorithm 2"),
    "typical": ("keep what p finds likely enough for its entropy", "2401.10774, section 3.3"),
    "relaxed": ("keep what is among the best of p", "TensorRT-LLM, relaxed acceptance"),
}
"""By name: the rule in a few words, and its source (numbers are arXiv's)."""


@dataclass(frozen=True, slots=True)
class About:
    """What is known of a policy.

    Attributes:
        name: as `dflash_fn.policies.named` takes it.
        lossless: whether the text has the target's own law.
        invariant: whether the text itself is that of plain decoding with the same seed.
        needs_q: whether the rule reads the draft's distribution.
        rule: in a few words.
        source: paper and equation.
    """

    name: str
    lossless: bool
    invariant: bool
    needs_q: bool
    rule: str
    source: str


def catalogue(sampling: Sampling = Sampling(1.0)) -> tuple[About, ...]:  # noqa: B008 (a value)
    """Return what is known of all policies with names, under a sampling: the flags are those of the policies made.

    Example:
        >>> [about.name for about in catalogue() if not about.lossless]
        ['typical', 'relaxed']
    """
    made = {name: named(name, sampling) for name in POLICIES}
    return tuple(
        About(name, policy.lossless, policy.invariant, policy.needs_q, *WORDS[name]) for name, policy in made.items()
    )
