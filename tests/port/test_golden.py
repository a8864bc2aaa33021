"""Golden traces hold on every port, a port's own traces hold on it bit for bit, and each mistake is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

import dflash_fn
from dflash_fn.port import Port
from dflash_fn.records import Pair
from dflash_fn.trace import Trace, check_trace, read_trace, record
from tests.golden.make import GOLDEN, path_of
from tests.helpers.faults import FAULTS, faulty
from tests.helpers.fixtures import DTYPES, need_dtype
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, without_draft

DESIGN = DraftDesign(target=TargetDesign(layers=3), seed=107, taps=(0, 1))
PROMPTS = [[7, 11, 5, 30, 2], [9] * 12]


def recorded(pair: Pair, width: int = 7, **options) -> Trace:
    options = {"max_new_tokens": 12, "stop_token_ids": (), **options}
    return record(dflash_fn.prefill(pair, PROMPTS, width=width), pair, **options)[1]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_trace_holds(port: Port, checkpoints: Checkpoints, name: str) -> None:
    pair = GOLDEN[name].load(port, checkpoints)
    report = check_trace(read_trace(path_of(name)), pair)
    assert report.first is None, f"{report.first} (if the pair or the format changed: python -m tests.golden.make)"
    assert report.near_ties == ()
    assert report.compared["target_logits"] >= 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trace_of_the_port_itself_holds_bit_for_bit(port: Port, checkpoints: Checkpoints, dtype: str) -> None:
    need_dtype(port, dtype)
    report = check_trace(recorded(checkpoints.pair(port, DESIGN, dtype)), checkpoints.pair(port, DESIGN, dtype))
    assert (report.first, report.bits_identical, report.first_bits, report.near_ties) == (None, True, None, ())
    assert {one.size for one in report.largest} == {0.0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_trace_in_float32_holds_in_a_coarser_dtype(port: Port, checkpoints: Checkpoints, dtype: str) -> None:
    need_dtype(port, dtype)
    report = check_trace(recorded(checkpoints.pair(port, DESIGN)), checkpoints.pair(port, DESIGN, dtype))
    assert (report.first, report.bits_identical) == (None, None)


def test_a_trace_without_a_draft(port: Port, checkpoints: Checkpoints) -> None:
    pair = without_draft(checkpoints.pair(port, DESIGN))
    report = check_trace(recorded(pair), pair)
    assert (report.first, report.bits_identical) == (None, True)
    assert "draft_logits" not in report.compared


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_named_where_it_is_made(port: Port, checkpoints: Checkpoints, name: str) -> None:
    fault, pair = FAULTS[name], checkpoints.pair(port, DESIGN)
    report = check_trace(recorded(pair), replace(pair, port=faulty(port, fault)))
    assert report.first is not None
    assert (report.first.quantity, report.first.step) == (fault.quantity, fault.step), report.first
    assert report.first.size > report.first.bound
    assert not report.fine
    assert report.bits_identical is False


def test_without_a_mistake_the_same_wrapper_is_fine(port: Port, checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(port, DESIGN)
    fine = replace(FAULTS["tap"], wrong={})
    report = check_trace(recorded(pair), replace(pair, port=faulty(port, fine)))
    assert (report.first, report.bits_identical) == (None, True)
