"""Targets with gated delta nets: a state that cannot be cropped is selected, bit for bit as if nothing was guessed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dflash_fn
from dflash_fn.opening import extend, prefill
from dflash_fn.port import Port
from dflash_fn.records import Pair
from dflash_fn.tolerances import bound
from tests.helpers import proposers
from tests.helpers.fixtures import DTYPES, need_dtype
from tests.helpers.reference import draft_logits, target_hidden_states
from tests.helpers.runs import Run, decode_plainly, differing, equal_probes, probe, run, visible
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, without_draft

HYBRID = TargetDesign(family="qwen3_5", layers=4, seed=5)
DESIGN = DraftDesign(target=HYBRID, taps=(0, 2), block_size=4)
DESIGNS = {
    "half": HYBRID,
    "no-attention": replace(HYBRID, layers=2, interval=3),
    "all-attention": replace(HYBRID, interval=1),
    "grouped": replace(HYBRID, key_heads=2, value_heads=6, key_dim=4, value_dim=12),
    "long-kernel": replace(HYBRID, kernel=6, interval=3),
    "short-kernel": replace(HYBRID, kernel=2, tied=True),
    "one-head": replace(HYBRID, value_heads=1, value_dim=4, hidden=20, inner=33, vocab=37),
}
QUICK = ("half", "grouped", "short-kernel")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DESIGNS]
"""Each design is compiled for on jax, so that most are for the slow profile; properties draw from all of them."""


def prompt_of(length: int, vocab: int = 37, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, vocab, length).tolist()


def greedy(design: TargetDesign, ids: list[int], count: int) -> list[int]:
    text = list(ids)
    for _ in range(count):
        text.append(int(np.argmax(target_hidden_states(design, text)[1][-1])))
    return text


def plain(pair: Pair, ids: list[int], width: int, count: int) -> Run:
    lone = without_draft(pair)
    return decode_plainly(prefill(lone, ids, width=width), lone, count)


def check_states(pair: Pair, ids: list[int], plan: list[int], width: int = 5) -> None:
    """Accept as the plan says, and compare every state with the one that single tokens lead to."""
    lone = without_draft(pair)
    expected = plain(pair, ids, width, sum(plan) + len(plan) + 1)
    proposer = proposers.scripted([[*ids, *expected.emitted[0]]], [[count] for count in plan])
    found = run(
        prefill(lone, ids, width=width), lone, max_new_tokens=len(expected.emitted[0]), block_size=width,
        proposer=proposer,
    )  # fmt: skip
    assert found.accepted() == plan
    assert found.emitted == expected.emitted
    assert differing(found.logits[0], expected.logits[0]) == []
    for state in found.states:
        alike = expected.states[len(state.tokens[0]) - len(ids)]
        assert equal_probes(visible(pair.port, state.target_cache), visible(pair.port, alike.target_cache))


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_the_references(port: Port, checkpoints: Checkpoints, name: str) -> None:
    design = DESIGNS[name]
    text = greedy(design, prompt_of(6), 12)
    assert plain(checkpoints.pair(port, design), text[:6], 3, 12).emitted[0] == tuple(text[6:])


def test_drafted_tokens_are_the_references(port: Port, checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(port, DESIGN)
    found = run(prefill(pair, [5, 9, 2]), pair, max_new_tokens=8)
    for before, info in zip(found.states[1:], found.infos[1:], strict=False):
        expected = draft_logits(DESIGN, list(before.tokens[0]), 4).argmax(axis=-1)
        assert info.drafted[0] == tuple(expected.tolist())


# --- rollback: FAULTS, row 1 ---


@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize(
    "length", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_any_acceptance_after_prompts_around_the_kernels_length(
    port: Port, checkpoints: Checkpoints, length: int, accepted: int
) -> None:
    check_states(checkpoints.pair(port, HYBRID), prompt_of(length), [accepted] * 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_acceptance_in_every_dtype(port: Port, checkpoints: Checkpoints, dtype: str) -> None:
    need_dtype(port, dtype)
    check_states(checkpoints.pair(port, HYBRID, dtype), prompt_of(40), [0, 4, 2, 1, 3])


@pytest.mark.parametrize("name", NAMES)
def test_mixed_acceptance_in_every_design(port: Port, checkpoints: Checkpoints, name: str) -> None:
    check_states(checkpoints.pair(port, DESIGNS[name]), prompt_of(40), [0, 4, 2, 1, 3])


@pytest.mark.parametrize("width", [1, 3, 7, 8, 11, 16, 32])
def test_bits_hold_at_every_width(port: Port, checkpoints: Checkpoints, width: int) -> None:
    pair, ids = checkpoints.pair(port, HYBRID), prompt_of(9)
    expected = plain(pair, ids, width, 24)
    proposer = proposers.corrupted([[*ids, *expected.emitted[0]]], seed=3, rate=0.2)
    found = run(prefill(pair, ids, width=width), pair, max_new_tokens=24, block_size=width, proposer=proposer)
    assert found.emitted == expected.emitted
    assert differing(found.logits[0], expected.logits[0]) == []


@pytest.mark.parametrize("count", range(5))
def test_select_gives_the_state_of_single_tokens(port: Port, checkpoints: Checkpoints, count: int) -> None:
    """Also the one that another block of other tokens leads to: nothing after `count` leaves a trace."""
    pair = checkpoints.pair(port, HYBRID)
    cache = prefill(pair, prompt_of(7), width=5).target_cache
    options = {"taps": (), "head": True, "exact_rows": False}

    def after(block: list[int], size: int) -> list[np.ndarray]:
        tokens = port.asarray(np.array([block], dtype=np.int64), pair.target.device)
        made = port.target_pass(pair.target, cache, tokens, **options)
        return visible(port, port.select(made.family, (size,)))

    block = prompt_of(5)
    assert equal_probes(after(block, count), after(block[:count] + [1] * (5 - count), count))


# --- prefill: FAULTS, row 2 ---


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_prompt_in_pieces_gives_the_same_state(port: Port, checkpoints: Checkpoints, size: int) -> None:
    pair, ids = checkpoints.pair(port, DESIGN), prompt_of(10)
    state = prefill(pair, ids[:size])
    for first in range(size, 10, size):
        state = extend(state, pair, ids[first : first + size])
    assert equal_probes(probe(state, pair), probe(prefill(pair, ids), pair))


@pytest.mark.parametrize("kept", [0, 4, 9])
def test_extending_a_saved_state_whose_buffer_held_other_tokens(
    port: Port, checkpoints: Checkpoints, kept: int
) -> None:
    pair, ids = checkpoints.pair(port, DESIGN), prompt_of(10)
    state = prefill(pair, ids[: kept + 1])
    run(state, pair, max_new_tokens=9, proposer=proposers.at_random(1))
    extended = extend(state, pair, ids[kept + 1 :]) if kept < 9 else state
    assert equal_probes(probe(extended, pair), probe(prefill(pair, ids), pair))


@pytest.mark.parametrize("length", [255, 257, 300])
def test_extending_after_decoding_past_a_whole_chunk(port: Port, checkpoints: Checkpoints, length: int) -> None:
    """The state goes back to its last whole chunk, where a state that cannot be cropped must have been kept."""
    pair, ids = checkpoints.pair(port, DESIGN), prompt_of(length)
    last = run(prefill(pair, ids), pair, max_new_tokens=12).last
    extended = extend(last, pair, [3, 1, 4])
    whole = prefill(pair, [*last.tokens[0], 3, 1, 4])
    assert equal_probes(probe(extended, pair), probe(whole, pair))


@pytest.mark.parametrize(("forgets", "swings"), [(1.0, 1.0), (8.0, 8.0), (200.0, 4.0)])
def test_prefill_agrees_with_single_tokens_to_rounding(
    port: Port, checkpoints: Checkpoints, forgets: float, swings: float
) -> None:
    """Chunks of any size give the same logits, caches and states but for rounding, however fast heads forget."""
    pair, ids = checkpoints.pair(port, replace(HYBRID, forgets=forgets, swings=swings)), prompt_of(150)
    logits, caches = [], []
    for sizes in ([150], [64, 64, 22], [40, 33, 77], [1] * 150):
        cache, first, made = port.new_cache(pair.target, 150), 0, []
        for size in sizes:
            tokens = port.asarray(np.array([ids[first : first + size]], dtype=np.int64), pair.target.device)
            made.append(port.target_pass(pair.target, cache, tokens, taps=(), head=True, exact_rows=False))
            cache, first = port.select(made[-1].family, (size,)), first + size
        logits.append(np.concatenate([port.to_numpy(one.logits)[0] for one in made]))
        caches.append(port.export_cache(cache))
    limit = bound("float32", "logits", pair.target.spec)
    for found in logits[:-1]:
        assert (np.abs(found - logits[-1]).max(-1) <= limit * np.abs(logits[-1]).max(-1)).all()
    limit = bound("float32", "hidden", pair.target.spec)
    for held in caches[:-1]:
        for name, bits in held.items():
            other = caches[-1][name].values
            assert np.abs(bits.values - other).max() <= limit * np.abs(other).max(), name


# --- rows, forks, files ---


@pytest.mark.parametrize("exact_rows", [False, True])
def test_ragged_rows_are_their_single_row_runs(port: Port, checkpoints: Checkpoints, exact_rows: bool) -> None:
    pair, rows = checkpoints.pair(port, DESIGN), [prompt_of(3), prompt_of(7), prompt_of(1)]
    texts = [[*ids, *plain(pair, ids, 4, 20).emitted[0]] for ids in rows]
    plan = [[3, 1, 0], [0, 3, 2], [2, 0, 3]]
    together = run(
        prefill(pair, rows, exact_rows=exact_rows), pair, max_new_tokens=14, proposer=proposers.scripted(texts, plan)
    )
    assert together.accepted(0)[:3] == [3, 0, 2]
    for row, ids in enumerate(rows):
        assert together.emitted[row] == tuple(texts[row][len(ids) :][:14])
        alone = run(
            prefill(pair, ids), pair, max_new_tokens=14,
            proposer=proposers.scripted([texts[row]], [[counts[row]] for counts in plan]),
        )  # fmt: skip
        if exact_rows:
            assert differing(together.logits[row], alone.logits[0]) == []


def test_states_are_values(port: Port, checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(port, DESIGN)
    found = run(prefill(pair, prompt_of(6)), pair, max_new_tokens=10)
    seen = [probe(state, pair) for state in found.states]
    for state in found.states:
        run(state, pair, max_new_tokens=9, proposer=proposers.at_random(2))
    assert all(equal_probes(probe(state, pair), known) for state, known in zip(found.states, seen, strict=True))


def test_a_saved_state_goes_on_bit_for_bit(port: Port, checkpoints: Checkpoints, tmp_path: Path) -> None:
    pair = checkpoints.pair(port, DESIGN)
    state = run(prefill(pair, [prompt_of(258), prompt_of(5)]), pair, max_new_tokens=6).last
    dflash_fn.save_state(tmp_path / "state", state, pair)
    loaded = dflash_fn.load_state(tmp_path / "state", pair)
    assert equal_probes(probe(loaded, pair), probe(state, pair))
    again, known = (extend(one, pair, [[1, 2], [3]]) for one in (loaded, state))
    assert equal_probes(probe(again, pair), probe(known, pair))


def test_what_a_state_holds_of_its_delta_nets_does_not_grow(port: Port, checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(port, DESIGNS["no-attention"])
    state = prefill(pair, prompt_of(5), width=4)
    sizes = {
        sum(bits.values.nbytes for bits in port.export_cache(one.target_cache).values())
        for one in run(state, pair, max_new_tokens=40).states
    }
    assert len(sizes) == 1
