"""The torch cache: what it copies and, above all, what it does not; and that threads may fork one state."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn.opening import extend, prefill
from dflash_fn.records import DecodeState, Pair
from tests.helpers import proposers
from tests.helpers.runs import equal_probes, probe, run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, draft_tensors, target_tensors, write_checkpoint

torch = pytest.importorskip("torch")
kv = pytest.importorskip("dflash_fn_torch.cache", exc_type=ImportError)

BUCKET = kv.KV_BUCKET


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("checkpoints"))
    return checkpoints.pair(dflash_fn.get_port("torch"), DraftDesign(block_size=8))


def new(capacity: int = 16, rows: int = 1) -> Any:
    return kv.new(2, rows, 1, 4, capacity, dtype=torch.float32, device="cpu")


def counts(state: DecodeState) -> tuple[int, int, int, int]:
    """Copies and growths of the target's cache, then of the draft's."""
    made = [cache.buffer.counts for cache in (state.target_cache, state.draft_cache) if cache is not None]
    target, draft = made
    return target.copies, target.growths, draft.copies, draft.growths


# --- models ---


@pytest.fixture(scope="module")
def counting_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target that counts: token n is followed by n + 1, and 47 by 0."""
    folder = tmp_path_factory.mktemp("counting")
    design = DraftDesign(target=TargetDesign(hidden=48), block_size=8)
    tensors = {
        name: np.zeros_like(tensor) if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor
        for name, tensor in target_tensors(design.target).items()
    }
    tensors["model.norm.weight"][:] = 1.0
    tensors["model.embed_tokens.weight"] = np.eye(48, dtype=np.float32)
    tensors["lm_head.weight"] = np.roll(np.eye(48, dtype=np.float32), 1, axis=0)
    target = write_checkpoint(folder / "target", design.target.config, tensors)
    return dflash_fn.load_pair(target, write_checkpoint(folder / "draft", design.config, draft_tensors(design)))


NUMBERS = [number % 48 for number in range(600)]


def test_the_straight_loop_copies_nothing_in_500_tokens(counting_pair: Pair) -> None:
    state = prefill(counting_pair, NUMBERS[:3])
    before = counts(state)
    proposer = proposers.corrupted([NUMBERS], seed=0, rate=0.1)
    last = dflash_fn.decode(state, counting_pair, max_new_tokens=500, proposer=proposer)
    assert last.tokens[0] == tuple(NUMBERS[:503])
    copies, growths, draft_copies, draft_growths = (b - a for a, b in zip(before, counts(last), strict=True))
    assert (copies, draft_copies) == (0, 0)
    assert (growths, draft_growths) == (1, 1)  # `decode` makes room once, before it begins


def test_what_a_state_holds_does_not_grow_while_there_is_room(counting_pair: Pair) -> None:
    state = prefill(counting_pair, NUMBERS[:3])
    found = run(state, counting_pair, max_new_tokens=400, proposer=proposers.right([NUMBERS])).states
    assert len({held(state) for state in found[2:]}) == 1
    again = run(found[-1], counting_pair, max_new_tokens=100, proposer=proposers.right([NUMBERS])).last
    assert held(again) == 2 * held(found[-1])  # 503 tokens and what a step adds need a second bucket


def test_a_decode_that_outgrows_what_was_reserved_goes_on_in_a_larger_buffer(counting_pair: Pair) -> None:
    numbers = [number % 48 for number in range(1800)]
    state = prefill(counting_pair, numbers[:3])
    last = run(state, counting_pair, max_new_tokens=1600, proposer=proposers.right([numbers])).last
    assert last.tokens[0] == tuple(numbers[:1603])
    copies, growths, draft_copies, draft_growths = counts(last)
    assert (copies, draft_copies) == (0, 0)
    assert (growths, draft_growths) == (2, 2)  # 1024 tokens are reserved at most, and then a half is added
    assert run(state, counting_pair, max_new_tokens=9).last.tokens[0] == tuple(numbers[:12])


def held(state: DecodeState) -> int:
    """Bytes of both caches."""
    caches = [state.target_cache, state.draft_cache]
    return sum(x.nbytes for cache in caches if cache for x in (*cache.buffer.keys, *cache.buffer.values))


def test_keeping_every_state_of_a_straight_run_copies_nothing(pair: Pair) -> None:
    found = run(prefill(pair, [5, 9, 2]), pair, max_new_tokens=60)
    assert len(found.states) > 20
    assert counts(found.last)[::2] == (0, 0)


