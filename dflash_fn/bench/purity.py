"""What purity costs: our loop beside one that changes its caches in place and keeps no books, on the same kernels.

The other loop is greedy decoding of one row as one would write it by hand: buffers and lengths that change; draft,
argmax, verify, argmax, one transfer to the host, count. It makes no records, claims no slots and checks nothing, not
even whether logits are finite; it knows no stop tokens and no other policy. Both emit the same tokens, or the benchmark
fails. Prompts are read beforehand. The two take turns at every prompt, and who begins changes from prompt to prompt.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from dflash_fn import errors
from dflash_fn.bench.common import add_pair_options, load, markdown, prompt_ids, track
from dflash_fn.bench.estimates import ratio
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.prompts import read_rows
from dflash_fn.records import DecodeState, Pair

__all__ = ["main", "mutating", "pure"]


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

    @torch.inference_mode()
    def run() -> list[int]:
        length = len(state.tokens[0]) - 1
        block = torch.full((1, size), state.tokens[0][-1])
        logits, features = target_over(target, _move(seen, length, size), block, **options)
        made, kept = [int(logits[0, 0].argmax())], 1
        while len(made) < count:
            context_over(draft, _move(read, length, size), features, exact_rows=False)
            length += kept
            block = torch.full((1, size), spec.mask_token_id)
            block[0, 0] = made[-1]
            guesses = block_over(draft, target, _move(read, length, size), block, exact_rows=False)
            block[:, 1:] = guesses.argmax(-1)
            logits, features = target_over(target, _move(seen, length, size), block, **options)
            guessed, chosen = torch.cat([block, logits.argmax(-1)]).tolist()
            kept = 1
            while kept < size and guessed[kept] == chosen[kept - 1]:
                kept += 1
            made += chosen[:kept]
        return made[:count]

    return run


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


def _compared(pair: Pair, ids: list[int], count: int, size: int, *, swap: bool) -> tuple[float, float]:
    """Return the seconds of our loop and of the other."""
    state = prefill(pair, ids, width=size)
    runs = {"ours": lambda: pure(pair, state, count, size), "other": mutating(pair, state, count, size)}
    found = {name: _seconds(runs[name]) for name in sorted(runs, reverse=swap)}
    if found["ours"][1] != found["other"][1]:
        raise errors.DflashError("purity: the two loops emitted other tokens, so their times mean nothing")
    return found["ours"][0], found["other"][0]


def main(arguments: list[str] | None = None) -> int:
    """Time both loops and print a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.purity", description=__doc__)
    add_pair_options(parser)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="how often every prompt is taken")
    options = parser.parse_args(arguments)
    pair = load(options, "float32")
    prompts = [prompt_ids(pair, prompt, raw=options.raw) for _, prompt in read_rows(options.data)] * options.rounds
    _compared(pair, prompts[0], 8, options.block_size, swap=False)
    times = [
        _compared(pair, ids, options.tokens, options.block_size, swap=bool(index % 2))
        for index, ids in enumerate(track(prompts, options.pair))
    ]
    _report(times, options.tokens)
    return 0


def _report(times: list[tuple[float, float]], tokens: int) -> None:
    made = ratio(times)
    assert made is not None
    ends = made.ends
    interval = f"{ends[0]:.3f} to {ends[1]:.3f}" if ends else "-"
    ours, other = (sum(column) / len(times) / tokens * 1e3 for column in zip(*times, strict=True))
    head = ["our loop, ms/token", "in place, ms/token", "ratio", "interval of 95 %"]
    print(markdown(head, [[f"{ours:.3f}", f"{other:.3f}", f"{made.value:.3f}", interval]]))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
