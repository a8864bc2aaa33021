"""Blocks that callers make themselves: what a proposer drafts, and whether a block and a state go together."""

from __future__ import annotations

import numpy as np

from dflash_fn import errors
from dflash_fn.records import Array, DecodeState, Pair, Proposal, Proposer, Verdict

__all__ = ["asked", "check_block", "check_counts", "check_verdict_type"]


def asked(proposer: Proposer, state: DecodeState, pair: Pair, size: int) -> Array:
    """Return what a proposer drafts, looked at on the host: a wrong id would crash a device, or mean another token."""
    port, device = pair.port, pair.target.device
    tokens, expected = proposer(state, pair, size), (len(state.tokens), size - 1)
    known = type(port.asarray(np.zeros(1, dtype=np.int64), device))
    if not isinstance(tokens, known):
        raise errors.InputError(
            f"proposer: got tokens of type {type(tokens).__name__}, expected an array of port {port.name}; "
            "make it by pair.port.asarray(values, pair.target.device)"
        )
    if tuple(tokens.shape) != expected:
        raise errors.InputError(f"proposer: got tokens of shape {tuple(tokens.shape)}, expected {expected}")
    values = port.to_numpy(tokens)
    if values.dtype.kind not in "iu":
        raise errors.InputError(f"proposer: got tokens of dtype {values.dtype}, expected integers")
    _check_ids(values, pair.target.spec.vocab_size)
    return port.asarray(values.astype(np.int64), device)


def check_block(state: DecodeState, proposal: Proposal) -> None:
    """Raise InputError unless the block has the state's rows and no more slots than its width."""
    rows, drafted = proposal.tokens.shape
    if rows != len(state.tokens) or drafted + 1 > state.width:
        raise errors.InputError(
            f"verify: got a block of {rows} rows and {drafted + 1} slots for a state of {len(state.tokens)} rows and "
            f"width {state.width}; propose from this state, with block_size={state.width} or less"
        )


def check_counts(state: DecodeState, proposal: Proposal, counts: tuple[int, ...]) -> None:
    """Raise InputError unless each row emits at most what the block can lead to."""
    size = proposal.tokens.shape[1] + 1
    if len(counts) != len(state.tokens):
        raise errors.InputError(f"select: got tokens for {len(counts)} rows, the state has {len(state.tokens)}")
    for row, count in enumerate(counts):
        if count > size:
            raise errors.InputError(
                f"select: row {row}: got {count} emitted tokens, expected at most {size}: the block holds {size - 1} "
                "drafted tokens and one more follows"
            )


def check_verdict_type(policy: str, verdict: object, drafted: Array) -> None:
    """Raise InputError unless a rule returned a `Verdict` of two arrays of [R] integers, of the kind it was handed."""
    if not isinstance(verdict, Verdict):
        raise errors.InputError(f"policy {policy!r}: its rule returned {type(verdict).__name__}, expected a Verdict")
    for name in ("num_accepted", "next_token"):
        made, expected = getattr(verdict, name), f"an array of [{drafted.shape[0]}] integers, made by functions of xp"
        if not isinstance(made, type(drafted)):
            found = type(made).__name__
        elif tuple(made.shape) != (drafted.shape[0],) or "int" not in str(made.dtype):
            found = f"shape {list(made.shape)} and dtype {made.dtype}"
        else:
            continue
        raise errors.InputError(f"policy {policy!r}: the {name} of its verdict is {found}, expected {expected}")


def _check_ids(values: np.ndarray, vocab_size: int) -> None:
    wrong = np.argwhere((values < 0) | (values >= vocab_size))
    if len(wrong):
        row, slot = wrong[0]
        raise errors.InputError(
            f"proposer: row {row}, drafted token {slot}: got {values[row, slot]}, expected an id from 0 to "
            f"{vocab_size - 1}"
        )
