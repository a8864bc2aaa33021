"""Traces: recorded without touching the decode, written and read whole, and wrong ones refused or named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import dflash_fn
from dflash_fn import container, errors
from dflash_fn.constraints import presence
from dflash_fn.container import Bits
from dflash_fn.policies import Policy, block_verification, confidence_cut, constrained, match, named
from dflash_fn.policies.named import POLICIES
from dflash_fn.records import Pair, StopReason, Verdict
from dflash_fn.sampling import Sampling
from dflash_fn.trace import RowStep, Trace, check_trace, read_trace, record, write_trace
from dflash_fn.trace.choices import compare_choice
from dflash_fn.trace.comparing import Place
from dflash_fn.trace.remade import remade
from dflash_fn.trace.report import Deviation, report_of
from dflash_fn.trace.summary import floats, summarize, view_logits
from tests.helpers import proposers
from tests.helpers.fixtures import checkpoints
from tests.helpers.runs import run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, without_draft

__all__ = ["checkpoints"]

DESIGN = DraftDesign(target=TargetDesign(layers=3), seed=107, taps=(0, 2, 1))
PROMPTS = [[7, 11, 5, 30, 2], [9] * 12]


@pytest.fixture(scope="module")
def pair(checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(dflash_fn.get_port("torch"), DESIGN)


@pytest.fixture(scope="module")
def trace(pair: Pair) -> Trace:
    return recorded(pair)


def recorded(pair: Pair, prompts: Any = PROMPTS, **options: Any) -> Trace:
    options = {"max_new_tokens": 9, "stop_token_ids": (), **options}
    return record(dflash_fn.prefill(pair, prompts, seed=3, width=6), pair, **options)[1]


def row_of(trace: Trace, step: int, row: int) -> RowStep:
    found = trace.steps[step][row]
    assert found is not None
    return found


def edited(trace: Trace, step: int, row: int, **fields: Any) -> Trace:
    """Return the trace with other values in one row of a step."""
    rows = list(trace.steps[step])
    rows[row] = replace(row_of(trace, step, row), **fields)
    return replace(trace, steps=(*trace.steps[:step], tuple(rows), *trace.steps[step + 1 :]))


# recording


@pytest.mark.parametrize(
    "options", [{}, {"block_size": 2}, {"block_size": 1}, {"stop_token_ids": 10}, {"max_new_tokens": 0}]
)
def test_recording_is_decoding(pair: Pair, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 9, "stop_token_ids": (), **options}
    state = dflash_fn.prefill(pair, PROMPTS, width=6)
    steps = run(state, pair, **options)
    end, trace = record(state, pair, **options)
    assert (end.tokens, end.stop, end.step) == (steps.last.tokens, steps.last.stop, steps.last.step)
    assert len(trace.steps) == len(steps.infos)
    for rows, info in zip(trace.steps, steps.infos, strict=True):
        assert tuple(row.emitted if row else () for row in rows) == info.emitted
        assert tuple(row.block[1:] if row else None for row in rows) == tuple(
            drafted if emitted else None for drafted, emitted in zip(info.drafted, info.emitted, strict=True)
        )
    assert trace.num_tokens == sum(map(len, steps.emitted))


def test_a_trace_says_what_it_is_of(pair: Pair, trace: Trace) -> None:
    said = (trace.tool, trace.port, trace.dtype, trace.device, trace.pair, trace.policy, trace.streams)
    assert said == (f"dflash_fn {dflash_fn.__version__}", "torch", "float32", "cpu", pair.name, "match", ())
    assert (trace.width, trace.block_size, trace.seed, trace.exact_rows) == (6, 4, (3, 3), False)
    assert (trace.max_new_tokens, trace.stop_token_ids) == (9, ())
    assert (trace.prompts, trace.drafts, trace.proposer) == (tuple(map(tuple, PROMPTS)), True, False)


def test_what_a_step_holds(pair: Pair, trace: Trace) -> None:
    row = row_of(trace, 2, 1)
    assert (row.num_accepted, row.emitted, row.kept) == (3, row.kept, (*row.block[1:], row.next_token))
    assert row.block[0] == row_of(trace, 1, 1).emitted[-1]
    assert row.features is not None
    assert row.features.values.shape == (len(row_of(trace, 1, 1).emitted), 3 * 32)
    assert row.draft_logits is not None
    assert row.target_logits is not None
    assert (row.draft_logits.values.values.shape, row.target_logits.values.values.shape) == ((3, 8), (4, 8))
    assert row.draft_logits.ids is not None
    assert row.target_logits.ids is not None
    assert tuple(row.draft_logits.ids[:, 0].tolist()) == row.block[1:]
    assert tuple(row.target_logits.ids[:, 0].tolist()) == row.kept
    assert row.target_cache is not None
    assert row.draft_cache is not None
    assert (row.target_cache.length, row.draft_cache.length) == (11 + 1 + 4 + 4, 11 + 1 + 4)
    assert {kind: fresh.shape for kind, fresh in row.target_cache.fresh.items()} == {
        "keys": (3, 4, 4), "values": (3, 4, 4),
    }  # fmt: skip
    assert {kind: fresh.shape for kind, fresh in row.draft_cache.fresh.items()} == {
        "keys": (2, 4, 4), "values": (2, 4, 4),
    }  # fmt: skip


def test_what_prefill_leaves(trace: Trace) -> None:
    for ids, start in zip(PROMPTS, trace.start, strict=True):
        assert start.features is not None
        assert start.features.shape == (len(ids) - 1, 3, 4)
        assert start.target_cache is not None
        assert start.target_cache.length == len(ids) - 1
        assert start.target_cache.fresh["keys"].shape == (3, len(ids) - 1, 4)


def test_nothing_is_copied(pair: Pair) -> None:
    state = dflash_fn.prefill(pair, [1, 2, 3], width=6)
    end, _ = record(state, pair, max_new_tokens=30, stop_token_ids=())
    caches: Any = (end.target_cache, end.draft_cache)
    assert [cache.buffer.counts.copies for cache in caches] == [0, 0]


def test_a_row_that_stopped_is_none_from_then_on(pair: Pair) -> None:
    trace = recorded(pair, max_new_tokens=12, stop_token_ids=4)
    assert row_of(trace, 1, 0).stop is StopReason.STOP_TOKEN
    assert all(rows[0] is None for rows in trace.steps[2:])
    assert check_trace(trace, pair).fine


@pytest.mark.parametrize("top_k", [2, 8, 48, 100, None])
def test_how_many_logits_are_kept(pair: Pair, top_k: int | None) -> None:
    trace = recorded(pair, top_k=top_k)
    logits = row_of(trace, 1, 0).target_logits
    assert logits is not None
    assert (logits.ids is None) == (top_k is None or top_k >= 48)
    assert logits.values.values.shape == (4, min(top_k or 48, 48))
    assert check_trace(trace, pair).bits_identical


def test_a_proposers_tokens_are_given(pair: Pair) -> None:
    trace = recorded(pair, proposer=proposers.at_random(1))
    assert (trace.proposer, row_of(trace, 1, 0).draft_logits) == (True, None)
    report = check_trace(trace, pair)
    assert report.fine
    assert "drafted" not in report.compared


def test_a_state_that_was_extended_can_be_recorded(pair: Pair) -> None:
    state = dflash_fn.extend(dflash_fn.prefill(pair, [1, 2, 3], width=6), pair, [4, 5])
    trace = record(state, pair, max_new_tokens=5)[1]
    assert trace.prompts == ((1, 2, 3, 4, 5),)
    assert check_trace(trace, pair).bits_identical


def test_rows_computed_as_if_alone(pair: Pair) -> None:
    state = dflash_fn.prefill(pair, PROMPTS, width=6, exact_rows=True)
    trace = record(state, pair, max_new_tokens=5, stop_token_ids=())[1]
    assert trace.exact_rows
    assert check_trace(trace, pair).bits_identical


def test_what_cannot_be_recorded(pair: Pair) -> None:
    state = dflash_fn.prefill(pair, [1, 2, 3])
    later = dflash_fn.decode(state, pair, max_new_tokens=2)
    with pytest.raises(errors.InputError, match="record: got a state after 2 steps, expected one from prefill"):
        record(later, pair)
    with pytest.raises(errors.InputError, match="top_k: got 1, expected an integer of at least 2"):
        record(state, pair, top_k=1)
    with pytest.raises(errors.InputError, match="block_size 9 is above"):
        record(state, pair, block_size=9)


# policies with random numbers


def drawing(scale: float = 1.0) -> Policy:
    """Emit what the target says, whatever is drawn; but be handed numbers."""

    def rule(xp: Any, drafted: Any, logits: Any, q: Any, uniforms: Any) -> Verdict:
        verdict = match().rule(xp, drafted, logits, q, uniforms)
        return Verdict(verdict.num_accepted, (verdict.next_token + (uniforms["accept"][:, 0] > scale)) % 48)

    return Policy("drawing", rule, lossless=True, streams=("accept", "target"))


def test_uniforms_are_kept_and_compared(pair: Pair) -> None:
    trace = recorded(pair, policy=drawing())
    row = row_of(trace, 1, 0)
    assert {stream: len(values) for stream, values in row.uniforms.items()} == {"accept": 4, "target": 4}
    report = check_trace(trace, pair, policy=drawing())
    assert (report.fine, report.compared["uniforms.accept"]) == (True, report.compared["verdict"])
    wrong = edited(trace, 1, 0, uniforms={**row.uniforms, "accept": row.uniforms["accept"] + 0.25})
    assert_first(check_trace(wrong, pair, policy=drawing()).first, "uniforms.accept", 1, 0)
    assert_first(check_trace(trace, pair, policy=drawing(-1.0)).first, "verdict", 0, None)


@pytest.mark.parametrize(
    "policy",
    [
        match(Sampling(0.9)),
        match(Sampling(0.9), noise="inverse", drafts="independent"),
        block_verification(Sampling(1.0)),
        confidence_cut(match(), 0.5),
        constrained(match(Sampling(1.0)), presence(0.5)),
    ],
    ids=lambda policy: policy.name,
)
def test_policies_that_draw_can_be_recorded(pair: Pair, policy: Policy) -> None:
    trace = recorded(pair, policy=policy)
    assert check_trace(trace, pair, policy=policy).bits_identical


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=9, top_p=0.9, min_p=0.01)], ids=str)
def test_a_policy_with_a_name_is_made_anew(pair: Pair, trace: Trace, name: str, sampling: Sampling) -> None:
    if name == "typical" and sampling == Sampling():
        return
    policy = named(name, sampling)
    said = replace(trace, policy=policy.name, streams=policy.streams, sampling=str(sampling))
    again = remade(said)
    assert again is not None
    assert (again.name, again.streams, again.sampling) == (policy.name, policy.streams, sampling)
    assert remade(replace(said, policy="mine")) is None
    assert remade(replace(said, sampling=None)) is None


def test_a_temperature_that_may_have_been_rounded_is_not_believed(pair: Pair, trace: Trace) -> None:
    policy = match(Sampling(0.123456789))
    said = replace(trace, policy=policy.name, streams=policy.streams, sampling=str(policy.sampling))
    assert said.sampling == "T=0.123457"
    assert remade(said) is None


def test_a_trace_names_its_policy(pair: Pair) -> None:
    policy = match(Sampling(0.8), noise="inverse")
    assert check_trace(recorded(pair, policy=policy), pair).bits_identical


def test_the_policy_must_be_the_one_of_the_trace(pair: Pair, trace: Trace) -> None:
    with pytest.raises(errors.InputError, match=r"made with policy 'drawing' \(streams: accept, target\), got 'match'"):
        check_trace(recorded(pair, policy=drawing()), pair)
    with pytest.raises(errors.InputError, match=r"made with policy 'match' \(streams: none\), got 'drawing'"):
        check_trace(trace, pair, policy=drawing())


# checking


def assert_first(first: Deviation | None, quantity: str, step: int | None, slot: int | None) -> None:
    assert first is not None
    assert (first.quantity, first.step, first.slot) == (quantity, step, slot), str(first)


def test_every_quantity_is_compared_in_order(pair: Pair, trace: Trace) -> None:
    report = check_trace(trace, pair)
    assert [one.quantity for one in report.largest] == [
        "target_cache.length", "target_cache.keys", "target_cache.values", "context_features",
        "draft_cache.length", "draft_cache.keys", "draft_cache.values", "anchor", "target_logits", "verdict",
        "emitted", "stop", "draft_logits", "drafted",
    ]  # fmt: skip
    rows = sum(row is not None for step in trace.steps for row in step)
    assert (report.compared["verdict"], report.compared["target_cache.length"]) == (rows, rows + 2)
    assert (report.steps, report.num_tokens) == (len(trace.steps), 18)


@pytest.mark.parametrize(
    ("fields", "quantity", "slot"),
    [
        ({"block": (0, 10, 10, 10)}, "anchor", None),
        ({"num_accepted": 2}, "verdict", None),
        ({"next_token": 11}, "verdict", 3),
        ({"emitted": (10, 10)}, "emitted", None),
        ({"stop": StopReason.STOP_TOKEN}, "stop", None),
    ],
)
def test_an_integer_that_differs_is_named(
    pair: Pair, trace: Trace, fields: dict[str, Any], quantity: str, slot: int | None
) -> None:
    report = check_trace(edited(trace, 2, 1, **fields), pair)
    assert_first(report.first, quantity, 2, slot)
    assert report.first is not None
    assert report.first.row == 1


def test_a_drafted_token_that_differs_is_named_and_does_not_cascade(pair: Pair, trace: Trace) -> None:
    row = row_of(trace, 1, 0)
    wrong = edited(trace, 1, 0, block=(row.block[0], row.block[1], 40, row.block[3]))
    report = check_trace(wrong, pair)
    assert_first(report.first, "drafted", 1, 2)
    assert report.first is not None
    assert "recorded 40, found" in report.first.note
    later = [one for one in report.largest if one.step is not None and one.step > 1 and one.beyond]
    assert later == []


def test_numbers_that_differ_are_named_with_size_and_bound(pair: Pair, trace: Trace) -> None:
    row = row_of(trace, 2, 1)
    assert row.target_logits is not None
    values = row.target_logits.values.values.copy()
    values[2, 5] += 0.25
    logits = replace(row.target_logits, values=Bits("float32", values))
    first = check_trace(edited(trace, 2, 1, target_logits=logits), pair).first
    assert_first(first, "target_logits", 2, 2)
    assert first is not None
    assert first.size == pytest.approx(0.25, rel=1e-3)
    assert 0 < first.bound < 1e-3
    assert "target_logits at step 2, row 1, slot 2: off by 0.25, bound" in str(first)


def test_the_first_token_and_layer_beyond_is_named_and_the_largest_listed(pair: Pair, trace: Trace) -> None:
    start = trace.start[1]
    assert start.target_cache is not None
    keys = start.target_cache.fresh["keys"].copy()
    keys[1, 4:, 1] += 0.5
    keys[2, 2:, 1] += 5.0
    wrong = replace(start, target_cache=replace(start.target_cache, fresh={"keys": keys}))
    report = check_trace(replace(trace, start=(trace.start[0], wrong)), pair)
    assert_first(report.first, "target_cache.keys", None, 4)
    assert report.first is not None
    assert (report.first.layer, report.first.row, report.first.where) == (1, 1, "prefill, row 1, position 4, layer 1")
    largest = next(one for one in report.largest if one.quantity == "target_cache.keys")
    assert (largest.layer, round(largest.size, 3)) == (2, 5.0)


def test_bits_alone_may_differ(pair: Pair, trace: Trace) -> None:
    report = check_trace(edited(trace, 1, 0, features_digest="0" * 32), pair)
    assert (report.fine, report.bits_identical) == (True, False)
    assert report.first_bits is not None
    assert (report.first_bits.quantity, report.first_bits.step) == ("context_features", 1)
    elsewhere = check_trace(replace(trace, port="elsewhere"), pair)
    assert (elsewhere.fine, elsewhere.bits_identical, elsewhere.first_bits) == (True, None, None)


def test_a_model_that_is_not_finite_ends_the_check(pair: Pair, trace: Trace) -> None:
    class Port:
        def __getattr__(self, name: str) -> Any:
            return getattr(pair.port, name)

        def target_pass(self, *args: Any, head: bool, **options: Any) -> Any:
            made: Any = pair.port.target_pass(*args, head=head, **options)
            return replace(made, logits=made.logits * float("nan")) if head else made

    port: Any = Port()
    report = check_trace(trace, replace(pair, port=port))
    assert_first(report.first, "target_logits", 0, 0)
    assert report.compared["finite"] == 1
    assert "draft_logits" not in report.compared


def test_another_pair_is_refused(checkpoints: Checkpoints, pair: Pair, trace: Trace) -> None:
    other = checkpoints.pair(pair.port, replace(DESIGN, target=replace(DESIGN.target, seed=18)))
    with pytest.raises(errors.StateFileError, match=r"made with another target \(pair .*, target digest [0-9a-f]{32}"):
        check_trace(trace, other)
    other = checkpoints.pair(pair.port, replace(DESIGN, seed=1))
    with pytest.raises(errors.StateFileError, match="made with another draft"):
        check_trace(trace, other)
    with pytest.raises(errors.InputError, match="made with a draft, and the pair has none"):
        check_trace(trace, without_draft(pair))
    with pytest.raises(errors.StateFileError, match="holds token 99; this target's ids end at 47"):
        check_trace(replace(trace, prompts=((99,), (1,))), pair)
    logits = view_logits(Bits("float32", np.zeros((4, 60), dtype=np.float32)), None)
    with pytest.raises(errors.StateFileError, match="holds token 59; this target's ids end at 47"):
        check_trace(edited(trace, 1, 0, target_logits=logits), pair)


# near ties


def judged(
    ours: list[float], theirs: list[float], tokens: tuple[int, int], bound: float = 0.005, top_k: int | None = None
) -> Deviation:
    view = view_logits(Bits("float64", np.array([theirs])), top_k)
    found = Bits("float64", np.array([ours]))
    return compare_choice(Place(1, 0), "verdict", tokens, view, found, bound, index=0, first_slot=0)


def test_a_near_tie_has_both_gaps_within_the_bound() -> None:
    near = judged([9.95, 10.0, 0.0], [10.0, 9.98, 0.0], (0, 1))
    assert (near.near_tie, near.beyond) == (True, False)
    assert "recorded 0, found 1, gaps 0.02 and 0.05, tie bound 0.1" in str(near)
    assert "a near tie" in str(near)


@pytest.mark.parametrize(
    ("ours", "theirs", "tokens"),
    [
        ([9.0, 10.0, 0.0], [10.0, 9.98, 0.0], (0, 1)),
        ([9.95, 10.0, 0.0], [10.0, 9.0, 0.0], (0, 1)),
        ([10.0, 10.0, 0.0], [10.0, 10.0, 0.0], (0, 1)),
        ([10.0, 9.98, 0.0], [10.0, 9.98, 0.0], (0, 1)),
    ],
    ids=["far apart here", "far apart there", "an exact tie on both sides", "not the best here"],
)
def test_what_is_no_near_tie(ours: list[float], theirs: list[float], tokens: tuple[int, int]) -> None:
    found = judged(ours, theirs, tokens)
    assert (found.near_tie, found.beyond, found.size) == (False, True, 1.0)


def test_a_token_that_was_not_kept_is_no_better_than_the_least_that_was() -> None:
    assert judged([9.9, 9.95, 10.0], [10.0, 9.99, 9.0], (0, 2), top_k=2).near_tie
    assert not judged([5.0, 9.95, 10.0], [10.0, 5.0, 4.0], (0, 2), top_k=2).near_tie


def test_near_ties_are_counted_and_fine() -> None:
    near = judged([9.95, 10.0, 0.0], [10.0, 9.98, 0.0], (0, 1))
    report = report_of([near], recorded="", replayed="", steps=1, num_tokens=1, comparable_bits=True)
    assert (report.fine, report.near_ties, report.bits_identical) == (True, (near,), None)


# numbers


def test_a_summary_sees_an_exchange_of_two_elements() -> None:
    values = np.random.default_rng(0).normal(size=(3, 16))
    other = values[:, [1, 0, *range(2, 16)]]
    differ = np.abs(summarize(values) - summarize(other)).max(axis=0) > 1e-3
    assert differ.tolist() == [False, False, False, True]


def test_no_number_of_a_summary_is_off_by_more_than_the_elements() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(200, 24))
    off = rng.uniform(-1e-2, 1e-2, size=values.shape)
    assert np.abs(summarize(values) - summarize(values + off)).max() <= 1e-2


def test_bfloat16_is_read_from_its_bits() -> None:
    bits = Bits("bfloat16", np.array([0x3F80, 0xC000, 0x7F80], dtype=np.uint16))
    assert floats(bits).tolist() == [1.0, -2.0, float("inf")]


def test_the_first_of_equal_logits_is_kept_first() -> None:
    view = view_logits(Bits("float32", np.array([[1.0, 3.0, 2.0, 3.0]], dtype=np.float32)), 3)
    assert view.ids is not None
    assert (view.ids.tolist(), view.values.values.tolist()) == ([[1, 3, 2]], [[3.0, 3.0, 2.0]])


# files


def contents(path: Path) -> Any:
    """Return what a file holds; its bytes are not in the same order each time."""
    header, arrays = container.read(path, "trace")
    return header, {name: (bits.dtype, bits.values.shape, bits.values.tobytes()) for name, bits in arrays.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reading_what_was_written(checkpoints: Checkpoints, dtype: str, tmp_path: Path) -> None:
    pair = checkpoints.pair(dflash_fn.get_port("torch"), DESIGN, dtype)
    for name, trace in {"some": recorded(pair), "all": recorded(pair, top_k=None, policy=drawing())}.items():
        write_trace(tmp_path / name, trace)
        again = read_trace(tmp_path / name)
        write_trace(tmp_path / "again", again)
        assert contents(tmp_path / name) == contents(tmp_path / "again")
        assert check_trace(again, pair, policy=drawing() if name == "all" else None).bits_identical


def test_a_prompt_of_one_token(pair: Pair, tmp_path: Path) -> None:
    trace = recorded(pair, [5])
    write_trace(tmp_path / "trace", trace)
    assert check_trace(read_trace(tmp_path / "trace"), pair).bits_identical


def test_integers_can_be_read_by_people(trace: Trace, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", trace)
    raw = (tmp_path / "trace").read_bytes()
    metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    header = json.loads(metadata["dflash_fn"])
    assert (header["kind"], header["prompts"], header["width"]) == ("trace", PROMPTS, 6)
    assert header["steps"][2][1]["block"] == list(row_of(trace, 2, 1).block)


def least(trace: Trace) -> Trace:
    """Return what another engine may know: integers, and the logits of the target."""
    unknown = dict.fromkeys(["features", "features_digest", "draft_cache", "draft_logits", "target_cache"])

    def known(row: RowStep) -> RowStep:
        logits = row.target_logits and replace(row.target_logits, summary=None, digest=None)
        return replace(row, **unknown, target_logits=logits)

    steps = tuple(tuple(known(row) if row else None for row in rows) for rows in trace.steps)
    return replace(trace, tool="engine 1", port="engine", target=None, draft=None, start=(), steps=steps)


def test_an_engine_may_leave_out_what_it_does_not_know(pair: Pair, trace: Trace, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", least(trace))
    report = check_trace(read_trace(tmp_path / "trace"), pair)
    assert (report.fine, report.bits_identical) == (True, None)
    assert set(report.compared) == {"anchor", "target_logits", "drafted", "verdict", "emitted", "stop"}


def test_a_drafted_token_is_judged_without_the_engines_draft_logits(pair: Pair, trace: Trace) -> None:
    block = row_of(trace, 1, 0).block
    report = check_trace(edited(least(trace), 1, 0, block=(*block[:3], (block[3] + 1) % 48)), pair)
    assert_first(report.first, "drafted", 1, 3)
    assert report.first is not None
    assert "gaps unknown and" in report.first.note


def rewritten(trace: Trace, path: Path, change: Any) -> Path:
    """Write a trace whose header went through a function, with the right digest."""
    write_trace(path, trace)
    header, arrays = container.read(path, "trace")
    header = {name: value for name, value in header.items() if name not in ("kind", "version", "dtypes")}
    change(header, arrays)
    container.write(path, "trace", header, arrays)
    return path


def set_in(header: Any, *path: Any, value: Any) -> None:
    for name in path[:-1]:
        header = header[name]
    header[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("prompts",), [], "expected a prompt and a seed for each row, got 0 prompts and 2 seeds"),
        (("seed",), [1], "got 2 prompts and 1 seeds"),
        (("start",), [{}], "start: expected 2 rows, got 1"),
        (("steps", 0), [None, None], "step 0: expected 2 rows, of which one has not stopped; got 0 of 2"),
        (("steps", 1, 0, "block"), [1], "step 1: expected blocks of one length from 1 to the width 6"),
        (("steps", 1, 0, "num_accepted"), 4, "step 1: accepts 4 of 3 and emits 1"),
        (("steps", 1, 0, "emitted"), [], "step 1: accepts 0 of 3 and emits 0"),
        (("steps", 1, 0, "next_token"), -1, "step 1: a negative token"),
        (("steps", 1, 0, "stop"), "TIRED", "not a trace as the format describes it (KeyError('TIRED'))"),
        (("steps", 1, 0), 7, "not a trace as the format describes it (AttributeError("),
        (("width",), None, "not a trace as the format describes it (TypeError("),
    ],
)
def test_a_header_that_makes_no_sense(trace: Trace, tmp_path: Path, path: tuple, value: Any, text: str) -> None:
    file = rewritten(trace, tmp_path / "trace", lambda header, arrays: set_in(header, *path, value=value))
    with pytest.raises(errors.StateFileError) as caught:
        read_trace(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert text in str(caught.value)


def test_fields_that_are_missing(trace: Trace, tmp_path: Path) -> None:
    file = rewritten(trace, tmp_path / "trace", lambda header, arrays: header.pop("policy"))
    with pytest.raises(errors.StateFileError, match=r"not a trace as the format describes it \(KeyError\('policy'\)\)"):
        read_trace(file)
    file = rewritten(trace, tmp_path / "trace", lambda header, arrays: arrays.pop("1.0.target_logits.values"))
    with pytest.raises(errors.StateFileError, match=r"KeyError\('1.0.target_logits.values'\)"):
        read_trace(file)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("1.0.target_logits.ids", (4, 3), "1.0.target_logits: values of shape (4, 8), ids of shape (4, 3)"),
        (
            "start.0.target_cache.keys",
            (3, 4),
            "start.0.target_cache.keys: got shape (3, 4), expected [layers",
        ),
    ],
)
def test_arrays_of_another_shape(trace: Trace, tmp_path: Path, name: str, shape: tuple[int, ...], text: str) -> None:
    made = Bits("float32", np.zeros(shape, dtype=np.float32))
    file = rewritten(trace, tmp_path / "trace", lambda header, arrays: arrays.update({name: made}))
    with pytest.raises(errors.StateFileError) as caught:
        read_trace(file)
    assert text in str(caught.value)


def test_a_state_is_no_trace(pair: Pair, tmp_path: Path) -> None:
    dflash_fn.save_state(tmp_path / "state", dflash_fn.prefill(pair, [1, 2]), pair)
    with pytest.raises(errors.StateFileError, match="state: holds a state, expected a trace"):
        read_trace(tmp_path / "state")


# pages


@pytest.mark.parametrize("page", ["docs/explanation/trace-format.md", "docs/how-to/save-and-resume.md"])
def test_examples_of_a_page_run(page: str, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, str(root / "tests" / "helpers" / "run_blocks.py"), str(root / page)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_in_another_order(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(errors.InputError) as caught:
        write_trace(trace, tmp_path / "trace")  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == "path: got Trace, expected the path of a file; the arguments are (path, trace)"
    with pytest.raises(errors.InputError, match="path: got Trace, expected the path of a file"):
        read_trace(trace)  # pyright: ignore[reportArgumentType]
