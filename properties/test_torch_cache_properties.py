"""P09: torch's caches, written in place and copied on demand, are values: they equal a model that copies everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

torch = pytest.importorskip("torch")
kv = pytest.importorskip("dflash_fn_torch.cache", exc_type=ImportError)

LAYERS, DIM = 2, 2
SMALL_BUCKET = 4
"""In place of 512, so that buffers fill up and grow all the time."""


@dataclass(frozen=True)
class Naive:
    """What a cache must show: the numbers in each row's slots, and each row's mark."""

    rows: tuple[tuple[int, ...], ...]
    marks: tuple[int, ...]


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of what the port does with caches; each is kept with its model, until it is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(kv, "KV_BUCKET", SMALL_BUCKET)
        self.caches: list[tuple[Any, Naive]] = []
        self.families: list[tuple[Any, Naive, Naive]] = []
        self.written = 0

    def teardown(self) -> None:
        self.patch.undo()

    def any_cache(self, data: st.DataObject) -> tuple[Any, Naive]:
        return self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    @rule(rows=st.integers(1, 3), capacity=st.integers(0, 6))
    def new(self, rows: int, capacity: int) -> None:
        cache = kv.new(LAYERS, rows, 1, DIM, capacity, dtype=torch.float32, device="cpu")
        self.caches.append((cache, Naive(((),) * rows, (0,) * rows)))

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), count=st.integers(1, 5))
    def append(self, data: st.DataObject, count: int) -> None:
        cache, naive = self.any_cache(data)
        copies = cache.buffer.counts.copies
        unseen = all(
            seen <= length
            for other in cache.buffer.live
            for seen, length in zip(other.lengths, cache.lengths, strict=True)
        )
        family = kv.append(cache, count)
        assert cache.buffer.counts.copies <= copies + (not unseen)
        numbers = [[self.number() for _ in range(count)] for _ in naive.rows]
        values = torch.tensor(numbers, dtype=torch.float32)[:, :, None, None].expand(-1, -1, 1, DIM)
        for layer in range(LAYERS):
            kv.write(family.full.buffer.keys[layer], family.start.lengths, values + layer)
            kv.write(family.full.buffer.values[layer], family.start.lengths, -values - layer)
        full = Naive(tuple((*old, *new) for old, new in zip(naive.rows, numbers, strict=True)), naive.marks)
        self.families.append((family, naive, full))

    def number(self) -> int:
        self.written += 1
        return self.written * 10

    @precondition(lambda self: self.families)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        family, start, full = self.families[data.draw(st.integers(0, len(self.families) - 1))]
        room = [len(new) - len(old) for old, new in zip(start.rows, full.rows, strict=True)]
        counts = tuple(data.draw(st.integers(0, most)) for most in room)
        ends = [len(old) + count for old, count in zip(start.rows, counts, strict=True)]
        rows = tuple(new[:end] for new, end in zip(full.rows, ends, strict=True))
        self.caches.append((kv.select(family, counts), Naive(rows, start.marks)))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.caches.append(self.any_cache(data))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        cache, naive = self.any_cache(data)
        self.caches.append((kv.mark(cache), Naive(naive.rows, tuple(map(len, naive.rows)))))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        cache, naive = self.any_cache(data)
        rows = tuple(row[:point] for row, point in zip(naive.rows, naive.marks, strict=True))
        self.caches.append((kv.rewind(cache), Naive(rows, naive.marks)))

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), capacity=st.integers(0, 12))
    def reserve(self, data: st.DataObject, capacity: int) -> None:
        cache, naive = self.any_cache(data)
        roomy = kv.reserve(cache, capacity)
        assert roomy.buffer.capacity >= capacity
        self.caches.append((roomy, naive))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        cache, naive = self.any_cache(data)
        parts = kv.split(cache)
        models = [Naive((row,), (point,)) for row, point in zip(naive.rows, naive.marks, strict=True)]
        self.caches += list(zip(parts, models, strict=True))

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), count=st.integers(1, 3))
    def join(self, data: st.DataObject, count: int) -> None:
        chosen = [self.any_cache(data) for _ in range(count)]
        joined = kv.join(tuple(cache for cache, _ in chosen))
        rows = tuple(row for _, naive in chosen for row in naive.rows)
        self.caches.append((joined, Naive(rows, tuple(point for _, naive in chosen for point in naive.marks))))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        del self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    @precondition(lambda self: self.families)
    @rule(data=st.data())
    def drop_family(self, data: st.DataObject) -> None:
        del self.families[data.draw(st.integers(0, len(self.families) - 1))]

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def keep_only_the_last(self, data: st.DataObject) -> None:
        self.caches, self.families = self.caches[-1:], []

    @invariant()
    def everything_that_is_kept_shows_what_it_showed(self) -> None:
        kept = list(self.caches)
        for family, start, full in self.families:
            kept += [(family.start, start), (family.full, full)]
        for cache, _ in kept:
            _poison(cache.buffer)
        for cache, naive in kept:
            assert cache.lengths == tuple(map(len, naive.rows))
            assert cache.marks == naive.marks
            span = kv.attended(kv.Family(cache, cache))
            assert (max(span.firsts), span.positions) == (0, span.firsts)
            assert span.count >= max(cache.lengths)
            for row, numbers in enumerate(naive.rows):
                expected = torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, DIM)
                for layer in range(LAYERS):
                    keys, values = (part[layer][row, 0] for part in (cache.buffer.keys, cache.buffer.values))
                    assert torch.equal(keys[: len(numbers)], expected + layer)
                    assert torch.equal(values[: len(numbers)], -expected - layer)


def _poison(buffer: Any) -> None:
    """Fill with NaN what no live cache sees."""
    for row in range(buffer.keys[0].shape[0]):
        end = max((cache.lengths[row] for cache in buffer.live), default=0)
        for store in (*buffer.keys, *buffer.values):
            store[row, :, end:] = torch.nan


def test_p09_caches_equal_a_model_that_copies_everything() -> None:
    """P09: in any sequence of operations, every cache that is kept shows what it showed when it was made."""
    run_state_machine_as_test(CacheMachine, settings=settings(settings.default, stateful_step_count=40))
