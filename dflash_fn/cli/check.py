"""Decoding the same prompt with and without the draft, and comparing every bit of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dflash_fn.cli.answer import Answer, decode_answer, opened

if TYPE_CHECKING:
    from dflash_fn.policies import Policy
    from dflash_fn.records import DecodeState, Pair, Proposer

__all__ = ["INTERRUPTED", "Check", "NotChecked", "check_against_plain", "compare", "nothing_to_check", "warm_up"]

INTERRUPTED = "Ctrl-C came first"


@dataclass(frozen=True, slots=True)
class Check:
    """How an answer compares with what the target alone makes of the same prompt at the same width.

    Attributes:
        tokens_identical: whether the token ids are.
        logits_identical: whether the logits that each token was chosen from are, bit for bit.
        first_difference: index of the first token whose id or logits differ; None if there is none.
        baseline_tokens_per_s: of the target alone.
        speedup: tokens per second with the draft over those without; None where either has no figure.
    """

    tokens_identical: bool
    logits_identical: bool
    first_difference: int | None
    baseline_tokens_per_s: float | None
    speedup: float | None

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return self.tokens_identical and self.logits_identical


@dataclass(frozen=True, slots=True)
class NotChecked:
    """That nothing was compared, which must not look as if nothing differed.

    Attributes:
        reason: why, as the end of a sentence.
    """

    reason: str


def nothing_to_check(answer: Answer, *, block_size: int) -> NotChecked | None:
    """Return why a comparison would say nothing: no token of the answer was drafted, so the draft changed none."""
    if answer.interrupted:
        return NotChecked(INTERRUPTED)
    if not answer.tokens:
        return NotChecked("no token was decoded")
    if block_size == 1:
        return NotChecked("a block of 1 drafts nothing")
    if not answer.summary.steps:
        return NotChecked("the answer has one token, and the first is never drafted")
    return None


def warm_up(
    state: DecodeState, pair: Pair, *, block_size: int, policy: Policy | None = None, proposer: Proposer | None = None
) -> None:
    """Decode a little and drop it (states are values), so that what only a first step costs is in neither figure."""
    from dflash_fn import decode

    decode(state, pair, policy=policy, max_new_tokens=block_size + 1, block_size=block_size, proposer=proposer)


def check_against_plain(
    pair: Pair,
    prompt: str | list[int],
    answer: Answer,
    *,
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...] | None = None,
    policy: Policy | None = None,
) -> Check:
    """Decode without the draft and compare.

    Raises:
        KeyboardInterrupt: half a comparison says nothing, so Ctrl-C is passed on.
    """
    plain = replace(pair, draft=None)
    state, seconds = opened(plain, prompt, seed=answer.state.seed[0], width=answer.state.width)
    baseline = decode_answer(
        state,
        plain,
        max_new_tokens=max_new_tokens,
        block_size=1,
        seconds=seconds,
        digests=True,
        stop_token_ids=stop_token_ids,
        policy=policy,
    )
    if baseline.interrupted:
        raise KeyboardInterrupt
    return compare(answer, baseline)


def compare(answer: Answer, baseline: Answer) -> Check:
    """Compare two answers that kept their digests."""
    ours, theirs = answer.tokens_per_s, baseline.tokens_per_s
    tokens, logits = first_unequal(answer.tokens, baseline.tokens), first_unequal(answer.digests, baseline.digests)
    found = [index for index in (tokens, logits) if index is not None]
    return Check(
        tokens_identical=tokens is None,
        logits_identical=logits is None,
        first_difference=min(found, default=None),
        baseline_tokens_per_s=theirs,
        speedup=ours / theirs if ours and theirs else None,
    )


def first_unequal(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Return the first index at which two sequences differ, or where the shorter ends; None if they are equal.

    Example:
        >>> first_unequal("abc", "abd"), first_unequal("ab", "abc"), first_unequal("ab", "ab")
        (2, 2, None)
    """
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
