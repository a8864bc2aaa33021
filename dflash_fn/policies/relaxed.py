"""Relaxed acceptance: keep what is among the target's best. Not lossless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_fn.checks import check_count, check_number
from dflash_fn.draws import draw
from dflash_fn.policies.base import Policy
from dflash_fn.policies.blocks import at_tokens, judged
from dflash_fn.records import Array, Verdict
from dflash_fn.sampling import GREEDY, Sampling, as_sampling, probabilities, weights

__all__ = ["relaxed"]


def relaxed(sampling: Sampling = GREEDY, *, top_k: int = 10, delta: float = 0.6) -> Policy:
    """Return relaxed acceptance: keep drafted token x while it is among the top_k of p and p(x) >= max p - delta.

    p is taken before top-k, top-p and min-p, at temperature 1 where `sampling` is greedy. After the kept tokens comes
    the target's own choice. Not lossless: several tokens may pass, and the draft says which. With top_k = 1 at
    temperature 0 it is the match rule but for ties, all of which pass.

    Args:
        sampling: how the target's own choice is made.
        top_k: how many of the target's tokens pass, and all that tie with the last of them.
        delta: how far below the best a probability may be, from 0 to 1.

    Raises:
        InputError: a number out of range.

    Source:
        TensorRT-LLM's relaxed acceptance for multi-token prediction, there with 10 and 0.6 in DeepSeek-R1's thinking
        phase; here it holds for the whole text.
    """
    as_sampling(sampling)
    top_k, delta = check_count("relaxed: top_k", top_k, least=1), check_number("relaxed: delta", delta, 0, 1)
    plain = Sampling(sampling.temperature or 1.0)

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        del q
        p = probabilities(xp, logits, plain)
        own = at_tokens(xp, p, drafted)
        # the k-th largest of [R, B, V] is at place V - k in rising order
        bar = xp.sort(p, axis=-1)[:, :-1, max(p.shape[-1] - top_k, 0)]
        best = xp.max(p, axis=-1)[:, :-1]
        return judged(xp, drafted, (own >= bar) & (own >= best - delta) & (own > 0), choice(xp, logits, uniforms))

    def choice(xp: Any, logits: Array, uniforms: Mapping[str, Array]) -> Array:
        if sampling.temperature == 0:
            return xp.argmax(logits, axis=-1)
        return draw(xp, weights(xp, logits, sampling), uniforms["target"])

    streams = () if sampling.temperature == 0 else ("target",)
    name = f"relaxed {top_k} {delta:g}, {sampling}"
    return Policy(name, rule, lossless=False, streams=streams, sampling=sampling)
