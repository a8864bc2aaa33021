"""Texts and drafted tokens against plain numpy in float64, which has no cache, no block and no padding."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_fn.opening import prefill
from dflash_fn.port import Port
from tests.helpers import proposers
from tests.helpers.reference import draft_logits, target_hidden_states
from tests.helpers.runs import run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

TARGETS = {
    "llama": TargetDesign(),
    "tied": TargetDesign(tied=True),
    "bias": TargetDesign(bias=True),
    "llama3": TargetDesign(rope="llama3"),
    "yarn": TargetDesign(rope="yarn"),
    "qwen3": TargetDesign(seed=20, family="qwen3"),
    "window": TargetDesign(seed=20, family="qwen3", window=4),
    "one-kv-head": TargetDesign(kv_heads=1),
    "three-layers": TargetDesign(layers=3),
}
DRAFTS = {
    "plain": {},
    "yarn": {"rope": "yarn"},
    "sliding": {"window": 4},
    "sliding-both-ways": {"window": 4, "causal": False},
    "causal": {"causal": True},
    "one-layer": {"layers": 1, "taps": (1,)},
}


def greedy(design: TargetDesign, ids: list[int], count: int) -> list[int]:
    """Return the prompt and its continuation, the whole text computed anew for every token."""
    text = list(ids)
    for _ in range(count):
        text.append(int(np.argmax(target_hidden_states(design, text)[1][-1])))
    return text


@pytest.mark.parametrize("start", [2, 3, 4, 9])
@pytest.mark.parametrize("accepted", [0, 2, 4])
@pytest.mark.parametrize("name", TARGETS)
def test_the_text_is_the_references(port: Port, checkpoints: Checkpoints, name: str, accepted: int, start: int) -> None:
    design = TARGETS[name]
    pair = checkpoints.pair(port, design)
    text = greedy(design, list(range(5, 5 + start)), 12)
    proposer = proposers.scripted([text], [[accepted]] * 12)
    found = run(prefill(pair, text[:start], width=5), pair, max_new_tokens=12, block_size=5, proposer=proposer)
    assert found.emitted[0] == tuple(text[start:])
    assert found.accepted()[:2] == [accepted] * 2


@pytest.mark.parametrize("name", DRAFTS)
def test_drafted_tokens_are_the_references(port: Port, checkpoints: Checkpoints, name: str) -> None:
    design = DraftDesign(block_size=5, **DRAFTS[name])
    pair = checkpoints.pair(port, design)
    state = prefill(pair, [5, 9, 2])
    found = run(state, pair, max_new_tokens=10)
    for before, info in zip(found.states[1:], found.infos[1:], strict=False):
        expected = draft_logits(design, list(before.tokens[0]), 5).argmax(axis=-1)
        assert info.drafted[0] == tuple(expected.tolist())
