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


def test_what_was_seen_is_counted_by_slot_and_fades_and_so_does_the_prior() -> None:
    seen = Seen().after(told(4, 2, 0, None))
    assert seen.reached == pytest.approx((3.6 + 2, 3.6 + 1, 3.6 + 1))
    assert seen.kept == pytest.approx((2.88 + 1, 2.88 + 1, 2.88))
    later = seen.after(told(2, 1))
    assert later.reached == pytest.approx((0.9 * 5.6 + 1, 0.9 * 4.6, 0.9 * 4.6))
    assert later.kept == pytest.approx((0.9 * 3.88 + 1, 0.9 * 3.88, 0.9 * 2.88))
    assert later.after(told(1, 0)) == later


def test_shares_start_from_a_prior_and_go_over_to_what_was_seen() -> None:
    assert Seen().share(1) == 0.8
    seen = Seen()
    for _ in range(200):
        seen = seen.after(told(4, 1))
    assert [seen.share(slot) for slot in (1, 2)] == pytest.approx([1.0, 0.0], abs=1e-6)
    assert seen.share(9) == 0.8


def test_worth_is_one_and_the_chances_of_each_slot() -> None:
    seen = Seen((1e9, 1e9), (5e8, 2.5e8))
    assert pacing.worth(seen, 3) == pytest.approx(1 + 0.5 + 0.5 * 0.25)


def test_a_draft_that_never_hits_is_left_alone_and_asked_again_later() -> None:
    pace = Adaptive(FLAT)
    assert pace.block_size == 8
    pace = after(pace, *[told(8, 0)] * 25)
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
