"""p and q in traces: the very numbers that tokens are drawn from, of the tokens that matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors
from dflash_fn.policies import (
    Policy,
    block_verification,
    budget,
    confidence_cut,
    constrained,
    match,
    token_rejection,
)
from dflash_fn.port import Port
from dflash_fn.records import Pair
from dflash_fn.sampling import Sampling, probabilities
from dflash_fn.trace import (
    LawsView,
    RowStep,
    Trace,
    check_trace,
    expected_by_rule,
    read_trace,
    record,
    whole_laws,
    write_trace,
)
from tests.helpers import proposers
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

DESIGN = DraftDesign(target=TargetDesign(layers=3), seed=107, taps=(0, 2, 1))
PROMPTS = [[7, 11, 5, 30, 2], [9] * 12]
WARM = Sampling(0.8, top_p=0.9)


@pytest.fixture
def pair(port: Port, checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(port, DESIGN)


def recorded(pair: Pair, policy: Policy, **options: Any) -> Trace:
    state = dflash_fn.prefill(pair, PROMPTS, seed=(3, 4), width=6)
    return record(state, pair, policy=policy, max_new_tokens=9, stop_token_ids=(), **options)[1]


def rows_of(trace: Trace) -> list[tuple[RowStep, LawsView]]:
    return [(row, row.laws) for rows in trace.steps for row in rows if row and row.laws]


def whole(view: Any) -> np.ndarray:
    """Return all logits of a trace that keeps them, [1, S, V]."""
    return view.values.values[None]


@pytest.mark.parametrize("policy", [token_rejection(WARM), match(WARM), block_verification(Sampling(1.0)), match()])
def test_p_and_q_are_those_of_all_logits_however_few_are_kept(pair: Pair, policy: Policy) -> None:
    few, every = recorded(pair, policy, top_k=2), recorded(pair, policy, top_k=None)
    assert [row.emitted for row, _ in rows_of(few)] == [row.emitted for row, _ in rows_of(every)]
    for (row, kept), (known, full) in zip(rows_of(few), rows_of(every), strict=True):
        size, slots = len(row.block), np.arange(len(row.block))[:, None]
        assert full.ids.shape[1] == pair.target.spec.vocab_size
        assert kept.ids.shape[1] <= 2 * 2 + 2
        p = probabilities(np, whole(known.target_logits), policy.sampling)[0]
        np.testing.assert_allclose(kept.p, p[slots, kept.ids], atol=1e-6)
        plain = probabilities(np, whole(known.target_logits), Sampling(1.0))[0]
        np.testing.assert_allclose(kept.target, plain[slots, kept.ids], atol=1e-6)
        if size > 1:
            logits = whole(known.draft_logits)
            q = probabilities(np, logits, policy.sampling if policy.drafting.streams else Sampling())[0]
            np.testing.assert_allclose(kept.q, q[slots[:-1], kept.ids[:-1]], atol=1e-6)
            np.testing.assert_allclose(kept.overlap, np.minimum(p[:-1], q).sum(-1), atol=1e-5)
            assert kept.draft is not None
            plain = probabilities(np, logits, Sampling(1.0))[0]
            np.testing.assert_allclose(kept.draft, plain[slots[:-1], kept.ids[:-1]], atol=1e-6)


CERTAIN = [
    confidence_cut(match(), 0.0),
    confidence_cut(match(WARM, drafts="argmax"), 0.0),
    constrained(budget(confidence_cut(match(WARM, drafts="argmax"), 0.01), 3)),
]


@pytest.mark.parametrize("policy", CERTAIN, ids=lambda policy: policy.name)
def test_q_is_1_at_tokens_that_no_chance_had_a_part_in(pair: Pair, policy: Policy) -> None:
    """A cut by confidence hands its rule what the draft thinks; the tokens are the draft's argmax all the same."""
    for row, view in rows_of(recorded(pair, policy, top_k=None)):
        for slot, token in enumerate(row.block[1:]):
            at = view.ids[slot] == token
            assert (view.q[slot] == at).all()
            assert view.overlap[slot] == pytest.approx(float(view.p[slot, at][0]), abs=1e-6)
        if len(row.block) > 1:
            assert view.draft is not None
            assert view.draft.max() < 1


def test_q_under_a_cut_is_what_tokens_are_drawn_from(pair: Pair) -> None:
    """With filters the confidence is that of the whole softmax, and q is not."""
    bare, cut = recorded(pair, match(WARM), top_k=None), recorded(pair, confidence_cut(match(WARM), 0.0), top_k=None)
    for (row, known), (other, view) in zip(rows_of(bare), rows_of(cut), strict=True):
        assert row.block == other.block
        np.testing.assert_array_equal(known.q, view.q)
        np.testing.assert_array_equal(known.overlap, view.overlap)


