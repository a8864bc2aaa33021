"""P02 to P05: states are values; what follows from one does not depend on what else was done."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import dflash_fn
from dflash_fn.opening import extend, prefill
from dflash_fn.port import Port
from dflash_fn.records import DecodeState, Pair
from tests.helpers.runs import Run, equal_probes, probe, run
from tests.helpers.strategies import PROPOSERS, Setting, loaded, prompts, settings_on
from tests.helpers.tiny import Checkpoints

BUDGET = 9
PIECES = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def guessed(setting: Setting, data: st.DataObject) -> dict[str, object]:
    """Draw who guesses; the true text is not known, so that "right" means something else here: it repeats token 0."""
    name, seed = data.draw(st.sampled_from(sorted(PROPOSERS))), data.draw(st.integers(0, 99))
    proposer = PROPOSERS[name]([[0] * 400], seed)
    return {"proposer": proposer, "block_size": setting.block_size, "max_new_tokens": BUDGET}


def same_run(left: Run, right: Run) -> bool:
    drafted = [[info.drafted for info in found.infos] for found in (left, right)]
    return drafted[0] == drafted[1] and left.emitted == right.emitted and equal_probes(left.logits, right.logits)


@given(data=st.data())
def test_p02_every_state_of_a_run_stays_as_it_was(port: Port, checkpoints: Checkpoints, data: st.DataObject) -> None:
    """P02: a state that is kept is bit-identical after everything that came later, and can be decoded from again."""
    setting = data.draw(settings_on(port))
    pair = loaded(checkpoints, port, setting)
    options = guessed(setting, data)
    state = prefill(pair, data.draw(prompts(setting.vocab)), width=setting.width)
    kept, seen = [state], [probe(state, pair)]
    for later, _ in dflash_fn.rounds(state, pair, stop_token_ids=(), **options):  # pyright: ignore[reportArgumentType]
        kept.append(later)
        seen.append(probe(later, pair))
    for index in data.draw(st.lists(st.integers(0, len(kept) - 1), min_size=1, max_size=3)):
        extend(kept[index], pair, [1, 2])
        missing = len(kept[-1].tokens[0]) - len(kept[index].tokens[0])
        assert run(kept[index], pair, **{**options, "max_new_tokens": missing}).last.tokens == kept[-1].tokens
    for before, old in zip(seen, kept, strict=True):
        assert equal_probes(before, probe(old, pair))


@given(data=st.data())
def test_p03_forks_of_a_state_do_not_see_each_other(port: Port, checkpoints: Checkpoints, data: st.DataObject) -> None:
    """P03: two continuations of one state, taken turn by turn, equal their separate runs."""
    setting = data.draw(settings_on(port))
    pair = loaded(checkpoints, port, setting)
    ids = data.draw(prompts(setting.vocab))
    options = [guessed(setting, data), guessed(setting, data)]
    lead = data.draw(st.integers(0, 6))

    def begun() -> DecodeState:
        return run(prefill(pair, ids, width=setting.width), pair, max_new_tokens=lead, block_size=1).last

    apart = [run(begun(), pair, **chosen) for chosen in options]
    state = begun()
    turns = [
        dflash_fn.rounds(state, pair, stop_token_ids=(), **chosen)  # pyright: ignore[reportArgumentType]
        for chosen in options
    ]
    lasts = [state, state]
    for index in data.draw(st.lists(st.integers(0, 1), max_size=16)) + [0] * BUDGET + [1] * BUDGET:
        lasts[index], _ = next(turns[index], (lasts[index], None))
    for last, expected in zip(lasts, apart, strict=True):
        assert last.tokens == expected.last.tokens
        assert equal_probes(probe(last, pair), probe(expected.last, pair))


@given(data=st.data())
def test_p04_decoding_in_parts_is_decoding(port: Port, checkpoints: Checkpoints, data: st.DataObject) -> None:
    """P04: n and then m tokens are n + m tokens, in text and in caches."""
    setting = data.draw(settings_on(port))
    pair = loaded(checkpoints, port, setting)
    options = guessed(setting, data)
    state = prefill(pair, data.draw(prompts(setting.vocab)), width=setting.width)
    first = data.draw(st.integers(0, BUDGET))
    whole = run(state, pair, **options).last
    part = run(state, pair, **{**options, "max_new_tokens": first}).last
    parts = run(part, pair, **{**options, "max_new_tokens": BUDGET - first}).last
    assert parts.tokens == whole.tokens
    assert equal_probes(probe(parts, pair), probe(whole, pair))


@given(data=st.data())
def test_p05_extending_equals_one_prompt(port: Port, checkpoints: Checkpoints, data: st.DataObject) -> None:
    """P05: however a text came about, in pieces and with answers in between, it is one prompt, bit for bit."""
    setting = data.draw(settings_on(port))
    pair = loaded(checkpoints, port, setting)
    options = guessed(setting, data)
    state = prefill(pair, data.draw(prompts(setting.vocab)), width=setting.width, seed=3)
    for count in data.draw(PIECES):
        answered = data.draw(st.integers(0, 6))
        state = run(state, pair, **{**options, "max_new_tokens": answered}).last
        state = extend(state, pair, _ids(pair, len(state.tokens[0]), count))
    whole = prefill(pair, list(state.tokens[0]), width=setting.width, seed=3)
    assert (state.tokens, state.step, state.stop, state.seed) == (whole.tokens, whole.step, whole.stop, whole.seed)
    assert equal_probes(probe(state, pair), probe(whole, pair))
    assert same_run(run(state, pair, **options), run(whole, pair, **options))


def _ids(pair: Pair, first: int, count: int) -> list[int]:
    return [(7 * (first + index)) % pair.target.spec.vocab_size for index in range(count)]