def test_a_fork_copies_each_cache_once_and_then_no_more(pair: Pair) -> None:
    state = run(prefill(pair, [5, 9, 2]), pair, max_new_tokens=9).last
    first = run(state, pair, max_new_tokens=9)
    assert counts(first.last)[::2] == (0, 0)
    second = run(state, pair, max_new_tokens=9, proposer=proposers.at_random(0))
    assert counts(second.last)[::2] == (1, 1)
    assert second.emitted == first.emitted
    run(first.last, pair, max_new_tokens=9)
    run(second.last, pair, max_new_tokens=9)
    assert counts(second.last)[::2] == (1, 1)


def test_a_fork_whose_other_branch_was_dropped_copies_nothing(pair: Pair) -> None:
    state = run(prefill(pair, [5, 9, 2]), pair, max_new_tokens=9).last
    for seed in range(3):
        run(state, pair, max_new_tokens=9, proposer=proposers.at_random(seed))
        gc.collect()
    assert counts(state)[::2] == (0, 0)


def test_kept_branches_are_not_overwritten_by_the_next_step(pair: Pair) -> None:
    state = run(prefill(pair, [5, 9, 2]), pair, max_new_tokens=9).last
    proposal = dflash_fn.propose(state, pair)
    branches = dflash_fn.verify(state, pair, proposal)
    text = run(state, pair, max_new_tokens=8).emitted[0]
    expected = [probe(dflash_fn.select(state, pair, proposal, branches, [text[:n]]), pair) for n in range(4)]
    run(state, pair, max_new_tokens=20, proposer=proposers.at_random(1))
    again = [probe(dflash_fn.select(state, pair, proposal, branches, [text[:n]]), pair) for n in range(4)]
    assert all(equal_probes(left, right) for left, right in zip(expected, again, strict=True))


def test_extend_reads_into_a_copy_while_the_first_state_lives(pair: Pair) -> None:
    state = run(prefill(pair, [5, 9, 2]), pair, max_new_tokens=9).last
    assert counts(extend(state, pair, [1, 2]))[::2] == (1, 1)


def test_the_straight_loop_has_nothing_to_clear(pair: Pair) -> None:
    """Each pass claims at least as far as was written before it, in the target's cache and in the draft's."""
    for state, info in dflash_fn.rounds(prefill(pair, [5, 9, 2]), pair, max_new_tokens=60):
        (written,), (length,) = state.target_cache.buffer.written, state.target_cache.lengths
        assert written <= length + state.width
        if info.step > 0 and state.draft_cache is not None:
            (written,), (length,) = state.draft_cache.buffer.written, state.draft_cache.lengths
            assert written <= length + state.width


@pytest.mark.parametrize("rows", [1, 2])
def test_a_claim_clears_what_a_dropped_fork_left_beyond_it(rows: int) -> None:
    start = new(rows=rows)
    base = kv.select(kv.append(start, 6), tuple(range(3, 3 + rows)))
    family = kv.append(base, 20)
    ends = family.full.lengths
    for store in (*family.full.buffer.keys, *family.full.buffer.values):
        for row, (first, end) in enumerate(zip(base.lengths, ends, strict=True)):
            store[row, :, first:end] = torch.nan
    del family
    again = kv.append(base, 4)
    assert again.full.buffer is base.buffer  # nothing was copied
    for store in (*base.buffer.keys, *base.buffer.values):
        for row, end in enumerate(again.full.lengths):
            assert store[row, :, end:].count_nonzero() == 0


def test_a_copy_clears_what_lies_beyond_its_shorter_rows() -> None:
    base = kv.select(kv.append(new(rows=2), 30), (20, 3))
    other = kv.append(base, 8)
    for store in (*base.buffer.keys, *base.buffer.values):
        store[1, :, 3:11] = torch.nan
    copied = kv.append(base, 4)
    assert copied.full.buffer is not other.full.buffer
    for store in (*copied.full.buffer.keys, *copied.full.buffer.values):
        assert store[1, :, 7:].count_nonzero() == 0


# --- the cache itself ---


def test_a_new_cache_is_empty_and_its_capacity_is_rounded_up() -> None:
    for asked, given in ((0, BUCKET), (1, BUCKET), (BUCKET, BUCKET), (BUCKET + 1, 2 * BUCKET)):
        cache = new(asked)
        assert (cache.lengths, cache.marks, cache.buffer.capacity) == ((0,), (0,), given)