def test_p_and_q_lead_to_what_rules_would_keep(pair: Pair, tmp_path: Path) -> None:
    """Through a file, in the order of ids: the same numbers as from the logits themselves."""
    policy = token_rejection(WARM)
    write_trace(tmp_path / "a", recorded(pair, policy, top_k=None))
    trace = read_trace(tmp_path / "a")
    found, expected = expected_by_rule(trace), []
    for row, _ in rows_of(trace):
        if len(row.block) > 1:
            p, q = whole_laws(row)
            np.testing.assert_allclose(p, probabilities(np, whole(row.target_logits), WARM)[0], atol=1e-6)
            np.testing.assert_allclose(q, probabilities(np, whole(row.draft_logits), WARM)[0], atol=1e-6)
            own, drawn = (law[range(len(q)), row.block[1:]].astype(np.float64) for law in (p, q))
            expected.append(np.cumprod(np.minimum(1, own / drawn)).sum())
    assert found["token_rejection"] == pytest.approx(expected, abs=1e-9)
    assert {len(blocks) for blocks in found.values()} == {len(expected)}


@pytest.mark.parametrize("policy", [*CERTAIN[:1], match()], ids=lambda policy: policy.name)
def test_certain_drafts_at_temperature_0_are_kept_as_they_were(pair: Pair, policy: Policy) -> None:
    trace = recorded(pair, policy, top_k=None)
    taken = [row.num_accepted for row, _ in rows_of(trace) if len(row.block) > 1]
    for name, blocks in expected_by_rule(trace).items():
        assert blocks == taken, name


def test_laws_that_are_not_whole_or_not_there(pair: Pair) -> None:
    trace = recorded(pair, match(), top_k=2)
    with pytest.raises(errors.InputError, match=r"step 1, row 0: the trace keeps p and q of \d tokens a slot"):
        expected_by_rule(trace)
    bare = tuple(tuple(row and replace(row, laws=None) for row in rows) for rows in trace.steps)
    with pytest.raises(errors.InputError, match="step 1, row 0: the trace has no p and q"):
        expected_by_rule(replace(trace, steps=bare))


def test_the_tokens_that_matter_are_there(pair: Pair) -> None:
    for row, view in rows_of(recorded(pair, token_rejection(WARM), top_k=2)):
        for ids in view.ids.tolist():
            assert len(set(ids)) == len(ids)
        for slot, token in enumerate(row.block[1:]):
            assert token in view.ids[slot]
        for slot, token in enumerate(row.kept):
            assert token in view.ids[slot]
            assert view.p[slot][view.ids[slot].tolist().index(token)] > 0
        assert (np.diff(view.p, axis=-1) <= 0).all()


def test_a_proposers_token_is_certain(pair: Pair) -> None:
    for row, view in rows_of(recorded(pair, token_rejection(WARM), proposer=proposers.constant(5))):
        assert view.draft is None
        for slot, token in enumerate(row.block[1:]):
            assert view.q[slot][view.ids[slot] == token].tolist() == [1.0]
            assert view.q[slot].sum() == 1.0


def test_they_survive_a_file_and_old_files_have_none(pair: Pair, tmp_path: Path) -> None:
    trace = recorded(pair, token_rejection(WARM), top_k=3)
    write_trace(tmp_path / "new", trace)
    back = read_trace(tmp_path / "new")
    assert (back.sampling, back.lossless) == ("T=0.8 top_p=0.9", True)
    assert back.drafting == "inverse transform, stream draft"
    for (_, one), (_, other) in zip(rows_of(trace), rows_of(back), strict=True):
        for name in LawsView.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert check_trace(back, pair, policy=token_rejection(WARM)).fine
    bare = [tuple(row and replace(row, laws=None) for row in rows) for rows in trace.steps]
    write_trace(tmp_path / "old", replace(trace, steps=tuple(bare), sampling=None, drafting=None, lossless=None))
    assert rows_of(read_trace(tmp_path / "old")) == []


def test_laws_of_another_shape_are_refused(pair: Pair, tmp_path: Path) -> None:
    trace = recorded(pair, match())
    row, view = rows_of(trace)[0]
    wrong = replace(trace, steps=((replace(row, laws=replace(view, p=view.p[:, :1])), trace.steps[0][1]),))
    write_trace(tmp_path / "wrong", wrong)
    with pytest.raises(errors.StateFileError, match=r"step 0: expected laws\.p of shape \(1, 8\), got \(1, 1\)"):
        read_trace(tmp_path / "wrong")
