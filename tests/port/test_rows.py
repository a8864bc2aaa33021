"""Rows are ragged, and none of them can tell that the others are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn.opening import extend, prefill
from dflash_fn.port import Port
from dflash_fn.records import Pair, StopReason
from tests.helpers import proposers
from tests.helpers.fixtures import DTYPES, need_dtype
from tests.helpers.runs import Run, decode_plainly, differing, fetch, run, visible
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

DESIGN = DraftDesign(block_size=4)
PROMPTS = [[5, 9, 2], [7, 4, 11, 3, 30, 8, 1]]


@pytest.fixture(scope="module")
def pair(port: Port, checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(port, DESIGN)


@pytest.fixture(scope="module")
def texts(pair: Pair) -> list[list[int]]:
    """Each prompt with its greedy continuation, found alone."""
    return [[*ids, *decode_plainly(prefill(pair, ids, width=4), pair, 24).emitted[0]] for ids in PROMPTS]


def kept_with(pair: Pair, texts: list[list[int]], plan: list[list[int]], budget: int = 20) -> Run:
    return run(prefill(pair, PROMPTS), pair, max_new_tokens=budget, proposer=proposers.scripted(texts, plan))


def test_ragged_acceptance_gives_each_row_its_own_text(pair: Pair, texts: list[list[int]]) -> None:
    found = kept_with(pair, texts, [[3, 1], [0, 3]])
    assert found.accepted(0)[:2] == [3, 0]
    assert found.accepted(1)[:2] == [1, 3]
    for row, text in enumerate(texts):
        assert found.emitted[row] == tuple(text[len(PROMPTS[row]) :][:20])


def test_lengths_of_both_caches_are_each_rows_own(port: Port, pair: Pair, texts: list[list[int]]) -> None:
    found = kept_with(pair, texts, [[3, 1], [0, 3], [2, 2]])
    for state in found.states:
        covered = tuple(len(ids) - 1 for ids in state.tokens)
        assert port.lengths(state.target_cache) == covered
        assert port.lengths(dflash_fn.propose(state, pair, block_size=1).draft_cache) == covered


@pytest.mark.parametrize("plan", [[[3, 1], [0, 3]], [[0, 0], [3, 3]], [[3, 0], [3, 0], [3, 0]]])
def test_each_row_goes_through_the_steps_of_its_single_row_run(
    pair: Pair, texts: list[list[int]], plan: list[list[int]]
) -> None:
    found = kept_with(pair, texts, plan)
    for row, ids in enumerate(PROMPTS):
        proposer = proposers.scripted([texts[row]], [[counts[row]] for counts in plan])
        alone = run(prefill(pair, ids), pair, max_new_tokens=20, proposer=proposer)
        assert found.emitted[row] == alone.emitted[0]
        assert [count for count in found.accepted(row) if count is not None] == alone.accepted()


def test_a_row_that_has_ended_emits_nothing_and_stays_as_it_was(pair: Pair, texts: list[list[int]]) -> None:
    stop = next(token for token in texts[0][3:] if token not in texts[1][7:27])
    end = 3 + texts[0][3:].index(stop) + 1
    found = run(prefill(pair, PROMPTS), pair, max_new_tokens=20, stop_token_ids=stop, proposer=proposers.right(texts))
    assert found.last.stop == (StopReason.STOP_TOKEN, StopReason.MAX_NEW_TOKENS)
    assert found.last.tokens == (tuple(texts[0][:end]), tuple(texts[1][:27]))
    ended = next(index for index, state in enumerate(found.states) if state.stop[0])
    for state, info in zip(found.states[ended + 1 :], found.infos[ended:], strict=True):
        assert (info.emitted[0], info.num_accepted[0]) == ((), None)
        assert state.tokens[0] == found.states[ended].tokens[0]
        assert pair.port.lengths(state.target_cache)[0] == end - 1


@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("row", [0, 1])
def test_rows_with_their_own_stops_equal_their_single_row_runs(
    pair: Pair, texts: list[list[int]], row: int, offset: int
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "stop_token_ids": texts[row][len(PROMPTS[row]) + offset]}
    together = dflash_fn.decode(prefill(pair, PROMPTS), pair, proposer=proposers.right(texts), **options)
    alone = [
        dflash_fn.decode(prefill(pair, ids), pair, proposer=proposers.right([text]), **options)
        for ids, text in zip(PROMPTS, texts, strict=True)
    ]
    assert together.tokens == tuple(state.tokens[0] for state in alone)
    assert together.stop == tuple(state.stop[0] for state in alone)


def test_a_row_that_ended_at_its_budget_goes_on_and_one_that_ended_at_a_stop_does_not(
    pair: Pair, texts: list[list[int]]
) -> None:
    stop = next(token for token in texts[0][3:] if token not in texts[1][7:27])
    state = dflash_fn.decode(prefill(pair, PROMPTS), pair, max_new_tokens=12, stop_token_ids=stop)
    again = dflash_fn.decode(state, pair, max_new_tokens=4, stop_token_ids=())
    assert again.tokens == (state.tokens[0], tuple(texts[1][:23]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(3, 7), (1, 300), (250, 5, 120), (6, 6, 6, 6)])
@pytest.mark.parametrize("width", [4, 8])
def test_exact_rows_have_the_bits_of_their_single_row_runs(
    port: Port, checkpoints: Checkpoints, width: int, lengths: tuple[int, ...], dtype: str
) -> None:
    need_dtype(port, dtype)
    pair = checkpoints.pair(port, DESIGN, dtype)
    prompts = [np.random.default_rng([n, r]).integers(0, 48, n).tolist() for r, n in enumerate(lengths)]
    together = run(prefill(pair, prompts, width=width, exact_rows=True), pair, max_new_tokens=8)
    for row, ids in enumerate(prompts):
        alone = run(prefill(pair, ids, width=width), pair, max_new_tokens=8)
        assert together.emitted[row] == alone.emitted[0]
        assert differing(together.logits[row], alone.logits[0]) == []
        assert [info.drafted[row] for info in together.infos][: len(alone.infos)] == [
            info.drafted[0] for info in alone.infos
        ]


@pytest.mark.parametrize("options", [{"bias": True}, {"inner": 20}, {"tied": True}, {"family": "qwen3"}])
def test_exact_rows_hold_for_every_kind_of_target(port: Port, checkpoints: Checkpoints, options: dict) -> None:
    pair = checkpoints.pair(port, DraftDesign(target=TargetDesign(**options)))
    together = run(prefill(pair, PROMPTS, exact_rows=True), pair, max_new_tokens=10)
    for row, ids in enumerate(PROMPTS):
        alone = run(prefill(pair, ids), pair, max_new_tokens=10)
        assert differing(together.logits[row], alone.logits[0]) == []


def test_the_caches_of_exact_rows_are_those_of_their_single_row_runs(pair: Pair) -> None:
    port = pair.port
    together = run(prefill(pair, PROMPTS, exact_rows=True), pair, max_new_tokens=9).last
    both = [port.split_rows(together.target_cache), port.split_rows(together.draft_cache)]
    for row, ids in enumerate(PROMPTS):
        alone = run(prefill(pair, ids), pair, max_new_tokens=9).last
        for rows, cache in zip(both, (alone.target_cache, alone.draft_cache), strict=True):
            size = min(port.lengths(rows[row])[0], port.lengths(cache)[0])
            for left, right in zip(visible(port, rows[row])[1:], visible(port, cache)[1:], strict=True):
                assert differing(left[:, :size], right[:, :size]) == []


@pytest.mark.parametrize("lengths", [(3, 7), (5, 100), (60, 70, 1)])
def test_the_drafts_logits_of_exact_rows_are_those_of_their_single_row_runs(
    pair: Pair, lengths: tuple[int, ...]
) -> None:
    prompts = [np.random.default_rng([n, r]).integers(0, 48, n).tolist() for r, n in enumerate(lengths)]
    states = [run(prefill(pair, ids), pair, max_new_tokens=1).last for ids in prompts]
    together = run(prefill(pair, prompts, exact_rows=True), pair, max_new_tokens=1).last
    expected = [fetch(pair.port, dflash_fn.propose(state, pair).logits)[0] for state in states]
    found = fetch(pair.port, dflash_fn.propose(together, pair).logits)
    assert [differing(left, right) for left, right in zip(found, expected, strict=True)] == [[]] * len(lengths)


def test_seeds_are_one_for_all_rows_or_one_a_row(pair: Pair) -> None:
    assert prefill(pair, PROMPTS, seed=3).seed == (3, 3)
    assert prefill(pair, PROMPTS, seed=[3, 4]).seed == (3, 4)


def test_extend_adds_to_some_rows_and_leaves_others(pair: Pair) -> None:
    state = dflash_fn.decode(prefill(pair, PROMPTS), pair, max_new_tokens=3)
    longer = extend(state, pair, [[], [4, 5]])
    assert longer.tokens == (state.tokens[0], (*state.tokens[1], 4, 5))
    assert longer.stop == (None, None)
    found = run(longer, pair, max_new_tokens=8)
    for row, ids in enumerate(longer.tokens):
        assert found.emitted[row] == run(prefill(pair, ids), pair, max_new_tokens=8).emitted[0]
