"""How drafted tokens are drawn: alone, or from the target's own random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_fn.draws import draw, race, total
from dflash_fn.policies.base import ARGMAX, Drafting
from dflash_fn.records import Array
from dflash_fn.sampling import Sampling, weights

__all__ = ["inverse", "raced"]


def inverse(sampling: Sampling, stream: str = "draft") -> Drafting:
    """Draw each token from q by inverse transform.

    With stream `target` the draft uses the number that the target will use at the same position, and so guesses what
    it will draw; with stream `draft` it uses numbers of its own, as rules that need q must have it.
    """
    if sampling.temperature == 0:
        return ARGMAX

    def rule(xp: Any, logits: Array, uniforms: Mapping[str, Array]) -> tuple[Array, Array | None]:
        made = weights(xp, logits, sampling)
        return draw(xp, made, uniforms[stream]), made / total(xp, made)

    return Drafting(f"inverse transform, stream {stream}", rule, (stream,))


def raced(sampling: Sampling) -> Drafting:
    """Draw each token from q by the race that the target will run at the same position."""
    if sampling.temperature == 0:
        return ARGMAX

    def rule(xp: Any, logits: Array, uniforms: Mapping[str, Array]) -> tuple[Array, Array | None]:
        made = weights(xp, logits, sampling)
        return race(xp, made, uniforms["noise"]), made / total(xp, made)

    return Drafting("race, stream noise", rule, ("noise",))
