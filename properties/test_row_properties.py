"""P06 and P08: rows do not depend on one another, and each ends exactly where it must."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import dflash_fn
from dflash_fn.opening import prefill
from dflash_fn.port import Port
from dflash_fn.records import StopReason
from tests.helpers.runs import decode_plainly, differing, run
from tests.helpers.strategies import PROPOSERS, loaded, prompts, settings_on
from tests.helpers.tiny import Checkpoints

BUDGET = 10


def drawn_rows(vocab: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(prompts(vocab, longest=12), min_size=2, max_size=4)


@given(data=st.data())
def test_p06_exact_rows_are_single_row_runs_bit_for_bit(
    port: Port, checkpoints: Checkpoints, data: st.DataObject
) -> None:
    """P06: with `exact_rows`, tokens, drafted tokens and logits of a row are those that it has alone."""
    setting = data.draw(settings_on(port))
    pair, rows = loaded(checkpoints, port, setting), data.draw(drawn_rows(setting.vocab))
    options = {"max_new_tokens": BUDGET, "block_size": setting.block_size}
    together = run(prefill(pair, rows, width=setting.width, exact_rows=True), pair, **options)
    for row, ids in enumerate(rows):
        alone = run(prefill(pair, ids, width=setting.width), pair, **options)
        assert together.emitted[row] == alone.emitted[0]
        assert differing(together.logits[row], alone.logits[0]) == []
        drafted = [info.drafted[row] for info in together.infos]
        assert drafted[: len(alone.infos)] == [info.drafted[0] for info in alone.infos]


@given(data=st.data())
def test_p06_a_rows_tokens_are_its_own(port: Port, checkpoints: Checkpoints, data: st.DataObject) -> None:
    """P06: in float32, where no two logits tie within rounding, tokens do not depend on neighbours either way."""
    setting = data.draw(settings_on(port, ["float32"]))
    pair, rows = loaded(checkpoints, port, setting), data.draw(drawn_rows(setting.vocab))
    texts = [[*ids, *decode_plainly(prefill(pair, ids, width=setting.width), pair, BUDGET).emitted[0]] for ids in rows]
    name, seed = data.draw(st.sampled_from(sorted(PROPOSERS))), data.draw(st.integers(0, 99))
    found = run(
        prefill(pair, rows, width=setting.width),
        pair,
        max_new_tokens=BUDGET,
        block_size=setting.block_size,
        proposer=PROPOSERS[name](texts, seed),
    )
    assert [list(ids) for ids in found.last.tokens] == texts


@given(data=st.data())
def test_p08_a_row_emits_exactly_its_budget_or_up_to_its_first_stop(
    port: Port, checkpoints: Checkpoints, data: st.DataObject
) -> None:
    """P08: min(max_new_tokens, tokens up to the first stop) tokens, and no state goes beyond them."""
    setting = data.draw(settings_on(port))
    pair, ids = loaded(checkpoints, port, setting), data.draw(prompts(setting.vocab))
    state = prefill(pair, ids, width=setting.width)
    text = decode_plainly(state, pair, 20).emitted[0]
    size = setting.block_size
    budget = data.draw(st.sampled_from([0, 1, size, size + 1]) | st.integers(0, 20))
    stop_ids = data.draw(st.sets(st.sampled_from(text), max_size=2) | st.sets(st.integers(0, setting.vocab - 1)))
    name, seed = data.draw(st.sampled_from(sorted(PROPOSERS))), data.draw(st.integers(0, 99))
    options = {"block_size": size, "proposer": PROPOSERS[name]([[*ids, *text]], seed)}
    found = run(state, pair, max_new_tokens=budget, stop_token_ids=stop_ids, **options)
    first = next((index + 1 for index, token in enumerate(text) if token in stop_ids), len(text) + 1)
    assert found.emitted[0] == text[: min(budget, first)]
    assert port.lengths(found.last.target_cache) == (len(ids) + min(budget, first) - 1,)
    if budget:
        reason = StopReason.STOP_TOKEN if first <= budget else StopReason.MAX_NEW_TOKENS
        assert found.last.stop == (reason,)
    assert dflash_fn.decode(found.last, pair, max_new_tokens=0, **options).tokens == found.last.tokens
