"""What purity costs: our loop beside the same with caches that change in place, and beside one written by hand.

`in place` is our own loop on a port whose caches are buffers and a length that changes: nothing is claimed, nobody is
asked who else looks, no states are kept. `by hand` is greedy decoding of one row as one would write it for itself:
draft, argmax, verify, argmax, one transfer to the host, count. It makes no records and checks nothing, not even whether
logits are finite; it knows no stop tokens and no other policy. The first says what purity costs, the second what all
the rest does. All run the same kernels and emit the same tokens, or the benchmark fails. Prompts are read beforehand;
the ways take turns at every prompt, and begin in turn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dflash_fn import errors
from dflash_fn.bench.common import add_pair_options, load, markdown, prompt_ids, track
from dflash_fn.bench.estimates import ratio
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.port import TargetPass
from dflash_fn.prompts import read_rows
from dflash_fn.records import DecodeState, Pair

__all__ = ["InPlace", "in_place", "main", "mutating", "pure"]


def pure(pair: Pair, state: DecodeState, count: int, size: int) -> list[int]:
    """Decode `count` tokens in blocks of `size` by our own loop."""
    options: dict[str, Any] = {"max_new_tokens": count, "stop_token_ids": (), "block_size": size}
    return [token for _, info in rounds(state, pair, **options) for token in info.emitted[0]]


def mutating(pair: Pair, state: DecodeState, count: int, size: int) -> Callable[[], list[int]]:
    """Return a function that decodes `count` tokens in blocks of `size`, once, over buffers of its own.

    Args:
        pair: on the torch port, with a draft, in whose models every layer sees everything.
        state: of one row and of width `size`, from `prefill`.
        count: tokens.
        size: of a block.
    """
    import torch
    from dflash_fn_torch.decoder import target_over
    from dflash_fn_torch.draft import block_over, context_over

    assert pair.draft is not None
    target, draft, spec = pair.target, pair.draft, pair.draft.spec
    seen, read = (_family(pair, cache, count + 4 * size) for cache in (state.target_cache, state.draft_cache))
    options: dict[str, Any] = {"taps": spec.target_layer_ids, "head": True, "exact_rows": False}
    verified: Any = target_over

    @torch.inference_mode()
    def run() -> list[int]:
        length = len(state.tokens[0]) - 1
        block = torch.full((1, size), state.tokens[0][-1])
        logits, features = verified(target, _move(seen, length, size), block, **options)
        made, kept = [int(logits[0, 0].argmax())], 1
        while len(made) < count:
            context_over(draft, _move(read, length, size), features, exact_rows=False)
            length += kept
            block = torch.full((1, size), spec.mask_token_id)
            block[0, 0] = made[-1]
            guesses = block_over(draft, target, _move(read, length, size), block, exact_rows=False)
            block[:, 1:] = guesses.argmax(-1)
            logits, features = verified(target, _move(seen, length, size), block, **options)
            guessed, chosen = torch.cat([block, logits.argmax(-1)]).tolist()
            kept = 1
            while kept < size and guessed[kept] == chosen[kept - 1]:
                kept += 1
            made += chosen[:kept]
        return made[:count]

    return run


@dataclass(frozen=True)
class InPlace:
    """The torch port with caches that change: a cache and its family are one, whose start moves on.

    Attributes:
        port: whose kernels run.
    """

    port: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)

    def target_pass(self, target: Any, cache: Any, tokens: Any, *, taps: Any, head: bool, exact_rows: bool) -> Any:
        """Run over the slots after the start."""
        import torch
        from dflash_fn_torch.decoder import target_over

        with torch.inference_mode():
            over = _move(cache, cache.start.lengths[0], tokens.shape[1])
            made = target_over(target, over, tokens, taps=taps, head=head, exact_rows=exact_rows)
        return TargetPass(*made, cache)

    def select(self, family: Any, counts: tuple[int, ...]) -> Any:
        """Move the start."""
        return _move(family, family.start.lengths[0] + counts[0], 0)

    def draft_context(self, draft: Any, cache: Any, features: Any, counts: Any, *, exact_rows: bool) -> Any:
        """Write the context, and move the start."""
        import torch
        from dflash_fn_torch.draft import context_over

        with torch.inference_mode():
            start = cache.start.lengths[0]
            context_over(draft, _move(cache, start, features.shape[1]), features, exact_rows=exact_rows)
        return _move(cache, start + counts[0], 0)

    def draft_pass(self, draft: Any, target: Any, cache: Any, block: Any, *, exact_rows: bool) -> Any:
        """Run over the slots after the start."""
        import torch
        from dflash_fn_torch.draft import block_over

        with torch.inference_mode():
            over = _move(cache, cache.start.lengths[0], block.shape[1])
            return block_over(draft, target, over, block, exact_rows=exact_rows)

    def reserve(self, cache: Any, capacity: int) -> Any:
        """Room was made beforehand."""
        del capacity
        return cache


def in_place(pair: Pair, state: DecodeState, count: int, size: int) -> Callable[[], list[int]]:
    """Return a function that decodes like `pure`, once, over caches that change; the arguments are `mutating`'s."""
    seen, read = (_family(pair, cache, count + 4 * size) for cache in (state.target_cache, state.draft_cache))
    begun = replace(state, target_cache=seen, draft_cache=read)
    changed: Any = InPlace(pair.port)
    return lambda: pure(replace(pair, port=changed), begun, count, size)


