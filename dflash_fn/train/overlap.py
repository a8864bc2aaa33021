"""Keeping test prompts out of the data: no text may share a run of words with one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Excluded", "exclude"]

WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Excluded:
    """Prompts that may not be in the data, as runs of words.

    Attributes:
        runs: every `length` words that follow one another in a prompt, whatever stands between them; a shorter prompt
            is one run.
        length: words of a run.
        prompts: how many prompts there were.
    """

    runs: frozenset[tuple[str, ...]]
    length: int
    prompts: int

    def near(self, text: str) -> bool:
        r"""Whether a text has a run of words in common with a prompt.

        Case, punctuation and layout do not count, and a name such as `has_close_elements` is three words.

        Example:
            >>> known = exclude(["Is the sum of two odd numbers even?"], 4)
            >>> known.near("... the SUM of\ntwo primes"), known.near("the sum of primes")
            (True, False)
        """
        words = _words(text)
        return any(run in self.runs for size in self._sizes() for run in _windows(words, size))

    def _sizes(self) -> list[int]:
        return sorted({len(run) for run in self.runs})


def exclude(prompts: Iterable[str], length: int) -> Excluded:
    """Return what keeps these prompts out."""
    known = [_words(prompt) for prompt in prompts]
    runs = {run for words in known if words for run in _windows(words, min(length, len(words)))}
    return Excluded(frozenset(runs), length, len(known))


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _windows(words: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[first:] for first in range(size)), strict=False)
