"""Propose, verify, select, step: what each of them counts, where it stands, and when a row ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors
from dflash_fn.opening import prefill
from dflash_fn.policies import Policy
from dflash_fn.port import Port
from dflash_fn.records import Array, ContextFeatures, DecodeState, Pair, StopReason, Verdict
from dflash_fn.rng import Stream, uniforms
from dflash_fn.steps import Room, cut, propose, select, step, verify
from tests.helpers import proposers
from tests.helpers.reference import draft_logits, target_hidden_states
from tests.helpers.runs import decode_plainly, run, same
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, target_tensors, without_draft, write_checkpoint

DESIGN = DraftDesign(block_size=4)
PROMPT = [5, 9, 2, 7, 4]
ROOM = [Room(100, StopReason.MAX_NEW_TOKENS)]


@pytest.fixture(scope="module")
def pair(port: Port, checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(port, DESIGN)


@pytest.fixture(scope="module")
def text(pair: Pair) -> list[int]:
    """The prompt and its greedy continuation."""
    return text_of(pair, 30)


def text_of(pair: Pair, count: int, prompt: list[int] | None = None) -> list[int]:
    prompt = prompt or PROMPT
    return [*prompt, *decode_plainly(prefill(pair, prompt, width=8), pair, count).emitted[0]]


def opened(pair: Pair, width: int | None = None) -> DecodeState:
    """The state after the opening step."""
    return run(prefill(pair, PROMPT, width=width), pair, max_new_tokens=1).last


# --- one step ---


def test_the_opening_step_drafts_nothing_and_emits_one_token(pair: Pair, text: list[int]) -> None:
    state = prefill(pair, PROMPT)
    assert state.step == 0
    assert propose(state, pair).tokens.shape == (1, 0)
    after, info = step(state, pair, policy=dflash_fn.match(), room=ROOM)
    assert (info.step, info.block_size, info.drafted, info.num_accepted) == (0, 1, ((),), (0,))
    assert info.emitted == ((text[5],),)
    assert after.step == 1
    assert after.tokens == (tuple(text[:6]),)


def test_a_step_is_propose_verify_and_select(pair: Pair) -> None:
    state = opened(pair)
    after, info = step(state, pair, policy=dflash_fn.match(), room=ROOM)
    proposal = propose(state, pair)
    branches = verify(state, pair, proposal)
    again = select(state, pair, proposal, branches, info.emitted)
    assert tuple(map(tuple, pair.port.to_numpy(proposal.tokens).tolist())) == info.drafted
    assert same(pair.port.to_numpy(branches.logits), pair.port.to_numpy(info.logits))
    assert (again.tokens, again.step, again.stop) == (after.tokens, after.step, after.stop)
    assert isinstance(again.context_features, ContextFeatures)
    assert again.context_features.counts == (len(info.emitted[0]),)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_block_of_b_has_b_minus_1_drafted_tokens(pair: Pair, block_size: int) -> None:
    state = opened(pair)
    assert propose(state, pair, block_size=block_size).tokens.shape == (1, block_size - 1)
    _, info = step(state, pair, policy=dflash_fn.match(), room=ROOM, block_size=block_size)
    assert info.block_size == block_size
    assert len(info.drafted[0]) == block_size - 1


def test_a_verification_is_as_wide_as_the_state_whatever_the_block_size(pair: Pair) -> None:
    state = opened(pair, width=8)
    for block_size in (1, 2, 4, 8):
        proposer = proposers.at_random(0)
        proposal = propose(state, pair, block_size=block_size, proposer=proposer)
        assert verify(state, pair, proposal).logits.shape == (1, 8, 48)


def test_without_a_draft_nothing_is_drafted(pair: Pair) -> None:
    lone = without_draft(pair)
    found = run(prefill(lone, PROMPT, width=4), lone, max_new_tokens=6, block_size=4)
    assert [info.block_size for info in found.infos] == [1] * 6
    assert found.last.context_features is None
    assert found.last.draft_cache is None


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_select_takes_the_state_after_any_number_of_tokens(pair: Pair, text: list[int], count: int) -> None:
    state = opened(pair)
    size = len(state.tokens[0])
    proposal = propose(state, pair, proposer=proposers.right([text]))
    branches = verify(state, pair, proposal)
    after = select(state, pair, proposal, branches, [text[size : size + count]])
    assert after.tokens[0] == tuple(text[: size + count])
    assert pair.port.lengths(after.target_cache) == (size - 1 + count,)
    assert decode_plainly(after, pair, 5).emitted[0] == tuple(text[size + count : size + count + 5])


def test_uniforms_are_named_by_position_or_by_step_and_slot(pair: Pair) -> None:
    """Stream `target` is keyed by the position of the token that is drawn, the others by step and slot."""
    seen = []

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        seen.append({name: pair.port.to_numpy(values) for name, values in uniforms.items()})
        return dflash_fn.match().rule(xp, drafted, logits, q, uniforms)

    policy = Policy("watching", rule, lossless=True, streams=("target", "accept", "recover"))
    state = prefill(pair, [[5, 9, 2], [7, 4, 11, 3]], seed=[3, 2**64 - 1])
    found = run(state, pair, max_new_tokens=8, policy=policy)
    for before, info, drawn in zip(found.states, found.infos, seen, strict=False):
        slots = np.arange(info.block_size)
        for row, (seed, ids) in enumerate(zip(before.seed, before.tokens, strict=True)):
            by_block = (len(ids) << 32) + slots
            named = {"target": (Stream.TARGET, len(ids) + slots)}
            named |= {"accept": (Stream.ACCEPT, by_block), "recover": (Stream.RECOVER, by_block)}
            assert drawn.keys() == named.keys()
            for name, (stream, counters) in named.items():
                values = drawn[name]
                assert values.shape == (2, info.block_size)
                assert np.array_equal(values[row], uniforms(seed, stream, counters).astype(values.dtype))


@pytest.mark.parametrize(("block_size", "count"), [(4, 5), (2, 3), (1, 2)])
def test_select_refuses_more_tokens_than_were_verified(
    pair: Pair, text: list[int], block_size: int, count: int
) -> None:
    state = opened(pair)
    proposal = propose(state, pair, block_size=block_size)
    branches = verify(state, pair, proposal)
    assert message(select, state, pair, proposal, branches, [text[6 : 6 + count]]) == (
        f"select: row 0: got {count} emitted tokens, expected at most {block_size}: "
        f"the block holds {block_size - 1} drafted tokens and one more follows"
    )


def test_select_refuses_other_rows(pair: Pair) -> None:
    state = opened(pair)
    proposal = propose(state, pair)
    branches = verify(state, pair, proposal)
    found = message(select, state, pair, proposal, branches, [[1], [2]])
    assert found == "select: got tokens for 2 rows, the state has 1"


def test_verify_refuses_a_block_that_is_wider_than_the_state(pair: Pair) -> None:
    narrow, wide = opened(pair, width=4), opened(pair, width=8)
    assert message(verify, narrow, pair, propose(wide, pair, block_size=8)) == (
        "verify: got a block of 1 rows and 8 slots for a state of 1 rows and width 4; "
        "propose from this state, with block_size=4 or less"
    )


def test_verify_refuses_a_block_of_other_rows(pair: Pair) -> None:
    two = run(prefill(pair, [PROMPT, PROMPT]), pair, max_new_tokens=1).last
    found = message(verify, opened(pair), pair, propose(two, pair))
    assert found.startswith("verify: got a block of 2 rows and 4 slots for a state of 1 rows and width 4; ")


def test_step_and_propose_refuse_what_is_no_policy_or_proposer(pair: Pair) -> None:
    state = opened(pair)
    with pytest.raises(errors.InputError, match="policy: got 'match' of type str, expected a Policy"):
        step(state, pair, policy="match", room=ROOM)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.InputError, match="proposer: got 'none', expected a function"):
        propose(state, pair, proposer="none")  # pyright: ignore[reportArgumentType]


# --- a state and a pair that is not its own ---


ENTRIES: dict[str, Any] = {
    "decode": dflash_fn.decode,
    "rounds": dflash_fn.rounds,
    "propose": propose,
    "extend": lambda state, pair: dflash_fn.extend(state, pair, [1]),
    "step": lambda state, pair: step(state, pair, policy=dflash_fn.match(), room=ROOM),
    "save": lambda state, pair: dflash_fn.save_state("never", state, pair),
}


@pytest.fixture(params=ENTRIES)
def enter(request: pytest.FixtureRequest) -> Any:
    return ENTRIES[request.param]


def message(act: Any, *arguments: Any) -> str:
    """Do what must be refused; return what the error says."""
    with pytest.raises(errors.InputError) as caught:
        act(*arguments)
    return str(caught.value)


def test_a_state_without_draft_and_a_pair_with_one(pair: Pair, enter: Any) -> None:
    lone = without_draft(pair)
    state = run(prefill(lone, PROMPT, width=4), lone, max_new_tokens=2).last
    found = message(enter, state, pair)
    assert found.startswith("state: was made, or went on, without a draft, and this pair has draft ")
    assert found.endswith(
        "; leave the draft out by dataclasses.replace(pair, draft=None), or prefill(pair, state.tokens)"
    )


def test_a_state_that_went_on_without_its_draft_is_not_drafted_for(pair: Pair, text: list[int], enter: Any) -> None:
    state = run(opened(pair), without_draft(pair), max_new_tokens=5).last
    assert state.tokens[0] == tuple(text[:11])
    assert (state.draft_cache, state.context_features) == (None, None)
    assert message(enter, state, pair).startswith("state: was made, or went on, without a draft, and this pair has ")


def test_a_state_of_another_target_is_refused(port: Port, pair: Pair, checkpoints: Checkpoints, enter: Any) -> None:
    """The other target has the same shapes, so that nothing else would tell."""
    other = checkpoints.pair(port, replace(DESIGN, target=replace(DESIGN.target, seed=20)))
    assert message(enter, opened(pair), other) == (
        f"state: was made with target {checkpoints.folder(DESIGN.target)}, and this pair has target "
        f"{checkpoints.folder(replace(DESIGN.target, seed=20))}; use the pair that it was made with, or carry it over "
        "by save_state and load_state, or prefill again"
    )


def test_a_state_of_another_draft_is_refused(port: Port, pair: Pair, checkpoints: Checkpoints, enter: Any) -> None:
    other = checkpoints.pair(port, replace(DESIGN, seed=2))
    assert message(enter, opened(pair), other) == (
        f"state: was made with draft {checkpoints.folder(DESIGN)}, and this pair has draft "
        f"{checkpoints.folder(replace(DESIGN, seed=2))}; use the pair that it was made with, or "
        "prefill(pair, state.tokens)"
    )


def test_a_state_of_another_dtype_is_refused(port: Port, pair: Pair, checkpoints: Checkpoints, enter: Any) -> None:
    dtype = next(name for name in port.info().dtypes if name != "float32")
    found = message(enter, opened(pair), checkpoints.pair(port, DESIGN, dtype))
    assert found.startswith(f"state: was made with dtype float32, and this pair has dtype {dtype}; use the pair that")


def test_a_state_of_another_port_is_refused(port: Port, pair: Pair, enter: Any) -> None:
    class Elsewhere:
        """Another port, which is not even asked."""

        name = "abacus"

    other = replace(pair, port=Elsewhere())  # pyright: ignore[reportArgumentType]
    found = message(enter, opened(pair), other)
    assert found.startswith(f"state: was made with port {port.name}, and this pair has port abacus; use the pair that")


def test_a_pair_that_is_loaded_again_goes_on_with_a_state(port: Port, pair: Pair, checkpoints: Checkpoints) -> None:
    again = dflash_fn.load_pair(checkpoints.folder(DESIGN.target), checkpoints.folder(DESIGN), port=port)
    assert again.target.dtype == "float32"
    state = opened(pair)
    assert dflash_fn.decode(state, again, max_new_tokens=9).tokens == dflash_fn.decode(
        state, pair, max_new_tokens=9
    ).tokens  # fmt: skip


def test_where_a_checkpoint_lies_does_not_change_with_the_current_folder(
    port: Port, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = checkpoints.folder(DESIGN.target)
    monkeypatch.chdir(folder.parent)
    lone = dflash_fn.load_pair(folder.name, port=port)
    state = prefill(lone, PROMPT)
    monkeypatch.chdir(tmp_path)
    assert dflash_fn.decode(state, lone, max_new_tokens=1).step == 1
    assert dflash_fn.decode(state, checkpoints.pair(port, DESIGN.target), max_new_tokens=1).step == 1


# --- budgets and stop tokens ---


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 5, 6, 9])
def test_a_draft_that_is_always_right_spends_exactly_the_budget(pair: Pair, text: list[int], budget: int) -> None:
    proposer = proposers.right([text])
    found = run(prefill(pair, PROMPT), pair, max_new_tokens=budget, proposer=proposer)
    assert found.emitted[0] == tuple(text[5 : 5 + budget])
    whole, rest = divmod(max(budget - 1, 0), 4)  # one token comes from the opening step, and then four a step
    assert found.accepted() == [3] * whole + [rest - 1] * (rest > 0)
    again = run(found.last, pair, max_new_tokens=budget, proposer=proposer)
    assert again.emitted[0] == tuple(text[5 + budget : 5 + 2 * budget])


@pytest.mark.parametrize("budget", [1, 4, 5])
def test_a_spent_budget_is_the_reason_to_stop(pair: Pair, budget: int) -> None:
    found = run(prefill(pair, PROMPT), pair, max_new_tokens=budget)
    assert found.last.stop == (StopReason.MAX_NEW_TOKENS,)
    assert [state.stop for state in found.states[:-1]] == [(None,)] * len(found.infos)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("offset", range(10))
def test_a_row_ends_at_the_first_stop_token_wherever_it_is_in_the_block(
    port: Port, pair: Pair, text: list[int], offset: int, single: bool
) -> None:
    token = text[5 + offset]
    end = 5 + text[5:].index(token) + 1
    stop = token if single else [token, _absent(text)]
    proposer = proposers.right([text])
    found = run(prefill(pair, PROMPT), pair, stop_token_ids=stop, proposer=proposer)
    assert found.last.tokens[0] == tuple(text[:end])
    assert found.last.stop == (StopReason.STOP_TOKEN,)
    assert port.lengths(found.last.target_cache) == (end - 1,)
    assert sum(len(info.emitted[0]) for info in found.infos) == end - 5
    assert run(found.last, pair, max_new_tokens=5).infos == ()


def _absent(text: list[int]) -> int:
    return min(set(range(48)) - set(text))


def test_of_two_stop_tokens_the_first_in_the_text_ends_the_row(pair: Pair, text: list[int]) -> None:
    first, second = text[7], next(token for token in text[8:] if token not in text[5:8])
    found = run(prefill(pair, PROMPT), pair, stop_token_ids=[second, first], proposer=proposers.right([text]))
    assert found.last.tokens[0] == tuple(text[: 5 + text[5:].index(first) + 1])


def test_a_stop_token_in_the_prompt_stops_nothing(pair: Pair, text: list[int]) -> None:
    token = next(token for token in PROMPT if token not in text[5:13])
    assert len(run(prefill(pair, PROMPT), pair, max_new_tokens=8, stop_token_ids=token).emitted[0]) == 8


def test_a_stop_token_that_is_the_last_of_the_budget_counts_as_a_stop(pair: Pair, text: list[int]) -> None:
    offset = next(i for i in range(1, 20) if text[5 + i] not in text[5 : 5 + i])
    found = run(prefill(pair, PROMPT), pair, max_new_tokens=offset + 1, stop_token_ids=text[5 + offset])
    assert found.last.stop == (StopReason.STOP_TOKEN,)


def test_the_targets_own_stop_tokens_count_unless_others_are_given(
    port: Port, checkpoints: Checkpoints, text: list[int]
) -> None:
    token = text[8]
    pair = checkpoints.pair(port, replace(DESIGN, target=replace(DESIGN.target, eos=(_absent(text), token))))
    state = prefill(pair, PROMPT)
    ended = dflash_fn.decode(state, pair, max_new_tokens=20)
    assert ended.tokens[0] == tuple(text[: 5 + text[5:].index(token) + 1])
    assert len(dflash_fn.decode(state, pair, max_new_tokens=20, stop_token_ids=()).tokens[0]) == 25


def test_the_end_of_the_context_stops_a_row(port: Port, checkpoints: Checkpoints, text: list[int]) -> None:
    pair = checkpoints.pair(port, replace(DESIGN, target=replace(DESIGN.target, max_context=12)))
    found = run(prefill(pair, PROMPT), pair, proposer=proposers.right([text]))
    assert found.last.tokens[0] == tuple(text[:12])
    assert found.last.stop == (StopReason.CONTEXT,)
    assert run(found.last, pair).infos == ()


def test_a_full_context_is_told_apart_from_a_spent_budget(port: Port, checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(port, replace(DESIGN, target=replace(DESIGN.target, max_context=12)))
    state = dflash_fn.decode(prefill(pair, PROMPT), pair, max_new_tokens=7)
    assert state.stop == (StopReason.MAX_NEW_TOKENS,)
    assert dflash_fn.decode(state, pair, max_new_tokens=7).stop == (StopReason.CONTEXT,)


def test_cut_keeps_the_first_stop_token_and_nothing_after_it() -> None:
    room = Room(3, StopReason.CONTEXT)
    assert cut([5, 7, 9, 7], frozenset({7}), room) == ((5, 7), StopReason.STOP_TOKEN)
    assert cut([5, 6, 7, 8], frozenset({8}), room) == ((5, 6, 7), StopReason.CONTEXT)
    assert cut([5, 6], frozenset({8}), room) == ((5, 6), None)
    assert cut([5], frozenset(), Room(0, StopReason.CONTEXT)) == ((), StopReason.CONTEXT)


# --- mask tokens, ties ---


def test_a_token_that_is_the_mask_token_can_be_emitted(port: Port, checkpoints: Checkpoints, text: list[int]) -> None:
    pair = checkpoints.pair(port, replace(DESIGN, mask=text[7]))
    assert run(prefill(pair, PROMPT), pair, max_new_tokens=20).emitted[0] == tuple(text[5:25])
    found = run(prefill(pair, PROMPT), pair, max_new_tokens=20, proposer=proposers.right([text]))
    assert found.emitted[0] == tuple(text[5:25])


def test_mask_token_0_and_a_target_that_emits_0(port: Port, checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(port, replace(DESIGN, mask=0))
    text = text_of(pair, 12, [38, 39])
    assert 0 in text
    for proposer in (None, proposers.right([text])):
        found = run(prefill(pair, [38, 39]), pair, max_new_tokens=12, proposer=proposer)
        assert found.emitted[0] == tuple(text[2:])


def test_the_mask_token_may_be_a_stop_token(port: Port, checkpoints: Checkpoints, text: list[int]) -> None:
    pair = checkpoints.pair(port, replace(DESIGN, mask=text[9]))
    found = run(prefill(pair, PROMPT), pair, stop_token_ids=text[9])
    assert found.emitted[0] == tuple(text[5 : 5 + text[5:].index(text[9]) + 1])


@pytest.fixture(scope="module")
def tied_pair(port: Port, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target whose head has each row twice: token t and t + 24 always tie exactly."""
    design = TargetDesign()
    tensors = target_tensors(design)
    tensors["lm_head.weight"][24:] = tensors["lm_head.weight"][:24]
    folder = write_checkpoint(tmp_path_factory.mktemp("ties") / port.name, design.config, tensors)
    return dflash_fn.load_pair(folder, port=port, dtype="bfloat16" if "bfloat16" in port.info().dtypes else None)


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_an_exact_tie_takes_the_first_index(tied_pair: Pair, width: int) -> None:
    found = decode_plainly(prefill(tied_pair, PROMPT, width=width), tied_pair, 20)
    logits = found.logits[0]
    assert same(logits[:, :24], logits[:, 24:])
    assert found.emitted[0] == tuple(np.argmax(logits[:, :24], axis=-1).tolist())


