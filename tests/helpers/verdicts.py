"""Every kind of policy, blocks to ask it about, and its verdicts on any array library."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_fn import policies
from dflash_fn.policies import Policy, match
from dflash_fn.rng import Stream, uniforms, words
from dflash_fn.sampling import Sampling

__all__ = ["KINDS", "some_blocks", "verdicts"]

KINDS = {
    "greedy": match(),
    "inverse": match(Sampling(0.8), noise="inverse"),
    "gumbel": match(Sampling(0.8, top_p=0.9)),
    "token_rejection": policies.token_rejection(Sampling(1.0)),
    "block_verification": policies.block_verification(Sampling(1.0)),
    "typical": policies.typical(Sampling(1.0)),
    "relaxed": policies.relaxed(top_k=3),
    "forced": policies.forced(2),
    "budget": policies.budget(policies.block_verification(Sampling(1.0)), 2),
    "cut": policies.confidence_cut(policies.token_rejection(Sampling(1.0)), 0.3),
}


def some_blocks(rows: int, size: int, vocab: int) -> dict[str, np.ndarray]:
    """Return random blocks of a draft that is near the target, by the name of each array."""
    rng = np.random.default_rng([rows, size, vocab])
    logits = rng.normal(size=(rows, size, vocab)).astype(np.float32) * 2
    near = np.exp(logits[:, :-1] + rng.normal(size=(rows, size - 1, vocab)).astype(np.float32))
    slots = np.arange(rows * size).reshape(rows, size)
    return {
        "drafted": logits[:, :-1].argmax(axis=-1) if size > 1 else np.zeros((rows, 0), dtype=np.int64),
        "logits": logits,
        "q": (near / near.sum(axis=-1, keepdims=True)).astype(np.float32),
        "target": uniforms(2, Stream.TARGET, slots.ravel()).reshape(rows, size),
        "accept": uniforms(2, Stream.ACCEPT, slots.ravel()).reshape(rows, size),
        "recover": uniforms(2, Stream.RECOVER, slots.ravel()).reshape(rows, size),
        "noise": words(2, Stream.NOISE, slots.ravel()).reshape(rows, size, 2),
    }


def verdicts(policy: Policy, xp: Any, blocks: dict[str, Any], fetch: Any = np.asarray) -> list[list[int]]:
    """Ask a policy; `blocks` are of xp's library, and `fetch` brings arrays to the host."""
    numbers = {name: blocks[name] for name in policy.streams}
    q = blocks["q"] if policy.needs_q else None
    made = policy.rule(xp, blocks["drafted"], blocks["logits"], q, numbers)
    return [fetch(array).tolist() for array in (made.num_accepted, made.next_token)]
