"""Comparisons of logits, and of the tokens that were chosen by them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dflash_fn.container import Bits
from dflash_fn.tolerances import TIE
from dflash_fn.trace.comparing import Place
from dflash_fn.trace.records import LogitsView
from dflash_fn.trace.report import Deviation
from dflash_fn.trace.summary import STATISTICS, digest_of, floats, summarize

__all__ = ["compare_choice", "compare_logits"]


def compare_logits(
    at: Place, quantity: str, recorded: LogitsView | None, found: Bits | None, bound: float, *, first_slot: int
) -> Iterator[Deviation]:
    """Compare [S, V] logits with those that were kept, relative to each slot's peak.

    Three things are compared: the logits of the tokens that were kept; by how much the best of all other tokens is
    above the least of those; and the summaries.
    """
    if recorded is None or found is None:
        return
    known, values = floats(recorded.values).astype(np.float64), floats(found).astype(np.float64)
    if len(known) != len(values):
        yield at.exact(f"{quantity}.slots", len(known), len(values))
        return
    if len(known):
        size = np.concatenate(_apart(recorded, known, values), axis=-1)
        same = recorded.digest == digest_of({"logits": found}) if recorded.digest else None

        def describe(where: tuple[int, ...]) -> tuple[int, None, str]:
            return first_slot + where[0], None, _named(recorded, known, values, *where)

        yield from at.extremes(quantity, size, bound * _peaks(known, values)[:, None], describe, same)


def _peaks(known: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(known).max(axis=-1), np.abs(values).max(axis=-1))


def _ids(recorded: LogitsView, values: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(values.shape[-1]), values.shape) if recorded.ids is None else recorded.ids


def _apart(recorded: LogitsView, known: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """Return [S, k] differences; then [S, 1] where only some tokens were kept; then [S, 4] of the summaries."""
    slots, ids = np.arange(len(known))[:, None], _ids(recorded, values)
    parts = [np.abs(values[slots, ids] - known)]
    if recorded.ids is not None:
        others = values.copy()
        others[slots, ids] = -np.inf
        parts.append(np.maximum(others.max(axis=-1, keepdims=True) - known.min(axis=-1, keepdims=True), 0.0))
    if recorded.summary is not None:
        parts.append(np.abs(summarize(values) - recorded.summary))
    return parts


def _named(recorded: LogitsView, known: np.ndarray, values: np.ndarray, slot: int, column: int) -> str:
    if column < known.shape[1]:
        token = int(_ids(recorded, values)[slot, column])
        return f"token {token}: recorded {known[slot, column]:.6g}, found {values[slot, token]:.6g}"
    others = ["a token that is not among those kept is better"] if recorded.ids is not None else []
    return [*others, *(f"{name} of all logits" for name in STATISTICS)][column - known.shape[1]]


def compare_choice(
    at: Place,
    quantity: str,
    tokens: tuple[int, int],
    recorded: LogitsView | None,
    found: Bits,
    bound: float,
    *,
    index: int,
    first_slot: int,
    note: str = "",
) -> Deviation:
    """Judge two different choices of a token by the same logits: a near tie, or a difference.

    It is a near tie where on both sides the logits of the two tokens are at most `TIE` bounds apart.
    A tie that is exact on both sides is none: the first index wins.

    Args:
        at: where.
        quantity: what was chosen.
        tokens: that was recorded, and that was found.
        recorded: the logits that the first was chosen by; None where they are not known.
        found: [S, V], the logits that the other was chosen by.
        bound: of one logit, relative to the peak.
        index: into S.
        first_slot: slot of index 0.
        note: to begin the deviation's with.
    """
    values = floats(found)[index].astype(np.float64)
    theirs = _recorded_gap(recorded, index, *tokens)
    ours = float(values[tokens[1]] - values[tokens[0]])
    limit = TIE * bound * float(np.abs(values).max())
    gaps = [ours] if theirs is None else [theirs, ours]
    near = all(0.0 <= gap <= limit for gap in gaps) and any(gaps)
    text = f"recorded {tokens[0]}, found {tokens[1]}"
    text += f", gaps {'unknown' if theirs is None else f'{theirs:.3g}'} and {ours:.3g}, tie bound {limit:.3g}"
    size = max(gaps) if near else 1.0
    note = f"{note}; {text}" if note else text
    place = (at.step, at.row, first_slot + index, None)
    return Deviation(quantity, *place, size, limit if near else 0.0, note, near_tie=near)


def _recorded_gap(recorded: LogitsView | None, index: int, chosen: int, other: int) -> float | None:
    """Return how much better the chosen token was; where the other was not kept, than the least of those kept."""
    if recorded is None:
        return None
    known = floats(recorded.values)[index].astype(np.float64)
    ids = np.arange(len(known)) if recorded.ids is None else recorded.ids[index]
    of = dict(zip(ids.tolist(), known.tolist(), strict=True))
    least = float(known.min())
    return of.get(chosen, least) - of.get(other, least)