def test_a_drafted_token_that_ties_but_is_not_the_first_is_rejected(tied_pair: Pair) -> None:
    text = [*PROMPT, *decode_plainly(prefill(tied_pair, PROMPT, width=4), tied_pair, 12).emitted[0]]

    def later(state: DecodeState, pair: Pair, size: int) -> object:
        position = len(state.tokens[0])
        known = text[position : position + size - 1] + [0] * size
        return pair.port.asarray(np.array([known[: size - 1]]) + 24, pair.target.device)

    found = run(prefill(tied_pair, PROMPT, width=4), tied_pair, max_new_tokens=9, block_size=4, proposer=later)
    assert found.emitted[0] == tuple(text[5:14])
    assert found.accepted() == [0] * 8


# --- positions, tapped layers ---


def test_positions_of_context_rows_anchor_and_masks(port: Port, pair: Pair, text: list[int]) -> None:
    state = opened(pair)
    assert len(state.tokens[0]) == 6  # the anchor is at position 5
    assert port.lengths(propose(state, pair).draft_cache) == (5,)  # context rows 0..4
    after = run(state, pair, max_new_tokens=3, proposer=proposers.scripted([text], [[2]])).last
    assert len(after.tokens[0]) == 9  # two accepted and one more: the anchor is at position 8
    assert port.lengths(after.draft_cache) == (5,)
    assert port.lengths(after.target_cache) == (8,)
    assert port.lengths(propose(after, pair).draft_cache) == (8,)  # context rows 5..7


