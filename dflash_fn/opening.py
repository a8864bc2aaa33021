"""Reading prompts into a state, and adding to one; the same tokens give the same bits however they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dflash_fn import errors, inputs
from dflash_fn.origin import check_pair_type, check_state, origin_of
from dflash_fn.records import Cache, DecodeState, Pair, Progress

__all__ = ["extend", "prefill"]

LEAST_CHUNK = 8
"""The shortest prefill chunk; shorter remainders are padded to it."""


def prefill(
    pair: Pair,
    prompts: inputs.Prompts,
    *,
    seed: int | Sequence[int] = 0,
    width: int | None = None,
    exact_rows: bool = False,
    progress: Progress | None = None,
) -> DecodeState:
    """Read prompts and return the state from which decoding starts.

    Every token but the last of each prompt goes into the caches, in chunks whose size and place depend only on the
    position: whole chunks of `port.prefill_width`, then one that is padded to one of a few sizes. So the same tokens
    give the same bits, whether they come at once or by `extend`.

    Args:
        pair: target, draft and port.
        prompts: text or token ids; one prompt, or one a row. Text goes through the tokenizer as it is (no chat
            template; see `dflash_fn.text.chat_prompt`).
        seed: from 0 to 2**64 - 1; one for all rows or one a row.
        width: rows W of every verification, at least the block size one will decode with; None takes the draft's
            block size, 1 without a draft.
        exact_rows: compute several rows so that each has the bits of its single-row run; slower on a CPU in float32.
            Tokens do not depend on neighbours either way, except where two logits tie within rounding.
        progress: told after each chunk how far reading has come; None tells nobody.

    Raises:
        InputError: an empty prompt, one that leaves no room in the context, an unknown id, what is no prompt at all, a
            bad width or seed.

    Guarantees:
        P06: a row's tokens equal those of its single-row run.
    """
    check_pair_type(pair)
    rows = inputs.as_rows(pair, prompts)
    inputs.check_fit(pair, rows)
    width = inputs.check_width(pair, width)
    seeds = inputs.as_seeds(seed, len(rows))
    told = _told(progress, sum(len(ids) - 1 for ids in rows))
    made = [_read(pair, ids, *_empty_caches(pair, len(ids) + width), told) for ids in rows]
    return _opening(pair, rows, made, seeds, width, exact_rows)


def extend(state: DecodeState, pair: Pair, tokens: inputs.Prompts, *, progress: Progress | None = None) -> DecodeState:
    """Add tokens to a state, such as a user's next turn, exactly as if they had been in the prompt.

    The state goes back to its last whole prefill chunk and reads from there: the answer since then, and the new
    tokens. What decoding left in the caches is not reused, since its bits are those of another shape.

    Args:
        state: any state; it stays valid.
        pair: the pair that it was made with.
        tokens: token ids (or text) to add; with several rows, one sequence a row, of which some may be empty.
        progress: as `prefill` takes it.

    Raises:
        InputError: nothing to add, another number of rows, an unknown id, or no room in the context; a state of another
            pair.

    Guarantees:
        P05: `extend(state, pair, t)` equals `prefill(pair, state.tokens + t)` with the state's seed, bit for bit.
    """
    check_state(state, pair)
    added = inputs.as_rows(pair, tokens, special=False, name="tokens")
    if len(added) != len(state.tokens) or not any(added):
        raise errors.InputError(
            f"extend: got tokens for {len(added)} rows, expected at least one token, "
            f"and one sequence for each of the state's {len(state.tokens)} rows"
        )
    rows = tuple(old + new for old, new in zip(state.tokens, added, strict=True))
    inputs.check_fit(pair, rows)
    begun = _rewound(state, pair)
    left = [len(ids) - 1 - pair.port.lengths(target)[0] for ids, (target, _) in zip(rows, begun, strict=True)]
    told = _told(progress, sum(left))
    made = [_read(pair, ids, *caches, told) for ids, caches in zip(rows, begun, strict=True)]
    return _opening(pair, rows, made, state.seed, state.width, state.exact_rows)


def _empty_caches(pair: Pair, capacity: int) -> tuple[Cache, Cache | None]:
    draft = pair.port.new_cache(pair.draft, capacity) if pair.draft else None
    return pair.port.new_cache(pair.target, capacity), draft


def _rewound(state: DecodeState, pair: Pair) -> list[tuple[Cache, Cache | None]]:
    """Return each row's caches at its last whole prefill chunk."""
    port = pair.port
    targets = [port.rewind(cache) for cache in port.split_rows(state.target_cache)]
    if pair.draft is None:
        return [(cache, None) for cache in targets]
    return list(zip(targets, (port.rewind(cache) for cache in port.split_rows(state.draft_cache)), strict=True))


def _told(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds up the tokens of chunks, and tells how many were read."""
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    return read


def _read(
    pair: Pair, ids: tuple[int, ...], target: Cache, draft: Cache | None, told: Callable[[int], None]
) -> tuple[Cache, Cache | None]:
    """Read a row's tokens but the last, from where the caches stand, a chunk at a time."""
    port, size = pair.port, pair.port.prefill_width
    (start,) = port.lengths(target)
    for first in range(start, len(ids) - 1, size):
        chunk = ids[first : min(first + size, len(ids) - 1)]
        target, draft = _read_chunk(pair, chunk, target, draft)
        if len(chunk) == size:
            target, draft = port.mark(target), port.mark(draft) if pair.draft else None
        told(len(chunk))
    return target, draft


def _read_chunk(pair: Pair, chunk: tuple[int, ...], target: Cache, draft: Cache | None) -> tuple[Cache, Cache | None]:
    port, count = pair.port, len(chunk)
    padded = _padded(count)
    tokens = port.asarray(np.array([[*chunk, *[chunk[-1]] * (padded - count)]], dtype=np.int64), pair.target.device)
    taps = pair.draft.spec.target_layer_ids if pair.draft else ()
    made = port.target_pass(pair.target, target, tokens, taps=taps, head=False, exact_rows=False)
    if pair.draft:
        draft = port.draft_context(pair.draft, draft, made.features, (count,), exact_rows=False)
    return port.select(made.family, (count,)), draft


def _padded(count: int) -> int:
    """Return the size that a chunk is padded to: a power of two up to 32, then a multiple of it."""
    return max(LEAST_CHUNK, min(1 << (count - 1).bit_length(), -(-count // 32) * 32))


def _opening(
    pair: Pair,
    rows: tuple[tuple[int, ...], ...],
    made: Sequence[tuple[Cache, Cache | None]],
    seeds: tuple[int, ...],
    width: int,
    exact_rows: bool,
) -> DecodeState:
    return DecodeState(
        tokens=rows,
        target_cache=pair.port.join_rows(tuple(target for target, _ in made)),
        draft_cache=pair.port.join_rows(tuple(draft for _, draft in made)) if pair.draft else None,
        context_features=None,
        step=0,
        seed=seeds,
        stop=(None,) * len(rows),
        width=width,
        exact_rows=exact_rows,
        origin=origin_of(pair),
    )
