"""The match rule: keep drafted tokens for as long as they are the target's own choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from dflash_fn import errors
from dflash_fn.draws import draw, race
from dflash_fn.policies.base import ARGMAX, Drafting, Policy
from dflash_fn.policies.blocks import judged
from dflash_fn.policies.drafting import inverse, raced
from dflash_fn.records import Array, Verdict
from dflash_fn.sampling import GREEDY, Sampling, as_sampling, weights

__all__ = ["Drafts", "Noise", "match"]

Noise: TypeAlias = Literal["inverse", "gumbel"]
"""How a position's token is drawn from p: by inverse transform of one uniform, or by Gumbel-max with noise a token."""

Drafts: TypeAlias = Literal["shared", "independent", "argmax"]
"""How the draft guesses: from the target's own random numbers, from numbers of its own, or its most probable token."""


def greedy_match(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
    """num_accepted = max {n : drafted[i] = argmax logits[i] for all i < n}; next_token = argmax logits[num_accepted].

    Ties go to the first index, on every port.
    """
    del q, uniforms
    choice = xp.astype(xp.argmax(logits, axis=-1), drafted.dtype)
    return judged(xp, drafted, drafted == choice[:, :-1], choice)


def match(sampling: Sampling = GREEDY, *, noise: Noise = "gumbel", drafts: Drafts = "shared") -> Policy:
    """Return the match policy: what is emitted is, token for token, what the target alone would emit.

        choice[i] ~ p[i], drawn with the numbers of its position;  keep while drafted[i] = choice[i];  emit choice

    At temperature 0 the choice is the argmax. Above it, the random numbers belong to (seed, position), so the text is
    that of plain decoding with the same `sampling`, `noise` and seed; `drafts` changes tau alone.

    Args:
        sampling: what makes p of the target's logits, and q of the draft's.
        noise: how a choice is drawn. With shared drafts Gumbel-max has the higher tau, and no coupling of draws that
            do not know each other has a better bound; it costs a hash for every token of the vocabulary.
        drafts: how the draft guesses the choice.

    Raises:
        InputError: another word for `noise` or `drafts`.

    Guarantees:
        P01: with any draft and any block size, the tokens and the bits of their logits are those of no draft.
        P07: so they are at any temperature.

    Source:
        arXiv 2602.06036, section 3, at temperature 0; Leviathan et al. 2211.17192, section 2.2. Above it, shared
        noise is Daliri, Musco and Suresh 2408.07978. Upstream redraws after a mismatch, which is not p's law: here the
        draw that the drafted token was compared with is the one that is emitted.

    Example:
        >>> import numpy as np
        >>> logits = np.array([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])
        >>> verdict = match().rule(np, np.array([[1, 1]]), logits, None, {})
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
        ([1], [0])
    """
    as_sampling(sampling)
    if noise not in ("inverse", "gumbel"):
        raise errors.InputError(f"match: got noise {noise!r}, expected 'inverse' or 'gumbel'")
    if drafts not in ("shared", "independent", "argmax"):
        raise errors.InputError(f"match: got drafts {drafts!r}, expected 'shared', 'independent' or 'argmax'")
    if sampling.temperature == 0:
        return Policy("match", greedy_match, lossless=True, invariant=True)

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        del q
        law = weights(xp, logits, sampling)
        choice = draw(xp, law, uniforms["target"]) if noise == "inverse" else race(xp, law, uniforms["noise"])
        choice = xp.astype(choice, drafted.dtype)
        return judged(xp, drafted, drafted == choice[:, :-1], choice)

    return Policy(
        f"match, {sampling}, {noise}, {drafts} drafts",
        rule,
        lossless=True,
        streams=("target",) if noise == "inverse" else ("noise",),
        sampling=sampling,
        drafting=_drafting(sampling, noise, drafts),
        invariant=True,
    )


def _drafting(sampling: Sampling, noise: Noise, drafts: Drafts) -> Drafting:
    if drafts == "argmax":
        return ARGMAX
    if drafts == "independent":
        return inverse(sampling, "draft")
    return raced(sampling) if noise == "gumbel" else inverse(sampling, "target")
