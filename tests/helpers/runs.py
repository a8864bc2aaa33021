"""Decode and keep everything that was seen, and compare it bit for bit; no array library is named here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import dflash_fn
from dflash_fn.port import Port
from dflash_fn.records import Cache, DecodeState, Pair, StepInfo

__all__ = ["Run", "decode_plainly", "differing", "fetch", "probe", "run", "same", "visible"]


@dataclass(frozen=True)
class Run:
    """What a decode went through.

    Attributes:
        states: the state that it began with, then the state after each step.
        infos: what each step reported.
        emitted: tokens that each row gained.
        logits: [len(emitted[r]), V] a row: what each of those tokens was chosen from.
    """

    states: tuple[DecodeState, ...]
    infos: tuple[StepInfo, ...]
    emitted: tuple[tuple[int, ...], ...]
    logits: tuple[np.ndarray, ...]

    @property
    def last(self) -> DecodeState:
        """The state at the end."""
        return self.states[-1]

    def accepted(self, row: int = 0) -> list[int | None]:
        """Drafted tokens kept a step, the opening step left out."""
        return [info.num_accepted[row] for info in self.infos if info.step > 0]


def run(state: DecodeState, pair: Pair, **options: Any) -> Run:
    """Decode; the options are those of `rounds`, but that no token stops a row unless one is named."""
    options = {"stop_token_ids": (), **options}
    states, infos, rows = [state], [], range(len(state.tokens))
    logits: list[list[np.ndarray]] = [[] for _ in rows]
    for after, info in dflash_fn.rounds(state, pair, **options):
        states.append(after)
        infos.append(info)
        values = pair.port.to_numpy(info.logits)
        for row in rows:
            logits[row].extend(values[row, : len(info.emitted[row])].copy())
    emitted = tuple(new[len(old) :] for old, new in zip(state.tokens, states[-1].tokens, strict=True))
    return Run(tuple(states), tuple(infos), emitted, tuple(np.array(row) for row in logits))


def decode_plainly(state: DecodeState, pair: Pair, count: int, **options: Any) -> Run:
    """Decode one token a step, with no draft, at the state's width: what everything else must equal."""
    return run(state, pair, max_new_tokens=count, block_size=1, **options)


def fetch(port: Port, array: Any) -> np.ndarray:
    """Return an array's bits, so that equality means equality of bits, NaN and the sign of zero included."""
    values = np.ascontiguousarray(port.to_numpy(array))
    return values.view(f"u{values.dtype.itemsize}") if values.dtype.kind == "f" else values


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two host arrays have the same shape, dtype and bits."""
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


def differing(left: np.ndarray, right: np.ndarray) -> list[int]:
    """Return the indices at which two arrays of equal shape differ in bits; the first axis counts."""
    assert left.shape == right.shape
    return [index for index, (a, b) in enumerate(zip(left, right, strict=True)) if a.tobytes() != b.tobytes()]


def visible(port: Port, cache: Cache) -> list[np.ndarray]:
    """Return what a cache sees: its lengths, then K and V by layer and row, [length, heads, dim] each."""
    held = port.export_cache(cache)
    return [np.array(port.lengths(cache)), *(np.array(held[name].values) for name in sorted(held))]


def probe(state: DecodeState, pair: Pair) -> list[np.ndarray]:
    """Return all that can be seen of a state: its caches, and what target and draft make of a fixed block after it."""
    port, size = pair.port, pair.block_size
    fixed = np.arange(1, state.width) % pair.target.spec.vocab_size
    anchors = np.array([[ids[-1]] for ids in state.tokens], dtype=np.int64)
    block = np.concatenate([anchors, np.broadcast_to(fixed, (len(anchors), state.width - 1))], axis=1)
    taps = pair.draft.spec.target_layer_ids if pair.draft else ()
    made = port.target_pass(
        pair.target, state.target_cache, _send(pair, block), taps=taps, head=True, exact_rows=state.exact_rows
    )
    seen = [*visible(port, state.target_cache), fetch(port, made.logits)]
    if pair.draft is None:
        return seen
    cache = dflash_fn.propose(state, pair, block_size=1).draft_cache
    seen += [fetch(port, made.features), *visible(port, cache)]
    if size > 1:
        masks = np.full((len(anchors), size - 1), pair.draft.spec.mask_token_id)
        asked = _send(pair, np.concatenate([anchors, masks], axis=1))
        drafted = port.draft_pass(pair.draft, pair.target, cache, asked, exact_rows=state.exact_rows)
        seen.append(fetch(port, drafted))
    return seen


def _send(pair: Pair, values: np.ndarray) -> Any:
    return pair.port.asarray(values, pair.target.device)


def equal_probes(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    """Whether two states look the same in everything that `probe` sees."""
    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
