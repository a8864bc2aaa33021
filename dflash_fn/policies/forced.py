"""Forced acceptance, to time steps of a given length. Not lossless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_fn.checks import check_count
from dflash_fn.policies.base import Policy
from dflash_fn.policies.blocks import judged
from dflash_fn.records import Array, Verdict

__all__ = ["forced"]


def forced(num_accepted: int) -> Policy:
    """Return a policy that keeps min(num_accepted, B - 1) drafted tokens whatever anyone thinks of them.

    After them comes the target's argmax. Not lossless at all: it is there for benchmarks, where it gives every tau its
    price, and for tests of what lies behind a policy.

    Raises:
        InputError: what is no integer of at least 0.
    """
    num_accepted = check_count("forced", num_accepted, least=0)

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        del q, uniforms
        slots = xp.cumulative_sum(xp.ones_like(drafted), axis=1)
        return judged(xp, drafted, slots <= num_accepted, xp.argmax(logits, axis=-1))

    return Policy(f"forced {num_accepted}", rule, lossless=False)
