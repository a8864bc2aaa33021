"""P01: whatever is proposed, the text and the bits of its logits are those of no draft."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import dflash_fn
from dflash_fn.port import Port
from tests.helpers.runs import decode_plainly, differing, run
from tests.helpers.strategies import PROPOSERS, loaded, prompts, settings_on
from tests.helpers.tiny import Checkpoints, without_draft


@given(data=st.data())
def test_p01_tokens_and_bits_are_those_of_no_draft(port: Port, checkpoints: Checkpoints, data: st.DataObject) -> None:
    """P01: with any draft, any block size up to the width, and any proposal."""
    setting = data.draw(settings_on(port))
    pair, ids = loaded(checkpoints, port, setting), data.draw(prompts(setting.vocab))
    lone = without_draft(pair)
    plain = decode_plainly(dflash_fn.prefill(lone, ids, width=setting.width), lone, 16)
    name, seed = data.draw(st.sampled_from(sorted(PROPOSERS))), data.draw(st.integers(0, 99))
    found = run(
        dflash_fn.prefill(pair, ids, width=setting.width),
        pair,
        max_new_tokens=16,
        block_size=setting.block_size,
        proposer=PROPOSERS[name]([[*ids, *plain.emitted[0]]], seed),
    )
    assert found.emitted == plain.emitted
    assert differing(found.logits[0], plain.logits[0]) == []


@given(data=st.data())
def test_p01_a_draft_changes_nothing_in_plain_decoding(
    port: Port, checkpoints: Checkpoints, data: st.DataObject
) -> None:
    """P01: at block size 1, a pair with a draft and the same pair without one are the same."""
    setting = data.draw(settings_on(port))
    ids, full = data.draw(prompts(setting.vocab)), loaded(checkpoints, port, setting)
    with_it, without_it = (
        decode_plainly(dflash_fn.prefill(pair, ids, width=setting.width), pair, 8)
        for pair in (full, without_draft(full))
    )
    assert with_it.emitted == without_it.emitted
    assert differing(with_it.logits[0], without_it.logits[0]) == []
