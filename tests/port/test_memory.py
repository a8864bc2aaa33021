"""What states hold: bounded by the window and the recurrent state, whatever the length of the text."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from dflash_fn.bench.holdings import bytes_held
from dflash_fn.opening import prefill
from dflash_fn.port import Port
from dflash_fn.records import Cache
from tests.helpers.runs import run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

WINDOW = TargetDesign(family="qwen3", seed=20, layers=2, window=5)
HYBRID = TargetDesign(family="qwen3_5", layers=3, seed=5)

MOST = 2 * 4 * 2 * 8 * 2048
"""Bytes of K and V in float32, of 2 heads of 8 dimensions, in more slots than a window of 6 takes on any port."""


def bounded(cache: Cache) -> list[Any]:
    """Return the arrays of layers that do not remember everything, at the end and at the mark."""
    if isinstance(cache, tuple):  # jax: rows of layers
        held = [one for row in cache for one in (*row.held, *row.marked) if one is not None]
        windows = [(one.keys, one.values) for one in held if getattr(one, "window", None) is not None]
        states = [(one.conv, one.recurrent) for one in held if hasattr(one, "conv")]
        return [*itertools.chain(*windows, *states)]
    made: list[Any] = []
    for recent in (cache.recent, cache.marked):
        if recent.sliding:
            made += [*recent.sliding.buffer.keys, *recent.sliding.buffer.values]
        made += [array for layer in recent.states for state in layer for array in (state.conv, state.recurrent)]
    return made


def bytes_of(cache: Cache) -> int:
    unique = {id(array): array for array in bounded(cache)}
    return sum(array.nbytes for array in unique.values())


@pytest.mark.parametrize("length", [40, 1900])
def test_bytes_held_are_those_of_whole_buffers(port: Port, checkpoints: Checkpoints, length: int) -> None:
    """A draft that slides holds the buffer at the mark, and one at the end where that has moved on; each once."""
    pair = checkpoints.pair(port, DraftDesign(window=6, layers=1))
    state = prefill(pair, np.random.default_rng(length).integers(0, 48, length).tolist())
    cache: Any = state.draft_cache
    sizes = {id(array): array.shape for array in bounded(cache)}.values()
    held = bytes_held(cache)
    assert held == sum(4 * math.prod(shape) for shape in sizes)
    assert held > sum(bits.values.nbytes for bits in port.export_cache(cache).values())
    assert bytes_held(cache, cache, (cache,)) == held
    assert bytes_held(state) == held + bytes_held(state.target_cache) + bytes_held(state.context_features)


@pytest.mark.parametrize("design", [WINDOW, HYBRID], ids=["window", "delta-net"])
def test_bytes_after_1_10_and_100_steps(port: Port, checkpoints: Checkpoints, design: TargetDesign) -> None:
    pair = checkpoints.pair(port, design)
    state = prefill(pair, list(range(30)), width=2)
    states = run(state, pair, max_new_tokens=101, block_size=1).states
    assert len({bytes_of(states[count].target_cache) for count in (1, 10, 100)}) == 1


@pytest.mark.parametrize("design", [WINDOW, HYBRID], ids=["window", "delta-net"])
def test_bytes_after_long_prompts(port: Port, checkpoints: Checkpoints, design: TargetDesign) -> None:
    """Target and draft: twice the prompt takes the same, or twice that where the mark's window is another buffer."""
    pair = checkpoints.pair(port, DraftDesign(target=design, window=6, layers=1, taps=(0,)))
    rng = np.random.default_rng(0)
    short, long = (prefill(pair, rng.integers(0, 48, count).tolist()) for count in (1900, 3800))
    for name in ("target_cache", "draft_cache"):
        assert bytes_of(getattr(long, name)) <= 2 * bytes_of(getattr(short, name))
    assert bytes_of(long.draft_cache) <= 2 * MOST
    cache: Any = long.draft_cache
    sliding = None if isinstance(cache, tuple) else cache.recent.sliding
    if sliding:
        room = sliding.buffer.capacity - sliding.buffer.window
        assert sliding.buffer.counts.copies == 0
        assert sliding.buffer.counts.slides <= 2 * 3800 / room
