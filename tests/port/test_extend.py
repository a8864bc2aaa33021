"""Extending a state equals having had it all in the prompt, bit for bit, in caches, proposals and text (P05)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn.opening import extend, prefill
from dflash_fn.port import Port
from dflash_fn.records import DecodeState, Pair
from tests.helpers import proposers
from tests.helpers.runs import equal_probes, probe, run, visible
from tests.helpers.tiny import Checkpoints, DraftDesign, without_draft

DESIGN = DraftDesign(block_size=4)


@pytest.fixture(scope="module")
def pair(port: Port, checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(port, DESIGN)


def ids_of(count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, 48, count).tolist()


def check(state: DecodeState, pair: Pair, ids: list[int]) -> None:
    """Compare a state with the one that the whole prompt gives."""
    whole = prefill(pair, ids, width=state.width)
    assert state.tokens == whole.tokens
    for cache in ("target_cache", "draft_cache"):
        if getattr(whole, cache) is not None:
            assert equal_probes(visible(pair.port, getattr(state, cache)), visible(pair.port, getattr(whole, cache)))
    assert equal_probes(probe(state, pair), probe(whole, pair))
    left, right = (run(one, pair, max_new_tokens=6) for one in (state, whole))
    assert [info.drafted for info in left.infos] == [info.drafted for info in right.infos]
    assert left.emitted == right.emitted
    assert equal_probes(left.logits, right.logits)


def in_pieces(pair: Pair, ids: list[int], size: int) -> DecodeState:
    state = prefill(pair, ids[:size])
    for first in range(size, len(ids), size):
        state = extend(state, pair, ids[first : first + size])
    return state


class Watching:
    """A port that notes where each target pass begins and how many slots it has."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.passes: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)

    def target_pass(self, target: Any, cache: Any, tokens: Any, **options: Any) -> Any:
        self.passes.append((self.port.lengths(cache)[0], tokens.shape[1]))
        return self.port.target_pass(target, cache, tokens, **options)


def passes_of(pair: Pair, act: Callable[[Pair], DecodeState]) -> list[tuple[int, int]]:
    watching = Watching(pair.port)
    act(replace(pair, port=watching))  # pyright: ignore[reportArgumentType]
    return watching.passes


@pytest.mark.parametrize("answer", [0, 3])
@pytest.mark.parametrize(
    ("first", "added"),
    [(1, 1), (1, 9), (3, 300), (200, 17), (255, 2), (256, 1), (256, 2), (257, 1), (300, 5), (513, 9), (600, 200)],
)
def test_chunks_lie_where_one_prompt_has_them(pair: Pair, first: int, added: int, answer: int) -> None:
    """Whether bits depend on a chunk's size differs from machine to machine; where chunks lie does not."""
    width = pair.port.prefill_width
    state = run(prefill(pair, ids_of(first)), pair, max_new_tokens=answer).last
    found = passes_of(pair, lambda watched: extend(state, watched, ids_of(added)))
    whole = passes_of(pair, lambda watched: prefill(watched, [*state.tokens[0], *ids_of(added)]))
    last = (first - 1) // width  # the state had read so many whole chunks
    assert found == whole[last:]
    assert [start for start, _ in whole] == list(range(0, width * len(whole), width))
    assert {size for _, size in whole[:-1]} <= {width}


@pytest.mark.parametrize("first", [1, 4, 9])
def test_a_prompt_of_ten_extended_from_a_saved_state(pair: Pair, first: int) -> None:
    ids = ids_of(10)
    check(extend(prefill(pair, ids[:first]), pair, ids[first:]), pair, ids)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_prompt_of_ten_in_pieces(pair: Pair, size: int) -> None:
    check(in_pieces(pair, ids_of(10), size), pair, ids_of(10))


@pytest.mark.parametrize("first", [1, 4, 9])
def test_a_buffer_that_held_other_tokens_before(pair: Pair, first: int) -> None:
    ids = ids_of(10)
    state = prefill(pair, ids[:first])
    for seed in range(2):
        other = extend(state, pair, [(token + 1 + seed) % 48 for token in ids])
        run(other, pair, max_new_tokens=9, proposer=proposers.at_random(seed))
    check(extend(state, pair, ids[first:]), pair, ids)


@pytest.mark.parametrize(
    ("first", "count"),
    [(250, 270), (255, 256), (255, 257), (256, 257), (257, 258), (256, 512), (512, 513), (511, 514), (513, 520)],
)
def test_across_the_border_of_a_prefill_chunk(pair: Pair, first: int, count: int) -> None:
    ids = ids_of(count)
    check(extend(prefill(pair, ids[:first]), pair, ids[first:]), pair, ids)


@pytest.mark.parametrize("generated", [1, 7, 20])
@pytest.mark.parametrize("first", [3, 240, 256, 257])
def test_after_an_answer_and_a_next_turn(pair: Pair, first: int, generated: int) -> None:
    ids = ids_of(first)
    state = run(prefill(pair, ids), pair, max_new_tokens=generated, proposer=proposers.at_random(3)).last
    check(extend(state, pair, [1, 2, 3]), pair, [*state.tokens[0], 1, 2, 3])


def test_turn_after_turn(pair: Pair) -> None:
    state = prefill(pair, ids_of(100))
    for turn in range(5):
        state = run(state, pair, max_new_tokens=11).last
        state = extend(state, pair, ids_of(50 + turn))
        check(state, pair, list(state.tokens[0]))


def test_without_a_draft(pair: Pair) -> None:
    lone = without_draft(pair)
    state = run(prefill(lone, ids_of(250), width=4), lone, max_new_tokens=5).last
    check(extend(state, lone, ids_of(9)), lone, [*state.tokens[0], *ids_of(9)])


def test_a_row_that_had_stopped_goes_on(pair: Pair) -> None:
    state = dflash_fn.decode(prefill(pair, ids_of(4)), pair, max_new_tokens=9, stop_token_ids=range(48))
    assert state.stop != (None,)
    longer = extend(state, pair, [6])
    assert longer.stop == (None,)
    check(longer, pair, [*state.tokens[0], 6])


def test_the_first_state_stays_valid(pair: Pair) -> None:
    state = run(prefill(pair, ids_of(30)), pair, max_new_tokens=5).last
    before = probe(state, pair)
    for tokens in ([1], [2, 3], ids_of(300)):
        run(extend(state, pair, tokens), pair, max_new_tokens=5)
    assert equal_probes(before, probe(state, pair))


def test_what_a_state_is_told_survives(pair: Pair) -> None:
    state = prefill(pair, [[1, 2], [3]], seed=[7, 8], width=9, exact_rows=True)
    longer = extend(state, pair, [[4], [5]])
    assert (longer.seed, longer.width, longer.exact_rows, longer.step) == ((7, 8), 9, True, 0)


def test_progress_is_told_after_each_chunk_over_all_rows(port: Port, pair: Pair) -> None:
    size = port.prefill_width
    told: list[tuple[int, int]] = []
    rows = [ids_of(2 * size + 11), ids_of(1), ids_of(size + 1)]
    state = prefill(pair, rows, progress=lambda done, total: told.append((done, total)))
    total = 3 * size + 10
    assert told == [(size, total), (2 * size, total), (2 * size + 10, total), (total, total)]
    told.clear()
    extend(state, pair, [[1], [], [2, 3]], progress=lambda done, total: told.append((done, total)))
    assert told == [(11, 13), (13, 13)]
