"""Penalties for tokens that came before, as OpenAI's API and transformers have them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from dflash_fn import errors
from dflash_fn.checks import RowCount, check_number, check_row_counts, of_row
from dflash_fn.policies import Constraint

__all__ = ["Skip", "frequency", "presence", "repetition"]

Skip: TypeAlias = RowCount
"""How many of a row's first tokens do not count, such as those of the prompt: one number, or one a row."""


def presence(amount: float, *, skip: Skip = 0) -> Constraint:
    """Take `amount` off the logit of every token that occurred: l[v] - amount * (count[v] > 0).

    Raises:
        InputError: an amount that is no finite number, a skip below 0; when called, no skip for a row.

    Source:
        OpenAI's API reference, `presence_penalty`, which counts the answer's tokens alone: `skip=len(prompt)`.
    """
    amount, skip = check_number("presence: amount", amount), check_row_counts("presence: skip", skip)

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        return logits - np.float32(amount) * (counts(logits, tokens, row, skip) > 0)

    return constraint


def frequency(amount: float, *, skip: Skip = 0) -> Constraint:
    """Take `amount` off a token's logit for each time that it occurred: l[v] - amount * count[v].

    Raises:
        InputError: as `presence`.

    Source:
        OpenAI's API reference, `frequency_penalty`, which counts the answer's tokens alone: `skip=len(prompt)`.
    """
    amount, skip = check_number("frequency: amount", amount), check_row_counts("frequency: skip", skip)

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        return logits - np.float32(amount) * counts(logits, tokens, row, skip)

    return constraint


def repetition(factor: float, *, skip: Skip = 0) -> Constraint:
    """Divide the logit of every token that occurred by `factor` where it is positive, and multiply it where not.

    Raises:
        InputError: a factor that is no finite number above 0; a skip as in `presence`.

    Source:
        Keskar et al. 1909.05858, section 4.1, with the negative side as transformers has it in
        `RepetitionPenaltyLogitsProcessor`. The prompt counts there too, unless `prompt_ignore_length` is given.
    """
    factor, skip = check_number("repetition: factor", factor), check_row_counts("repetition: skip", skip)
    if not factor > 0:
        raise errors.InputError(f"repetition: got factor {factor}, expected a number above 0; 1 changes nothing")

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        changed = np.where(logits < 0, logits * np.float32(factor), logits / np.float32(factor))
        return np.where(counts(logits, tokens, row, skip) > 0, changed, logits)

    return constraint


def counts(logits: np.ndarray, tokens: tuple[int, ...], row: int, skip: Skip) -> np.ndarray:
    """Return [V] float32, how often each token occurred after the first `skip`."""
    first = of_row("skip", skip, row)
    counted = np.asarray(tokens[first:], dtype=np.int64)
    return np.bincount(counted, minlength=len(logits)).astype(np.float32)