@pytest.mark.parametrize(
    "options",
    [{}, {"rope": "yarn"}, {"window": 3}, {"causal": True}, {"taps": (1, 0)}, {"target": TargetDesign(rope="llama3")}],
    ids=["plain", "yarn", "sliding", "causal", "taps", "target-with-llama3"],
)
def test_the_block_stands_right_behind_its_context(port: Port, checkpoints: Checkpoints, options: dict) -> None:
    design = replace(DESIGN, seed=2, **options)
    pair = checkpoints.pair(port, design)
    text = text_of(pair, 11)
    plan = [[2], [0], [3], [1]]
    found = run(prefill(pair, PROMPT), pair, max_new_tokens=11, proposer=proposers.scripted([text], plan))
    assert found.accepted() == [2, 0, 3, 1]
    for state in found.states[1:]:
        drafted = _draft_logits(state, pair)
        errors = {
            shift: np.abs(draft_logits(design, list(state.tokens[0]), 4, shift=shift) - drafted).max()
            for shift in (-1, 0, 1)
        }
        assert min(errors, key=lambda shift: errors[shift]) == 0


def _draft_logits(state: DecodeState, pair: Pair) -> np.ndarray:
    assert pair.draft is not None
    port, size = pair.port, pair.block_size
    block = np.array([[state.tokens[0][-1], *[pair.draft.spec.mask_token_id] * (size - 1)]])
    cache = propose(state, pair).draft_cache
    asked = port.asarray(block, pair.target.device)
    return port.to_numpy(port.draft_pass(pair.draft, pair.target, cache, asked, exact_rows=False))[0]


