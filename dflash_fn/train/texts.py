"""The texts that a draft learns from: prompts with the target's answers, as one array of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_fn import container, errors
from dflash_fn.container import Bits
from dflash_fn.train.files import array_digest

__all__ = ["Texts", "distinct_share", "join", "pack", "read", "write"]

KIND = "texts"


@dataclass(frozen=True, slots=True)
class Texts:
    """Sequences of tokens, one after the other.

    Attributes:
        tokens: [T] int32, all of them.
        offsets: [n + 1] int64; sequence i is `tokens[offsets[i]:offsets[i + 1]]`.
        starts: [n] int64, where in its sequence each answer begins.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """[n] tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def answer_tokens(self) -> int:
        """Tokens of all answers."""
        return int((self.lengths - self.starts).sum())

    @property
    def digest(self) -> str:
        """What two sets of texts share if they are equal."""
        return array_digest(self.tokens, self.offsets, self.starts)

    def subset(self, first: int, last: int) -> Texts:
        """Return sequences `first` to `last`, the last one not included."""
        low, high = self.offsets[first], self.offsets[last]
        return Texts(self.tokens[low:high], self.offsets[first : last + 1] - low, self.starts[first:last])


def pack(entries: Iterable[tuple[Sequence[int], int]]) -> Texts:
    """Return texts of (tokens, start of the answer) pairs."""
    known = list(entries)
    tokens = np.array([token for ids, _ in known for token in ids], dtype=np.int32)
    offsets = np.cumsum([0, *(len(ids) for ids, _ in known)], dtype=np.int64)
    return Texts(tokens, offsets, np.array([start for _, start in known], dtype=np.int64))


def join(parts: Sequence[Texts]) -> Texts:
    """Return the sequences of all parts, in order."""
    shifts = np.cumsum([0, *(len(part.tokens) for part in parts)])
    offsets = [part.offsets[:-1] + shift for part, shift in zip(parts, shifts, strict=False)]
    return Texts(
        np.concatenate([np.zeros(0, dtype=np.int32), *(part.tokens for part in parts)]),
        np.concatenate([*offsets, shifts[-1:]]).astype(np.int64),
        np.concatenate([np.zeros(0, dtype=np.int64), *(part.starts for part in parts)]),
    )


def write(path: Path, texts: Texts) -> None:
    """Write texts to a file, whole or not at all."""
    arrays = {"tokens": texts.tokens, "offsets": texts.offsets, "starts": texts.starts}
    path.parent.mkdir(parents=True, exist_ok=True)
    container.write(path, KIND, {}, {name: Bits(str(values.dtype), values) for name, values in arrays.items()})


def read(path: Path) -> Texts:
    """Read a file of texts.

    Raises:
        InputError: it is not there, or not whole.
    """
    try:
        _, arrays = container.read(path, KIND)
    except errors.StateFileError as error:
        raise errors.InputError(f"{error}; run the stage `data` first") from None
    return Texts(arrays["tokens"].values, arrays["offsets"].values, arrays["starts"].values)


def distinct_share(tokens: Sequence[int], size: int = 4) -> float:
    """Return the share of different n-grams in a text: near 1 in prose, near 0 in a loop; 1 where there are none.

    Example:
        >>> distinct_share([1, 2, 1, 2, 1, 2, 1, 2])
        0.4
    """
    grams = list(zip(*(tokens[first:] for first in range(size)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0
