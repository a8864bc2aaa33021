"""Decoding one row to text: what came of it, and what it took."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dflash_fn.cli import terminal
from dflash_fn.metrics import Summary, summarize
from dflash_fn.text import TextStream, feed, flush

if TYPE_CHECKING:
    from dflash_fn.policies import Policy
    from dflash_fn.records import DecodeState, Pace, Pair, Proposer, StepInfo

__all__ = ["Answer", "Write", "decode_answer", "digests_of", "extended", "opened", "silent"]

Write: TypeAlias = Callable[[str], None]
"""Takes each piece of text as soon as it is settled."""


def silent(text: str) -> None:
    """Write nothing."""
    del text


@dataclass(frozen=True, slots=True)
class Answer:
    """What was decoded after a prompt, as far as it got.

    Attributes:
        state: the last state reached.
        prompt_tokens: tokens before the answer.
        text: the answer's text.
        infos: what each step reported, less its logits.
        seconds: time from the start of prefill to the end of each step, models alone: printing is not counted.
        digests: of each emitted token's logits row, where asked for.
        interrupted: whether Ctrl-C ended it.
    """

    state: DecodeState
    prompt_tokens: int
    text: str
    infos: tuple[StepInfo, ...]
    seconds: tuple[float, ...]
    digests: tuple[bytes, ...] = ()
    interrupted: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the answer."""
        return tuple(token for info in self.infos for token in info.emitted[0])

    @property
    def summary(self) -> Summary:
        """Its statistics."""
        return summarize(self.infos)

    @property
    def finish_reason(self) -> str:
        """`stop`, `length`, or `interrupted`."""
        stop = self.state.stop[0]
        if stop is not None:
            return stop.finish_reason
        return "interrupted" if self.interrupted else "length"

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the start of prefill to the first token."""
        return self.seconds[0] if self.seconds else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after the first; None for fewer than two tokens."""
        after_first = len(self.tokens) - 1
        return (self.seconds[-1] - self.seconds[0]) / after_first if after_first > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first, so that prefill does not count."""
        return 1 / self.tpot_s if self.tpot_s else None


def opened(pair: Pair, prompt: str | list[int], *, seed: int, width: int) -> tuple[DecodeState, float]:
    """Prefill, and return the seconds that it took."""
    from dflash_fn import prefill

    started = time.perf_counter()
    state = prefill(pair, prompt, seed=seed, width=width, progress=terminal.reading)
    return state, time.perf_counter() - started


def extended(pair: Pair, state: DecodeState, ids: list[int]) -> tuple[DecodeState, float]:
    """Add a turn to a state, and return the seconds that it took."""
    from dflash_fn import extend

    started = time.perf_counter()
    state = extend(state, pair, ids, progress=terminal.reading)
    return state, time.perf_counter() - started


def decode_answer(
    state: DecodeState,
    pair: Pair,
    *,
    max_new_tokens: int,
    block_size: int | Pace,
    seconds: float,
    write: Write = silent,
    continues: bool = False,
    digests: bool = False,
    stop_token_ids: tuple[int, ...] | None = None,
    policy: Policy | None = None,
    proposer: Proposer | None = None,
) -> Answer:
    """Decode until the row stops or the user presses Ctrl-C, which keeps what there is.

    Args:
        state: of one row.
        pair: target, draft and port.
        max_new_tokens: budget of the answer.
        block_size: B, or what chooses it.
        seconds: that `state` took.
        write: gets the text piece by piece; the pieces are the answer's text.
        continues: whether the text goes on from the prompt's, or starts anew as a chat's answer does.
        digests: whether to keep a digest of each emitted token's logits.
        stop_token_ids: see `dflash_fn.rounds`.
        policy: see `dflash_fn.rounds`.
        proposer: see `dflash_fn.rounds`.
    """
    from dflash_fn import rounds

    stream = TextStream(pair.tokenizer)
    if continues:
        stream, _ = feed(stream, state.tokens[0])
    steps = rounds(
        state,
        pair,
        policy=policy,
        max_new_tokens=max_new_tokens,
        block_size=block_size,
        stop_token_ids=stop_token_ids,
        proposer=proposer,
    )
    done: list[_Done] = []
    interrupted = False
    try:
        while True:
            before = time.perf_counter()
            made = next(steps, None)
            seconds += time.perf_counter() - before
            if made is None:
                break
            info = made[1]
            stream_after, piece = feed(stream, info.emitted[0])
            write(piece)
            marks = digests_of(pair, info) if digests else ()
            done.append(_Done(made[0], replace(info, logits=None), seconds, piece, marks))
            stream = stream_after
    except KeyboardInterrupt:
        interrupted = True
    rest = flush(stream)
    write(rest)
    return _answer(state, done, rest, interrupted)


class _Done(NamedTuple):
    """One step; appended in one go, so that Ctrl-C at any moment leaves whole steps."""

    state: DecodeState
    info: StepInfo
    seconds: float
    piece: str
    digests: tuple[bytes, ...]


def _answer(state: DecodeState, done: list[_Done], rest: str, interrupted: bool) -> Answer:
    return Answer(
        state=done[-1].state if done else state,
        prompt_tokens=len(state.tokens[0]),
        text="".join(step.piece for step in done) + rest,
        infos=tuple(step.info for step in done),
        seconds=tuple(step.seconds for step in done),
        digests=tuple(digest for step in done for digest in step.digests),
        interrupted=interrupted,
    )


def digests_of(pair: Pair, info: StepInfo) -> tuple[bytes, ...]:
    """Digest the bytes of each emitted token's logits row: a run's rows themselves would fill the memory."""
    rows = pair.port.to_numpy(info.logits)[0]
    return tuple(hashlib.blake2b(rows[slot].tobytes(), digest_size=16).digest() for slot in range(len(info.emitted[0])))
