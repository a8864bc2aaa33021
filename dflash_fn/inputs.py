"""Checks of what a caller hands in, before any work is done with it."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from dflash_fn import errors
from dflash_fn.checks import check_count
from dflash_fn.policies import Policy, match
from dflash_fn.records import Pair, Proposer

__all__ = [
    "Prompts",
    "as_path",
    "as_policy",
    "as_rows",
    "as_seeds",
    "as_stop_ids",
    "check_block_size",
    "check_fit",
    "check_proposer",
    "check_width",
]

Prompts: TypeAlias = "str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]"
"""One prompt (text or token ids), or one a row."""


def as_rows(
    pair: Pair, prompts: Prompts, *, special: bool = True, name: str = "prompts"
) -> tuple[tuple[int, ...], ...]:
    """Return token ids a row; text goes through the pair's tokenizer as it is, without a chat template.

    Args:
        pair: whose tokenizer and vocabulary count.
        prompts: one prompt, or one a row.
        special: whether the tokenizer may put its own tokens around text, such as one that begins a text.
        name: of the argument, for messages.

    Raises:
        InputError: what is neither text nor token ids, text without a tokenizer, or an id that the target does not
            have.
    """
    if not isinstance(prompts, str) and not _is_sequence(prompts):
        raise errors.InputError(
            f"{name}: got {reprlib.repr(prompts)} of type {type(prompts).__name__}, expected text, a sequence of "
            "token ids, or a sequence of these with one a row; of an array, give .tolist()"
        )
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        prompts = [prompts]  # pyright: ignore[reportAssignmentType]
    return tuple(_as_ids(pair, row, prompt, special) for row, prompt in enumerate(prompts))


def _as_ids(pair: Pair, row: int, prompt: Any, special: bool) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if pair.tokenizer is None:
            raise errors.InputError(f"row {row}: got text, but the pair has no tokenizer; give token ids")
        prompt = pair.tokenizer.encode(prompt, add_special_tokens=special)
    if not _is_sequence(prompt):
        raise errors.InputError(
            f"row {row}: got {reprlib.repr(prompt)} of type {type(prompt).__name__}, expected text or a sequence of "
            "token ids"
        )
    vocab_size = pair.target.spec.vocab_size
    ids = []
    for index, token in enumerate(prompt):
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= int(token) < vocab_size:
            raise errors.InputError(
                f"row {row}, token {index}: got {reprlib.repr(token)}, expected an id from 0 to {vocab_size - 1}"
            )
        ids.append(int(token))
    return tuple(ids)


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a value has an order and a length. Bytes are numbers too, but nobody means them as token ids."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def check_fit(pair: Pair, rows: Sequence[Sequence[int]]) -> None:
    """Raise InputError unless there are rows, and each has a token and leaves room for one in the target's context."""
    if not rows:
        raise errors.InputError("prompts: got none, expected at least one row")
    limit = pair.target.spec.max_context
    for row, ids in enumerate(rows):
        if not ids:
            raise errors.InputError(f"row {row}: the prompt is empty; expected at least one token")
        if len(ids) >= limit:
            raise errors.InputError(
                f"row {row}: the prompt has {len(ids)} tokens; the target's context holds {limit}, "
                "one of which must be left for an answer"
            )


def as_seeds(seed: int | Sequence[int], rows: int) -> tuple[int, ...]:
    """Return one seed a row; a single seed serves all rows, so that a row equals its single-row run."""
    seeds: tuple[Any, ...] = tuple(seed) if _is_sequence(seed) else (seed,) * rows
    if len(seeds) != rows:
        raise errors.InputError(f"seed: got {len(seeds)} seeds for {rows} rows; expected one, or one a row")
    return tuple(check_count("seed", value, least=0, most=2**64 - 1) for value in seeds)


def as_stop_ids(pair: Pair, stop_token_ids: int | Iterable[int] | None) -> frozenset[int]:
    """Return the ids that end a row: the target's own where None is given."""
    if stop_token_ids is None:
        return frozenset(pair.target.spec.eos_token_ids)
    if isinstance(stop_token_ids, Iterable) and not isinstance(stop_token_ids, bytes):
        ids: list[Any] = list(stop_token_ids)
    else:
        ids = [stop_token_ids]
    most = pair.target.spec.vocab_size - 1
    return frozenset(check_count("stop_token_ids", token, least=0, most=most) for token in ids)


def check_width(pair: Pair, width: int | None) -> int:
    """Return the width of a new state: the draft's block size where None is given."""
    return check_count("width", pair.block_size if width is None else width, least=1, most=pair.port.max_width)


def check_block_size(pair: Pair, block_size: int | None, width: int) -> int:
    """Return the block size of a step, or raise InputError if the state's width has no room for it."""
    size = check_count("block_size", pair.block_size if block_size is None else block_size, least=1)
    if size > width:
        raise errors.InputError(
            f"block_size {size} is above the state's width {width}; "
            f"prefill with width={size} or more, or decode with block_size={width} or less"
        )
    return size


def as_policy(policy: Policy | None) -> Policy:
    """Return the policy, the match rule where None is given; InputError for what is none, such as a name."""
    if policy is None:
        return match()
    if not isinstance(policy, Policy):
        raise errors.InputError(
            f"policy: got {reprlib.repr(policy)} of type {type(policy).__name__}, expected a Policy, such as "
            "dflash_fn.match()"
        )
    return policy


def check_proposer(proposer: Proposer | None) -> None:
    """Raise InputError for what cannot be called."""
    if proposer is not None and not callable(proposer):
        raise errors.InputError(
            f"proposer: got {reprlib.repr(proposer)}, expected a function (state, pair, block size) -> drafted tokens"
        )


def as_path(path: str | Path, order: str) -> Path:
    """Return the path of a file, or raise InputError, which tells the order of the arguments."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        shown = reprlib.repr(path) if isinstance(path, (str, int, bytes)) else type(path).__name__
        raise errors.InputError(f"path: got {shown}, expected the path of a file; the arguments are ({order})")
    return Path(path)
