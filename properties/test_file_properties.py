"""P12: saving a state and loading it again is the identity."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import dflash_fn
from dflash_fn.opening import extend, prefill
from dflash_fn.port import Port
from dflash_fn.trace import check_trace, read_trace, record, write_trace
from tests.helpers.runs import equal_probes, probe, run
from tests.helpers.strategies import loaded, prompts, settings_on
from tests.helpers.tiny import Checkpoints

MOST = st.integers(0, 9)


@given(data=st.data())
def test_p12_a_loaded_state_is_the_saved_one(port: Port, checkpoints: Checkpoints, data: st.DataObject) -> None:
    """P12: a state that was saved and loaded looks the same, and decodes and extends to the same bits."""
    setting = data.draw(settings_on(port))
    pair = loaded(checkpoints, port, setting)
    rows = data.draw(st.lists(prompts(setting.vocab), min_size=1, max_size=3))
    seeds = [data.draw(st.integers(0, 2**64 - 1)) for _ in rows]
    stops = data.draw(st.sets(st.integers(0, setting.vocab - 1), max_size=3))
    begun = prefill(pair, rows, seed=seeds, width=setting.width, exact_rows=data.draw(st.booleans()))
    options = {"block_size": setting.block_size, "stop_token_ids": tuple(stops)}
    state = run(begun, pair, max_new_tokens=data.draw(MOST), **options).last
    with tempfile.TemporaryDirectory() as folder:
        dflash_fn.save_state(Path(folder) / "state", state, pair)
        again = dflash_fn.load_state(Path(folder) / "state", pair)
    for name in ("tokens", "step", "seed", "stop", "width", "exact_rows"):
        assert getattr(again, name) == getattr(state, name)
    added = [[1]] * len(rows)
    for one, other in ((state, again), (extend(state, pair, added), extend(again, pair, added))):
        assert equal_probes(probe(one, pair), probe(other, pair))
        left, right = (run(it, pair, max_new_tokens=5, **options) for it in (one, other))
        assert left.emitted == right.emitted
        assert equal_probes(left.logits, right.logits)


@given(data=st.data())
def test_p12_a_trace_that_was_read_holds_bit_for_bit(port: Port, checkpoints: Checkpoints, data: st.DataObject) -> None:
    """P12 of traces: one that was written and read holds on the port that made it, in every bit."""
    setting = data.draw(settings_on(port))
    pair = loaded(checkpoints, port, setting)
    rows = data.draw(st.lists(prompts(setting.vocab), min_size=1, max_size=2))
    begun = prefill(pair, rows, width=setting.width, exact_rows=data.draw(st.booleans()))
    top_k = data.draw(st.none() | st.integers(2, setting.vocab))
    end, trace = record(begun, pair, top_k=top_k, max_new_tokens=data.draw(MOST), block_size=setting.block_size)
    with tempfile.TemporaryDirectory() as folder:
        write_trace(Path(folder) / "trace", trace)
        report = check_trace(read_trace(Path(folder) / "trace"), pair)
    assert report.first is None
    assert report.bits_identical is not False
    assert report.num_tokens == sum(map(len, end.tokens)) - sum(map(len, rows))
