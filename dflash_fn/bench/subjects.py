"""Ways to decode with a pair in this process, each as a `Subject` that answers questions and says what that took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from dflash_fn import errors
from dflash_fn.bench.clock import Clock, TimedPort, finisher
from dflash_fn.bench.contenders import Contender
from dflash_fn.bench.engines import Decode, Decoded, generate, mlx_lm, upstream
from dflash_fn.bench.replies import Reply, Subject
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.pacing import Adaptive, measure
from dflash_fn.port import Port
from dflash_fn.proposers import PROPOSERS
from dflash_fn.records import Pace, Pair, Proposer
from dflash_fn.text import Message, conversation_ids

__all__ = ["Manner", "open_subject", "open_subjects"]


PROBE: list[Message] = [{"role": "user", "content": "a"}]
"""What a chat template is tried with."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How all ways are to ask and to stop.

    Attributes:
        raw: whether text goes on without a chat template.
        thinking: see `dflash_fn.text.chat_prompt`.
        ignore_eos: whether to decode past all stop tokens, up to the budget.
        parts: whether to wait for each part of a step where a port computes later than asked, so that parts can be
            timed; that slows its steps.
    """

    raw: bool = False
    thinking: bool | None = None
    ignore_eos: bool = False
    parts: bool = False


def open_subjects(pair: Pair, ways: Iterable[Contender], manner: Manner | None = None) -> list[Subject]:
    """Load what the ways need beside the pair.

    Raises:
        InputError: the pair has no tokenizer, or thinking is asked of one that has no switch for it.
        BackendMissing: `upstream` is asked for, and the package `dflash` is not installed.
    """
    return [open_subject(pair, one, manner) for one in ways]


def open_subject(pair: Pair, way: Contender, manner: Manner | None = None) -> Subject:
    """Make one way ready; see `open_subjects`."""
    manner = manner or Manner()
    if pair.tokenizer is None:
        raise errors.InputError(f"pair {pair.name}: has no tokenizer, which questions need; give one to load_pair")
    if manner.thinking is not None:  # would fail for every question alike
        conversation_ids(pair.tokenizer, PROBE, raw=manner.raw, thinking=manner.thinking)
    stop = () if manner.ignore_eos else tuple(pair.target.spec.eos_token_ids)
    makers: dict[str, Callable[[], Decode]] = {
        "generate": lambda: generate(pair, stop),
        "mlx-lm": lambda: mlx_lm(pair, stop),
        "upstream": lambda: upstream(pair, way.block, stop),
    }
    decode = makers[way.kind]() if way.kind in makers else _ours(pair, way, stop, manner)
    return Subject(way.name, _asked(pair.tokenizer, decode, manner))


def _asked(tokenizer: Any, decode: Decode, manner: Manner) -> Callable[[Sequence[Message], int], Reply]:
    def ask(messages: Sequence[Message], count: int) -> Reply:
        begun = time.perf_counter()
        try:
            ids = conversation_ids(tokenizer, messages, raw=manner.raw, thinking=manner.thinking)
            begun = time.perf_counter()
            made = decode(ids, count)
            seconds = time.perf_counter() - begun
            text = tokenizer.decode(list(made.tokens), skip_special_tokens=True)
        except Exception as error:  # whatever an engine raises costs this question alone, and is reported
            return Reply("", 0, time.perf_counter() - begun, error=_told(error))
        return Reply(text, len(made.tokens), seconds, made.first, made.emitted, made.parts, blocks=made.blocks)

    return ask


def _told(error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    return said if isinstance(error, errors.DflashError) else f"{type(error).__name__}: {said}"


def _ours(pair: Pair, way: Contender, stop: tuple[int, ...], manner: Manner) -> Decode:
    pair = replace(pair, draft=None) if way.kind in ("plain", "ngram") else pair
    make = PROPOSERS.get(way.kind)
    finish = finisher(pair.port.name, pair.target.device)
    clock = Clock(finish) if finish is None or manner.parts else None
    proposer = make() if make else None
    if clock is not None:
        pair = replace(pair, port=cast("Port", TimedPort(pair.port, clock)))
        proposer = clock.timed("draft", proposer) if proposer else None
    size = 1 if way.kind == "plain" else way.block
    costs: dict[int, float] = {}

    def decode(ids: list[int], count: int) -> Decoded:
        if way.paced and not costs:
            costs.update(measure(prefill(pair, ids, width=way.block), pair, proposer=proposer))
        return _decoded(pair, ids, count, (Adaptive(costs) if way.paced else size, way.block), stop, proposer, clock)

    return decode


def _decoded(
    pair: Pair, ids: list[int], count: int, sizes: tuple[int | Pace, int], stop: tuple[int, ...],
    proposer: Proposer | None, clock: Clock | None,
) -> Decoded:  # fmt: skip
    tokens: list[int] = []
    steps: list[tuple[int, int]] = []
    first = None
    begun = time.perf_counter()
    state = prefill(pair, ids, width=sizes[1])
    for _, info in rounds(
        state, pair, max_new_tokens=count, stop_token_ids=stop, block_size=sizes[0], proposer=proposer
    ):
        tokens += info.emitted[0]
        if first is not None:
            steps.append((len(info.emitted[0]), info.block_size))
            continue
        first = time.perf_counter() - begun
        if clock is not None:
            clock.clear()
    seconds = time.perf_counter() - begun - (first or 0.0)
    parts = clock.parts(seconds) if clock and steps else {}
    emitted, blocks = tuple(count for count, _ in steps), tuple(block for _, block in steps)
    return Decoded(
        tokens, first, emitted, parts, blocks if isinstance(sizes[0], Adaptive) or len(set(blocks)) > 1 else ()
    )
