"""Log probabilities of emitted tokens, with the same bits whatever block a token was emitted in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dflash_fn.draws import total, wide
from dflash_fn.opinions import Opinions
from dflash_fn.policies import Policy
from dflash_fn.policies.blocks import at_tokens
from dflash_fn.records import Array, Pair, TokenLogprob
from dflash_fn.sampling import Sampling, weights

__all__ = ["logprobs_of"]

PLAIN = Sampling(1.0)


def logprobs_of(
    pair: Pair, policy: Policy, heard: Opinions, emitted: tuple[tuple[int, ...], ...]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Return one record a token, in the shape of `emitted`.

    Guarantees:
        P17: the numbers depend on the slot's logits, the token and the policy's sampling alone, bit for bit.
    """
    port, xp, size = pair.port, pair.port.xp, heard.logits.shape[1]
    padded = np.array([[*tokens, *[0] * (size - len(tokens))] for tokens in emitted], dtype=np.int64)
    tokens = port.asarray(padded, pair.target.device)
    own = weights(xp, heard.constrained, policy.sampling)
    parts = [_depth(xp, heard.logits, tokens), total(xp, weights(xp, heard.logits, PLAIN))]
    parts += [at_tokens(xp, own, tokens)[:, :, None], total(xp, own)]
    fetched = port.to_numpy(xp.concat(parts, axis=-1)).tolist()
    return tuple(
        tuple(_logprob(*fetched[row][slot]) for slot in range(len(row_tokens)))
        for row, row_tokens in enumerate(emitted)
    )


def _depth(xp: Any, logits: Array, tokens: Array) -> Array:
    """Return [R, n, 1], how far each token's logit is below the slot's largest."""
    x = wide(xp, logits)
    return at_tokens(xp, x, tokens)[:, :, None] - xp.max(x, axis=-1, keepdims=True)


def _logprob(depth: float, whole: float, weight: float, kept: float) -> TokenLogprob:
    # on the host, in float64: a library's logarithm may be off by a last place, this one is the same on all ports
    sampled = math.log(weight) - math.log(kept) if weight > 0 else -math.inf
    return TokenLogprob(depth - math.log(whole), sampled)
