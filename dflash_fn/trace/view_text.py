"""Tokens as text for people: by a tokenizer, or as ids where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_fn.text import TextStream, feed, flush

__all__ = ["Speller", "speller_of"]


@dataclass(frozen=True, slots=True)
class Speller:
    """How tokens are written.

    Attributes:
        alone: a token's text where it stands alone.
        along: the pieces of a text, one a token: what each adds to those before it.
        separator: what stands between two pieces.
    """

    alone: Callable[[int], str]
    along: Callable[[Sequence[int]], list[str]]
    separator: str


def speller_of(tokenizer: Any | None) -> Speller:
    """Return how a tokenizer writes tokens; as ids where it is None."""
    if tokenizer is None:
        return Speller(str, lambda ids: [str(token) for token in ids], " ")
    return Speller(lambda token: _alone(tokenizer, token), lambda ids: _along(tokenizer, ids), "")


def _alone(tokenizer: Any, token: int) -> str:
    if token >= len(tokenizer):
        return f"<{token}>"  # a row of the embedding that no text leads to
    text = tokenizer.decode([token], skip_special_tokens=False)
    if text and "\ufffd" not in text:
        return text
    return str(
        tokenizer.convert_ids_to_tokens(token)
    )  # a part of a character: its bytes, as the vocabulary spells them


def _along(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the pieces; a character whose bytes are spread over tokens stands at its last one."""
    stream, pieces = TextStream(tokenizer), []
    for token in ids:
        if token >= len(tokenizer):
            pieces.append(f"<{token}>")
            continue
        stream, piece = feed(stream, [token])
        hidden = token in (stream.hidden or ())
        pieces.append(_alone(tokenizer, token) if hidden else piece)
    if pieces:
        pieces[-1] += flush(stream)
    return pieces
