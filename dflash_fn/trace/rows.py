"""Comparisons of whole rows: after prefill, in a step, and after it, in the order in which things are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_fn.container import Bits
from dflash_fn.policies import Policy
from dflash_fn.trace.bounds import UNIFORM, Bounds
from dflash_fn.trace.choices import compare_choice, compare_logits
from dflash_fn.trace.comparing import Place, compare_cache, compare_features, compare_summaries
from dflash_fn.trace.looking import Look
from dflash_fn.trace.records import CacheView, RowStart, RowStep
from dflash_fn.trace.report import Deviation

__all__ = ["Found", "compare_ends", "compare_rows", "compare_start"]


@dataclass(frozen=True, slots=True)
class Found:
    """What a replayed step made, up to the verdict; one entry a row.

    Attributes:
        anchors: the last token of each row.
        seen: what `propose` made.
        drafted: the draft's own tokens, B - 1 a row.
        logits: [B, V] of the target, after the recorded block's tokens.
        uniforms: [R, B] by stream; [R, B, 2] for `noise`.
        kept: the verdict's tokens; None where logits were not finite.
        problem: what was wrong with them.
    """

    anchors: Sequence[int]
    seen: Look
    drafted: Sequence[Sequence[int]]
    logits: Sequence[Bits]
    uniforms: Mapping[str, np.ndarray]
    kept: Sequence[tuple[int, ...]] | None
    problem: str


def compare_start(recorded: Sequence[RowStart], found: Sequence[RowStart], bounds: Bounds) -> Iterator[Deviation]:
    """Compare rows after prefill: target cache, context features, draft cache."""
    for row, (one, other) in enumerate(zip(recorded, found, strict=False)):  # a trace need not have them
        at = Place(None, row)
        yield from compare_cache(at, "target_cache", one.target_cache, other.target_cache, bounds.target_cache)
        if one.features is not None and other.features is not None:
            yield from compare_summaries(at, "context_features", one.features, other.features, bounds.features)
        yield from compare_cache(at, "draft_cache", one.draft_cache, other.draft_cache, bounds.draft_cache)


def compare_rows(
    step: int, rows: Sequence[RowStep | None], found: Found, bounds: Bounds, *, free: bool, policy: Policy
) -> Iterator[Deviation]:
    """Compare a step's rows up to the verdict.

    Args:
        step: its index.
        rows: what was recorded; None for rows that had stopped.
        found: what the replay made.
        bounds: of the pair.
        free: whether the draft was asked, so that its tokens can be expected to be the recorded ones.
        policy: where its rule or its drafting reads random numbers, logits alone do not tell a near tie.
    """
    for index, row in enumerate(rows):
        if row:
            at = Place(step, index)
            yield at.exact("anchor", row.block[0], found.anchors[index])
            yield from _reading(at, row, found.seen, index, bounds)
            if free and len(found.drafted[index]) == len(row.block) - 1:
                yield from _drafting(at, row, found, index, bounds, draws=bool(policy.drafting.streams))
            yield from compare_logits(
                at, "target_logits", row.target_logits, found.logits[index], bounds.target_logits, first_slot=0
            )
            yield from _uniforms(at, row, found.uniforms, index)
            if found.kept:
                yield _verdict(at, row, found.kept[index], found.logits[index], bounds, draws=bool(policy.streams))


def compare_ends(
    step: int, rows: Sequence[RowStep | None], found: Sequence[CacheView], bounds: Bounds
) -> Iterator[Deviation]:
    """Compare the target caches that a step selected."""
    for index, (row, view) in enumerate(zip(rows, found, strict=True)):
        if row:
            yield from compare_cache(Place(step, index), "target_cache", row.target_cache, view, bounds.target_cache)


def _reading(at: Place, row: RowStep, seen: Look, index: int, bounds: Bounds) -> Iterator[Deviation]:
    features = seen.features[index] if seen.features else None
    yield from compare_features(at, row.features, row.features_digest, features, bounds.features)
    cache = seen.draft_cache[index] if seen.draft_cache else None
    yield from compare_cache(at, "draft_cache", row.draft_cache, cache, bounds.draft_cache)


def _drafting(at: Place, row: RowStep, found: Found, index: int, bounds: Bounds, *, draws: bool) -> Iterator[Deviation]:
    logits, drafted = found.seen.draft_logits, tuple(found.drafted[index])
    if logits is None:
        return
    yield from compare_logits(at, "draft_logits", row.draft_logits, logits[index], bounds.draft_logits, first_slot=1)
    if draws or drafted == row.block[1:]:
        yield at.exact("drafted", row.block[1:], drafted)
        return
    for slot, tokens in enumerate(zip(row.block[1:], drafted, strict=True)):
        if tokens[0] != tokens[1]:
            yield compare_choice(
                at, "drafted", tokens, row.draft_logits, logits[index], bounds.draft_logits, index=slot, first_slot=1
            )


def _uniforms(at: Place, row: RowStep, found: Mapping[str, np.ndarray], index: int) -> Iterator[Deviation]:
    for stream, known in row.uniforms.items():
        if stream not in found or len(known) != len(found[stream][index]):
            yield at.exact(f"uniforms.{stream}", len(known), len(found.get(stream, ())))
        else:
            size = np.abs(found[stream][index] - known)[:, None]
            yield from at.extremes(f"uniforms.{stream}", size, np.array(UNIFORM), lambda where: (where[0], None, ""))


def _verdict(at: Place, row: RowStep, kept: tuple[int, ...], logits: Bits, bounds: Bounds, *, draws: bool) -> Deviation:
    """Compare verdicts; where they part, the two choices at that slot are judged."""
    slot = next((i for i, pair in enumerate(zip(row.kept, kept, strict=False)) if pair[0] != pair[1]), None)
    if slot is None or draws:
        return at.exact("verdict", row.kept, kept)
    note = f"recorded {row.num_accepted} accepted, found {len(kept) - 1}"
    return compare_choice(
        at, "verdict", (row.kept[slot], kept[slot]), row.target_logits, logits, bounds.target_logits,
        index=slot, first_slot=0, note=note,
    )  # fmt: skip
