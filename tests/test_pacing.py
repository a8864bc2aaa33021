"""What a pace picks, by hand."""

from __future__ import annotations

import pytest

from dflash_fn import errors, pacing
from dflash_fn.pacing import Adaptive, Seen
from dflash_fn.records import StepInfo

FLAT = {1: 1.0, 2: 1.3, 4: 1.3, 8: 1.3}


def told(block_size: int, *accepted: int | None) -> StepInfo:
    emitted = tuple(() if count is None else (0,) * (count + 1) for count in accepted)
    return StepInfo(1, block_size, ((0,) * (block_size - 1),) * len(accepted), emitted, accepted, None)


def after(pace: Adaptive, *infos: StepInfo) -> Adaptive:
    for info in infos:
        pace = pace.after(info)
    return pace


def test_what_was_seen_is_counted_by_slot_and_fades() -> None:
    seen = Seen().after(told(4, 2, 0, None))
    assert (seen.reached, seen.kept) == ((2.0, 1.0, 1.0), (1.0, 1.0, 0.0))
    later = seen.after(told(2, 1))
    assert later.reached == pytest.approx((2.9, 0.95, 0.95))
    assert later.kept == pytest.approx((1.95, 0.95, 0.0))
    assert later.after(told(1, 0)) == later


def test_shares_start_from_a_prior_and_go_over_to_what_was_seen() -> None:
    assert Seen().share(1) == 0.8
    assert Seen((2.0,), (1.0,)).share(1) == pytest.approx((1 + 1.6) / 4)
    assert Seen((200.0,), (100.0,)).share(5) == Seen((200.0,), (100.0,)).share(1)  # as the last slot that is known
    assert Seen((200.0, 0.1), (100.0, 0.0)).share(2) == Seen((200.0,), (100.0,)).share(1)


def test_worth_is_one_and_the_chances_of_each_slot() -> None:
    seen = Seen((1e9, 1e9), (5e8, 2.5e8))
    assert pacing.worth(seen, 3) == pytest.approx(1 + 0.5 + 0.5 * 0.25)


def test_a_draft_that_never_hits_is_left_alone_and_asked_again_later() -> None:
    pace = Adaptive(FLAT)
    assert pace.block_size == 8
    pace = after(pace, *[told(8, 0)] * 20)
    assert pace.block_size == 1
    pace = after(pace, *[told(1, 0)] * (pacing.LOOK_AGAIN - 1))
    assert pace.block_size == 1
    pace = after(pace, told(1, 0))
    assert pace.block_size == 8
    assert after(pace, told(8, 0)).block_size == 1
    assert after(pace, *[told(8, 7)] * 20).block_size == 8


def test_slots_that_cost_more_than_they_bring_are_not_drafted() -> None:
    steep = {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}
    assert after(Adaptive(steep), *[told(8, 7)] * 40).block_size == 8
    assert after(Adaptive(steep), *[told(8, 1)] * 40).block_size == 2


def test_costs_that_cannot_be_are_refused() -> None:
    for costs in ({}, {0: 1.0}, {2: 0.0}, {2: float("nan")}):
        with pytest.raises(errors.InputError, match="costs: got"):
            Adaptive(costs)