@pytest.fixture(scope="module")
def counting_pair(port: Port, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target whose layer i adds 2 ** i to every element of the hidden state, which starts as 0."""
    folder = tmp_path_factory.mktemp("counting") / port.name
    design = TargetDesign(layers=4, bias=True)
    tensors = {name: np.zeros_like(tensor) for name, tensor in target_tensors(design).items()}
    for layer in range(design.layers):
        tensors[f"model.layers.{layer}.self_attn.o_proj.bias"] += 2.0**layer
    tensors["model.norm.weight"] += 1.0
    target = write_checkpoint(folder / "target", design.config, tensors)
    draft = Checkpoints(folder).folder(DraftDesign(target=design, taps=(2, 0, 1)))
    return dflash_fn.load_pair(target, draft, port=port, dtype="float32")


def test_the_tap_of_a_layer_reads_its_output(counting_pair: Pair) -> None:
    state = prefill(counting_pair, PROMPT)
    features = verify(state, counting_pair, propose(state, counting_pair)).features
    expected = np.repeat([7.0, 1.0, 3.0], 32)  # layers 2, 0 and 1, in the order in which the draft lists them
    assert np.array_equal(counting_pair.port.to_numpy(features), np.broadcast_to(expected, (1, 4, 96)))


@pytest.mark.parametrize("taps", [(0,), (1,), (2,), (2, 0), (0, 1, 2)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_features_are_the_tapped_hidden_states(
    port: Port, checkpoints: Checkpoints, family: str, taps: tuple[int, ...]
) -> None:
    design = TargetDesign(layers=3, family=family)
    pair = checkpoints.pair(port, DraftDesign(target=design, taps=taps))
    text = text_of(pair, 4)
    state = opened(pair)
    branches = verify(state, pair, propose(state, pair, proposer=proposers.right([text])))
    found = port.to_numpy(branches.features)[0].reshape(4, len(taps), 32)
    hidden, _ = target_hidden_states(design, text[:9])
    for place, layer in enumerate(taps):
        errors = [np.abs(hidden_state[5:] - found[:, place]).max() for hidden_state in hidden]
        assert int(np.argmin(errors)) == layer + 1


def test_nothing_is_written_beside_the_checkpoint(port: Port, checkpoints: Checkpoints) -> None:
    folders = [checkpoints.folder(DESIGN), checkpoints.folder(DESIGN.target)]
    before = [_listing(folder) for folder in folders]
    pair = dflash_fn.load_pair(folders[1], folders[0], port=port)
    run(prefill(pair, PROMPT), pair, max_new_tokens=4)
    assert [_listing(folder) for folder in folders] == before


def _listing(folder: Path) -> list[tuple[str, bytes]]:
    return sorted((str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file())