def _family(pair: Pair, cache: Any, room: int) -> Any:
    """Return a family over a copy of a cache's buffer, for `_move` to change."""
    from dflash_fn_torch import cache as kv
    from dflash_fn_torch import parts

    wide = pair.port.reserve(cache, cache.lengths[0] + room)
    if wide.recent.sliding or wide.recent.states:
        raise errors.InputError("purity: got a model with layers that slide or recur; expected full attention alone")
    known = wide.buffer
    keys, values = (tuple(store.clone() for store in stores) for stores in (known.keys, known.values))
    buffer = kv.Buffer(keys, values, kv.CopyCounts(), known.written, known.bases)
    start, full = (kv.Cache(buffer, wide.lengths, (0,)) for _ in range(2))
    return parts.Family(parts.Cache(wide.kinds, start, wide.recent, wide.recent), kv.Family(start, full), None, [])


def _move(family: Any, start: int, count: int) -> Any:
    """Let the family's next pass run over `count` tokens from `start` on, with none of the rules that guard a cache."""
    object.__setattr__(family.full.start, "lengths", (start,))
    object.__setattr__(family.full.full, "lengths", (start + count,))
    return family


def _seconds(run: Callable[[], list[int]]) -> tuple[float, list[int]]:
    begun = time.perf_counter()
    made = run()
    return time.perf_counter() - begun, made


def _compared(pair: Pair, ids: list[int], count: int, size: int, *, first: int) -> list[float]:
    """Return the seconds of our loop, of the one in place, and of the one by hand; `first` says which begins."""
    state = prefill(pair, ids, width=size)
    runs = [
        lambda: pure(pair, state, count, size),
        in_place(pair, state, count, size),
        mutating(pair, state, count, size),
    ]
    found = {way: _seconds(runs[way]) for way in ((first + i) % len(runs) for i in range(len(runs)))}
    if any(made != found[0][1] for _, made in found.values()):
        raise errors.DflashError("purity: the loops emitted other tokens, so their times mean nothing")
    return [found[way][0] for way in range(len(runs))]


def main(arguments: list[str] | None = None) -> int:
    """Time the loops and print a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.purity", description=__doc__)
    add_pair_options(parser)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="how often every prompt is taken")
    options = parser.parse_args(arguments)
    pair = load(options, "float32")
    prompts = [prompt_ids(pair, prompt, raw=options.raw) for _, prompt in read_rows(options.data)] * options.rounds
    _compared(pair, prompts[0], 8, options.block_size, first=0)
    times = [
        _compared(pair, ids, options.tokens, options.block_size, first=index % 3)
        for index, ids in enumerate(track(prompts, options.pair))
    ]
    _report(times, options.tokens)
    return 0


def _report(times: list[list[float]], tokens: int) -> None:
    rows = []
    for way, name in enumerate(("ours", "in place", "by hand")):
        made = ratio([(taken[0], taken[way]) for taken in times])
        assert made is not None
        ends = made.ends if way else None
        mean = sum(taken[way] for taken in times) / len(times) / tokens * 1e3
        rows.append([name, f"{mean:.3f}", f"{made.value:.3f}", f"{ends[0]:.3f} to {ends[1]:.3f}" if ends else "-"])
    print(markdown(["loop", "ms/token", "ours / this", "interval of 95 %"], rows))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
