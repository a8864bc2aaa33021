"""Proposers without a model, and beside the draft, change nothing but the number of steps."""

from __future__ import annotations

import pytest

from dflash_fn.opening import prefill
from dflash_fn.port import Port
from dflash_fn.proposers import continuation, lookup_or_draft, ngram, occurred
from dflash_fn.records import Array, DecodeState, Pair
from dflash_fn.steps import propose
from tests.helpers.runs import run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

PROMPTS = [[5, 9, 2, 5, 9, 2, 5, 9], [7, 1]]


@pytest.fixture(scope="module")
def pair(port: Port, checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(port, DraftDesign(target=TargetDesign(max_context=96)))


@pytest.mark.parametrize("proposer", [ngram(), ngram(1), lookup_or_draft(), lookup_or_draft(2, 1)])
def test_the_text_is_that_of_no_draft(pair: Pair, proposer) -> None:
    state = prefill(pair, PROMPTS, width=4, exact_rows=True)
    expected = run(state, pair, max_new_tokens=40, block_size=1, stop_token_ids=())
    found = run(state, pair, max_new_tokens=40, block_size=4, stop_token_ids=(), proposer=proposer)
    assert found.last.tokens == expected.last.tokens
    assert len(found.infos) < len(expected.infos)  # greedy texts of tiny models repeat themselves


def test_what_is_drafted_is_the_lookup_where_there_is_one_and_else_the_draft(pair: Pair) -> None:
    state = prefill(pair, PROMPTS, width=4)
    asked: list[DecodeState] = []

    def ask(state: DecodeState, pair: Pair, size: int) -> Array:
        asked.append(state)
        return lookup_or_draft()(state, pair, size)

    drafted = run(state, pair, max_new_tokens=30, block_size=4, stop_token_ids=(), proposer=ask).infos[1:]
    kinds = set()
    for seen, info in zip(asked, drafted, strict=True):
        own = pair.port.to_numpy(propose(seen, pair, block_size=4).tokens).tolist()
        for row, tokens in enumerate(seen.tokens):
            known = occurred(tokens, 2)
            kinds.add(known)
            assert list(info.drafted[row]) == (continuation(tokens, 3) if known else own[row])
    assert kinds == {False, True}
