"""What every rule would have kept of a trace's blocks, on average over its draws (`dflash_fn.expected`).

That needs p and q of all V tokens, so the trace must have been made with `top_k=None` (`trace record --keep 0`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dflash_fn import errors
from dflash_fn.expected import ACCEPTANCE, expected_accepted
from dflash_fn.trace.records import LawsView, RowStep, Trace

__all__ = ["expected_by_rule", "whole_laws"]


def expected_by_rule(trace: Trace) -> dict[str, list[float]]:
    """Return by rule, a key of `expected.ACCEPTANCE`, the expected number of accepted tokens of each block.

    Blocks are in the order of steps and rows; those that nothing was drafted in have no part. What a rule other than
    the recorded one would keep is along the recorded path, and of tokens that were drawn as the recorded policy draws
    them: a sum over the path's own blocks is no forecast of another rule's path.

    Raises:
        InputError: the trace has no p and q, or not of all tokens, or q = 0 at a drafted token.

    Example:
        >>> import dflash_fn
        >>> from dflash_fn.trace import record
        >>> pair = dflash_fn.load_zoo("tiny-code")
        >>> state = dflash_fn.prefill(pair, "def add(a, b):")
        >>> _, trace = record(state, pair, top_k=None, max_new_tokens=8)
        >>> found = expected_by_rule(trace)
        >>> found["token_rejection"] == [row.num_accepted for (row,) in trace.steps if len(row.block) > 1]
        True
    """
    made: dict[str, list[float]] = {name: [] for name in ACCEPTANCE}
    for step, row, found in _drafted(trace):
        p, q = whole_laws(found, where=f"step {step}, row {row}")
        for name, blocks in made.items():
            blocks.append(expected_accepted(name, found.block[1:], p, q))
    return made


def _drafted(trace: Trace) -> Iterator[tuple[int, int, RowStep]]:
    for step, rows in enumerate(trace.steps):
        for row, found in enumerate(rows):
            if found is not None and len(found.block) > 1:
                yield step, row, found


def whole_laws(found: RowStep, *, where: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """Return p [B, V] and q [B - 1, V] of a block in the order of token ids, from a trace that keeps all of them.

    Args:
        found: one row of a step.
        where: for messages.

    Raises:
        InputError: the trace has no p and q, or not of all tokens.
    """
    view = found.laws
    if view is None:
        raise errors.InputError(f"{where}: the trace has no p and q; record it with this library")
    _check_whole(view, where)
    p, q = np.empty_like(view.p), np.empty_like(view.q)
    np.put_along_axis(p, view.ids, view.p, axis=1)
    np.put_along_axis(q, view.ids[:-1], view.q, axis=1)
    return p, q


def _check_whole(view: LawsView, where: str) -> None:
    kept = view.ids.shape[1]
    if not np.array_equal(np.sort(view.ids, axis=1), np.broadcast_to(np.arange(kept), view.ids.shape)):
        raise errors.InputError(
            f"{where}: the trace keeps p and q of {kept} tokens a slot, expected all of them; record it with "
            "top_k=None (dflash-fn trace record --keep 0)"
        )
