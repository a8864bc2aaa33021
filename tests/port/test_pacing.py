"""Block sizes that are chosen while decoding change nothing but the steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from dflash_fn import errors, pacing
from dflash_fn.opening import prefill
from dflash_fn.policies import token_rejection
from dflash_fn.port import Port
from dflash_fn.proposers import ngram
from dflash_fn.records import Pair, StepInfo
from dflash_fn.sampling import Sampling
from tests.helpers.runs import run, same
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

PROMPTS = [[5, 9, 2, 5, 9, 2, 5, 9], [7, 1]]


@dataclass(frozen=True)
class Wild:
    """A pace that jumps between sizes."""

    sizes: tuple[int, ...] = (3, 1, 4, 2, 4, 1, 1, 3)
    index: int = 0
    largest: int = 4

    @property
    def block_size(self) -> int:
        return self.sizes[self.index % len(self.sizes)]

    def after(self, info: StepInfo) -> Wild:
        assert info.block_size in (1, self.block_size)  # the opening step drafts nothing
        return replace(self, index=self.index + 1)


@pytest.fixture(scope="module")
def pair(port: Port, checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(port, DraftDesign(target=TargetDesign(max_context=96)))


def test_the_text_and_its_bits_are_those_of_no_draft_at_any_pace(pair: Pair) -> None:
    state = prefill(pair, PROMPTS, width=4)
    plain = run(state, pair, max_new_tokens=24, block_size=1, stop_token_ids=())
    for pace in (Wild(), pacing.auto(state, pair), pacing.Adaptive({1: 1.0, 3: 1e-3}), pacing.Adaptive({2: 1.0})):
        found = run(state, pair, max_new_tokens=24, block_size=pace, stop_token_ids=())
        assert found.last.tokens == plain.last.tokens
        assert all(same(a, b) for a, b in zip(found.logits, plain.logits, strict=True))


def test_a_pace_for_a_proposer(pair: Pair) -> None:
    lone, proposer = replace(pair, draft=None), ngram()
    state = prefill(lone, PROMPTS, width=4)
    assert sorted(pacing.measure(state, lone, proposer=proposer)) == [1, 2, 4]
    pace = pacing.auto(state, lone, proposer=proposer)
    found = run(state, lone, max_new_tokens=40, block_size=pace, stop_token_ids=(), proposer=proposer)
    assert found.last.tokens == run(state, lone, max_new_tokens=40, block_size=1, stop_token_ids=()).last.tokens


def test_measuring_leaves_the_state_and_goes_past_stops(pair: Pair) -> None:
    state = prefill(pair, PROMPTS[0], width=4)
    ended = run(state, pair, max_new_tokens=6, stop_token_ids=range(pair.target.spec.vocab_size)).last
    for one in (state, ended):
        costs = pacing.measure(one, pair)
        assert sorted(costs) == [1, 2, 4]
        assert all(cost > 0 for cost in costs.values())
    assert ended.stop[0] is not None


def test_a_pair_that_processes_share_is_refused(pair: Pair) -> None:
    shared = replace(pair, target=replace(pair.target, processes=2))
    with pytest.raises(errors.InputError, match="whose clocks would choose different blocks"):
        pacing.auto(prefill(pair, PROMPTS, width=4), shared)


def test_a_pace_that_does_not_fit_is_refused(pair: Pair) -> None:
    state = prefill(pair, PROMPTS[0], width=4)
    with pytest.raises(errors.InputError, match="block_size 8 is above the state's width 4"):
        run(state, pair, block_size=pacing.Adaptive({8: 1.0}))
    with pytest.raises(errors.InputError, match=r"got a pace with policy 'token_rejection.*judges whole blocks"):
        run(state, pair, block_size=Wild(), policy=token_rejection(Sampling(1.0)))
