"""What a benchmark asks, of whom, and what it gets: the same records for a pair in this process and for a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dflash_fn.text import Message

__all__ = ["Ask", "Reply", "Subject", "Watch"]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, what it took, or why there is none.

    Attributes:
        text: of the answer; what had come where `error` is set.
        tokens: how many were emitted.
        seconds: from the question to the last token, prompt included.
        first: seconds from the question to the first token; None where none came.
        emitted: how many tokens each step emitted, without the first token's; empty where there are no steps, or a
            server does not tell.
        parts: seconds of all steps by what they were spent on (`draft`, `verify`, `select`, `overhead`); empty where
            that is not known.
        error: why there is no whole answer, for the report; None where there is one.
        steps: how many steps there were; None where there are none, or a server does not tell. Some tell this alone,
            and then tau is (tokens - 1) / steps.
        counted_by: what counted `tokens` where it was not this process: `server`, or `tokenizer` where the server
            does not tell and its text was tokenized here; None for a pair in this process.
        blocks: block size of each step, in the order of `emitted`; empty where every step had the same, as those of a
            fixed size, or nobody tells.
    """

    text: str
    tokens: int
    seconds: float
    first: float | None = None
    emitted: tuple[int, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    steps: int | None = None
    counted_by: str | None = None
    blocks: tuple[int, ...] = ()


Ask = Callable[[Sequence[Message], int], Reply]
"""Takes a conversation that ends with a user's message, and the most tokens to answer with.

Never raises for what goes wrong with one question (a server that dies, answers nonsense or stalls): its reply says so.
"""


Watch = Callable[[], Callable[[], float | None]]
"""Called before questions are asked; what it returns, called after them, is the tau that the server as a whole counted
in between, or None where it counts none."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A way of decoding that a benchmark measures.

    Attributes:
        name: for tables.
        ask: answers one question.
        concurrency: how many questions to ask at once; 1 for a pair in this process.
        lossless: whether its greedy text is to equal that of decoding without a draft.
        watch: for servers, which may count steps of all requests together where they tell none of a single one.
    """

    name: str
    ask: Ask
    concurrency: int = 1
    lossless: bool = True
    watch: Watch | None = None
