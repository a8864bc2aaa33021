"""A state saved on one port and loaded on another goes on with the same text."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors
from dflash_fn.port import Port
from dflash_fn.records import DecodeState, Pair
from tests.helpers.runs import Run, run, visible
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

PROMPTS = [[7, 11, 5, 30, 2], [9] * 12]
DESIGNS = {
    "llama": DraftDesign(target=TargetDesign(layers=3), seed=107, taps=(0, 2, 1)),
    "qwen3": DraftDesign(target=TargetDesign(seed=20, family="qwen3", layers=3, window=6), taps=(1, 0), window=3),
    "hybrid": DraftDesign(target=TargetDesign(seed=5, family="qwen3_5", layers=4), taps=(2, 0), window=3),
}


@pytest.fixture(params=list(permutations(dflash_fn.port_names(), 2)), ids=lambda pair: "-".join(pair), scope="module")
def both(request: pytest.FixtureRequest) -> tuple[Port, Port]:
    """Each ordered pair of ports; one whose backend is not installed is skipped by name."""
    try:
        left, right = (dflash_fn.get_port(name) for name in request.param)
    except errors.BackendMissing as error:
        pytest.skip(str(error))
    return left, right


def moved(state: DecodeState, here: Pair, there: Pair, folder: Path) -> DecodeState:
    dflash_fn.save_state(folder / "state", state, here)
    return dflash_fn.load_state(folder / "state", there)


def check_moved(here: Pair, there: Pair, prompts: object, folder: Path) -> Run:
    """Decode 20 tokens here, and 40 more here and there."""
    begun = run(dflash_fn.prefill(here, prompts), here, max_new_tokens=20).last  # pyright: ignore[reportArgumentType]
    went = moved(begun, here, there, folder)
    assert (went.tokens, went.step, went.seed, went.stop) == (begun.tokens, begun.step, begun.seed, begun.stop)
    for cache in ("target_cache", "draft_cache"):
        for one, other in zip(
            visible(here.port, getattr(begun, cache)), visible(there.port, getattr(went, cache)), strict=True
        ):
            assert np.array_equal(one, other)
    stayed, gone = (run(state, pair, max_new_tokens=40) for state, pair in ((begun, here), (went, there)))
    assert gone.emitted == stayed.emitted
    assert gone.last.step == stayed.last.step
    return gone


@pytest.mark.parametrize("name", DESIGNS)
def test_forty_tokens_follow(both: tuple[Port, Port], checkpoints: Checkpoints, name: str, tmp_path: Path) -> None:
    here, there = (checkpoints.pair(port, DESIGNS[name]) for port in both)
    check_moved(here, there, PROMPTS, tmp_path)


def test_forty_tokens_of_code_follow(both: tuple[Port, Port], tmp_path: Path) -> None:
    here, there = (dflash_fn.load_zoo("tiny-code", port=port, dtype="float32") for port in both)
    prompt = here.tokenizer.encode("def add(a, b):\n    return a + b\n\n\ndef sub(")
    gone = check_moved(here, there, prompt, tmp_path)
    assert any(gone.accepted())


def test_a_next_turn_reads_the_same_text(both: tuple[Port, Port], checkpoints: Checkpoints, tmp_path: Path) -> None:
    here, there = (checkpoints.pair(port, DESIGNS["llama"]) for port in both)
    prompt = np.random.default_rng(0).integers(0, 48, 300).tolist()
    begun = run(dflash_fn.prefill(here, prompt), here, max_new_tokens=5).last
    went = moved(begun, here, there, tmp_path)
    stayed, gone = (
        run(dflash_fn.extend(state, pair, [1, 2, 3]), pair, max_new_tokens=12)
        for state, pair in ((begun, here), (went, there))
    )
    assert gone.emitted == stayed.emitted


def test_there_and_back_is_the_same_state(both: tuple[Port, Port], checkpoints: Checkpoints, tmp_path: Path) -> None:
    here, there = (checkpoints.pair(port, DESIGNS["qwen3"]) for port in both)
    begun = run(dflash_fn.prefill(here, PROMPTS), here, max_new_tokens=7).last
    back = moved(moved(begun, here, there, tmp_path), there, here, tmp_path)
    left, right = (run(state, here, max_new_tokens=12) for state in (begun, back))
    assert left.emitted == right.emitted
    assert all(np.array_equal(one, other) for one, other in zip(left.logits, right.logits, strict=True))
