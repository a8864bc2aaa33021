"""Comparisons of one quantity each: what was recorded against what was found, as `Deviation`s."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from dflash_fn.container import Bits
from dflash_fn.trace.records import CacheView
from dflash_fn.trace.report import Deviation
from dflash_fn.trace.summary import STATISTICS, digest_of, floats

__all__ = ["Describe", "Layers", "Place", "compare_cache", "compare_features", "compare_summaries"]

Describe: TypeAlias = Callable[[tuple[int, ...]], tuple[int, "int | None", str]]
"""Says of an index into an array of differences: slot, layer or None, and a note for people."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that an axis of an array runs over.

    Attributes:
        bounds: how far each may be off, relative to its peak.
        names: their ids; None for 0, 1, 2 ...
    """

    bounds: tuple[float, ...]
    names: tuple[int, ...] | None = field(default=None)

    def name(self, index: int) -> int:
        """Return the id of the layer at an index."""
        return self.names[index] if self.names else index


@dataclass(frozen=True, slots=True)
class Place:
    """Where a quantity was seen; `step` is None in prefill."""

    step: int | None
    row: int

    def exact(self, quantity: str, recorded: Any, found: Any) -> Deviation:
        """Compare what has no rounding."""
        same = recorded == found
        note = "" if same else f"recorded {recorded}, found {found}"
        return Deviation(quantity, self.step, self.row, None, None, float(not same), 0.0, note)

    def extremes(
        self, quantity: str, size: np.ndarray, bound: np.ndarray, describe: Describe, same: bool | None = None
    ) -> Iterator[Deviation]:
        """Yield the first element beyond its bound, if there is one, and the one that is furthest.

        Args:
            quantity: what is compared.
            size: [slots, n] or [slots, layers, n] differences. The first is looked for layer by layer, since an error
                of one layer goes through all that follow.
            bound: of the same shape, or one that broadcasts to it.
            describe: says of an index which slot and which layer it is, and what was recorded and found there.
            same: whether all bits are the same.
        """
        bound = np.broadcast_to(bound, size.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(size == 0, 0.0, size / bound)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        for index in dict.fromkeys([*_first_beyond(ratio), _index(ratio.argmax(), ratio.shape)]):
            slot, layer, note = describe(index)
            sizes = float(size[index]), float(bound[index])
            yield Deviation(quantity, self.step, self.row, slot, layer, *sizes, note, same_bits=same)


def _first_beyond(ratio: np.ndarray) -> Iterator[tuple[int, ...]]:
    most = ratio.max(axis=-1)
    beyond = np.argwhere(most.T > 1.0)
    if len(beyond):
        place = tuple(int(i) for i in beyond[0][::-1])
        yield (*place, int(ratio[place].argmax()))


def _index(flat: np.integer, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(flat), shape))


def compare_cache(
    at: Place, name: str, recorded: CacheView | None, found: CacheView | None, layers: Mapping[str, Layers]
) -> Iterator[Deviation]:
    """Compare a row of a cache: its length, then what it gained, kind by kind."""
    if recorded is None or found is None:
        return
    yield at.exact(f"{name}.length", recorded.length, found.length)
    same = recorded.digest == found.digest if recorded.digest else None
    for kind, known in recorded.fresh.items():
        if kind in found.fresh:
            # layers come first in a cache, tokens first everywhere else
            one, other = known.swapaxes(0, 1), found.fresh[kind].swapaxes(0, 1)
            yield from compare_summaries(at, f"{name}.{kind}", one, other, layers[kind], same)


def compare_summaries(
    at: Place, quantity: str, recorded: np.ndarray, found: np.ndarray, layers: Layers, same: bool | None = None
) -> Iterator[Deviation]:
    """Compare [tokens, layers, 4] summaries; where one side has fewer tokens, the first ones."""
    if recorded.shape[1:] != found.shape[1:] or recorded.shape[1] != len(layers.bounds):
        yield at.exact(f"{quantity}.shape", recorded.shape, found.shape)
        return
    tokens = min(len(recorded), len(found))
    if tokens:
        one, other = recorded[:tokens].astype(np.float64), found[:tokens].astype(np.float64)
        bound = np.array(layers.bounds)[:, None] * np.maximum(one[..., :1], other[..., :1])

        def describe(index: tuple[int, ...]) -> tuple[int, int, str]:
            note = f"{STATISTICS[index[2]]}: recorded {one[index]:.6g}, found {other[index]:.6g}"
            return index[0], layers.name(index[1]), note

        yield from at.extremes(quantity, np.abs(one - other), bound, describe, same)


def compare_features(
    at: Place, recorded: Bits | None, digest: str | None, found: Bits | None, layers: Layers
) -> Iterator[Deviation]:
    """Compare pending context features, each tapped layer relative to its own peak."""
    if recorded is None or found is None:
        return
    if recorded.values.shape != found.values.shape:
        yield at.exact("context_features.shape", recorded.values.shape, found.values.shape)
        return
    if len(recorded.values):
        shape = (len(found.values), len(layers.bounds), -1)
        one, other = (floats(bits).astype(np.float64).reshape(shape) for bits in (recorded, found))
        peaks = np.maximum(np.abs(one), np.abs(other)).max(axis=-1, keepdims=True)
        bound = np.array(layers.bounds)[:, None] * peaks
        same = digest == digest_of({"features": found}) if digest else None

        def describe(index: tuple[int, ...]) -> tuple[int, int, str]:
            note = f"element {index[2]}: recorded {one[index]:.6g}, found {other[index]:.6g}"
            return index[0], layers.name(index[1]), note

        yield from at.extremes("context_features", np.abs(one - other), bound, describe, same)