def test_appending_behind_everything_that_is_seen_is_in_place() -> None:
    cache = new()
    longer = kv.select(kv.append(cache, 5), (3,))
    again = kv.append(longer, 4)
    assert again.full.buffer is cache.buffer
    assert (again.full.lengths, again.start.lengths) == ((7,), (3,))


@pytest.mark.parametrize("seen", ["full", "longer", "other row"])
def test_appending_where_a_live_cache_sees_the_slots_copies(seen: str) -> None:
    rows = 2 if seen == "other row" else 1
    cache = new(rows=rows)
    family = kv.append(cache, 3)
    kept = family if seen == "full" else kv.select(family, (0, 1) if seen == "other row" else (1,))
    del family
    again = kv.append(cache, 2)
    assert again.full.buffer is not cache.buffer
    assert cache.buffer.counts.copies == 1
    assert again.full.buffer.counts is cache.buffer.counts
    assert kept is not None


def test_a_view_that_is_dropped_is_in_nobodys_way() -> None:
    cache = new()
    kv.append(cache, 3)
    assert kv.append(cache, 2).full.buffer is cache.buffer
    assert cache.buffer.counts.copies == 0


def test_a_full_buffer_grows_by_half_at_least() -> None:
    cache = kv.select(kv.append(new(), BUCKET), (BUCKET,))
    grown = kv.append(cache, 1).full.buffer
    assert grown.capacity == 2 * BUCKET
    assert (grown.counts.copies, grown.counts.growths) == (0, 1)


def test_reserve_makes_room_once() -> None:
    cache = new()
    roomy = kv.reserve(cache, 3 * BUCKET)
    assert roomy.buffer.capacity == 3 * BUCKET
    assert kv.reserve(roomy, 3 * BUCKET) is roomy
    assert kv.append(roomy, 2 * BUCKET).full.buffer is roomy.buffer


def test_rewind_goes_back_to_the_mark() -> None:
    cache = kv.select(kv.append(new(), 4), (4,))
    marked = kv.select(kv.append(kv.mark(cache), 4), (3,))
    assert (marked.lengths, kv.rewind(marked).lengths, kv.rewind(kv.rewind(marked)).lengths) == ((7,), (4,), (4,))
    assert kv.rewind(cache).lengths == (0,)


def test_split_and_join_keep_lengths_and_marks_and_share_no_memory() -> None:
    parts = tuple(kv.mark(kv.select(kv.append(new(), n), (n,))) for n in (2, 5))
    joined = kv.join(parts)
    assert (joined.lengths, joined.marks) == ((2, 5), (2, 5))
    assert [cache.lengths for cache in kv.split(joined)] == [(2,), (5,)]
    memory = {store.data_ptr() for cache in (*parts, joined, *kv.split(joined)) for store in cache.buffer.keys}
    assert len(memory) == 2 * 5


@pytest.mark.parametrize(("length", "slots"), [(1, 512), (512, 512), (513, 1024), (1024, 1024)])
def test_what_is_attended_to_is_a_whole_number_of_buckets(length: int, slots: int) -> None:
    cache = new(2048)
    assert kv.attended(kv.append(cache, length)) == kv.Span((0,), (0,), slots)


# --- threads ---


@pytest.fixture
def restless() -> Iterator[None]:
    """Let threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_threads_that_fork_one_state_do_not_disturb_each_other(pair: Pair) -> None:
    state = run(prefill(pair, [5, 9, 2]), pair, max_new_tokens=3).last
    expected = run(state, pair, max_new_tokens=20).emitted
    found: list[Any] = []

    def work(seed: int) -> None:
        found.append(run(state, pair, max_new_tokens=20, proposer=proposers.at_random(seed)).emitted)

    in_threads(work, range(4))
    assert found == [expected] * 4


def in_threads(work: Any, seeds: range) -> None:
    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_make_caches_while_another_claims_slots() -> None:
    first = kv.new(1, 1, 1, 4, 512, dtype=torch.float32, device="cpu")
    interval, failures = sys.getswitchinterval(), []

    def make() -> None:
        for _ in range(3000):
            kv.mark(first)

    def claim() -> None:
        try:
            for _ in range(3000):
                kv.append(first, 1)
        except RuntimeError as error:
            failures.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for work in (make, claim)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
