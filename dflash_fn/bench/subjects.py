"""Ways to decode with a pair in this process, each as a `Subject` that answers questions and says what that took."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from dflash_fn import errors
from dflash_fn.bench.clock import Clock, TimedPort, finisher
from dflash_fn.bench.common import conversation_ids
from dflash_fn.bench.contenders import Contender
from dflash_fn.bench.engines import mlx_lm_model, transformers_model
from dflash_fn.bench.replies import Reply, Subject
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.port import Port
from dflash_fn.proposers import PROPOSERS
from dflash_fn.records import Pair, Proposer
from dflash_fn.text import Message

__all__ = ["Decoded", "Manner", "open_subject", "open_subjects"]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a way made of token ids.

    Attributes:
        tokens: that it emitted.
        first: seconds to the first of them; None where it emitted none.
        emitted: as in `Reply`.
        parts: as in `Reply`.
    """

    tokens: Sequence[int]
    first: float | None
    emitted: tuple[int, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)


Decode = Callable[[list[int], int], Decoded]


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
        InputError: the pair has no tokenizer.
        BackendMissing: `upstream` is asked for, and the package `dflash` is not installed.
    """
    return [open_subject(pair, one, manner) for one in ways]


def open_subject(pair: Pair, way: Contender, manner: Manner | None = None) -> Subject:
    """Make one way ready; see `open_subjects`."""
    manner = manner or Manner()
    if pair.tokenizer is None:
        raise errors.InputError(f"pair {pair.name}: has no tokenizer, which questions need; give one to load_pair")
    stop = () if manner.ignore_eos else tuple(pair.target.spec.eos_token_ids)
    makers: dict[str, Callable[[], Decode]] = {
        "generate": lambda: _generate(pair, stop),
        "mlx-lm": lambda: _mlx_lm(pair, stop),
        "upstream": lambda: _upstream(pair, way.block, stop),
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
        return Reply(text, len(made.tokens), seconds, made.first, made.emitted, made.parts)

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
    return lambda ids, count: _decoded(pair, ids, count, (size, way.block), stop, proposer, clock)


def _decoded(
    pair: Pair, ids: list[int], count: int, sizes: tuple[int, int], stop: tuple[int, ...], proposer: Proposer | None,
    clock: Clock | None,
) -> Decoded:  # fmt: skip
    tokens: list[int] = []
    emitted: list[int] = []
    first = None
    begun = time.perf_counter()
    state = prefill(pair, ids, width=sizes[1])
    for _, info in rounds(
        state, pair, max_new_tokens=count, stop_token_ids=stop, block_size=sizes[0], proposer=proposer
    ):
        tokens += info.emitted[0]
        if first is not None:
            emitted.append(len(info.emitted[0]))
            continue
        first = time.perf_counter() - begun
        if clock is not None:
            clock.clear()
    seconds = time.perf_counter() - begun - (first or 0.0)
    return Decoded(tokens, first, tuple(emitted), clock.parts(seconds) if clock and emitted else {})


class _FirstToken:
    """A streamer of transformers that notes when the first token came; the prompt comes before it."""

    def __init__(self) -> None:
        self.calls, self.at = 0, None

    def put(self, value: Any) -> None:
        del value
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def _generate(pair: Pair, stop: tuple[int, ...]) -> Decode:
    import torch

    assert pair.target.source is not None
    model = transformers_model(pair.target.source, pair.target.dtype, pair.target.device)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": list(stop) or None, "pad_token_id": 0}

    def decode(ids: list[int], count: int) -> Decoded:
        given, watch = torch.tensor([ids], device=pair.target.device), _FirstToken()
        begun = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=count, streamer=watch, **options
            )
        return Decoded(out[0, len(ids) :].tolist(), watch.at - begun if watch.at else None)

    return decode


def _mlx_lm(pair: Pair, stop: tuple[int, ...]) -> Decode:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    assert pair.target.source is not None
    model = mlx_lm_model(pair.target.source, pair.target.dtype)

    def decode(ids: list[int], count: int) -> Decoded:
        tokens: list[int] = []
        first, begun = None, time.perf_counter()
        for token, _ in generate_step(mx.array(ids), model, max_tokens=count):
            first = first if first is not None else time.perf_counter() - begun
            tokens.append(int(token))
            if tokens[-1] in stop:
                break
        return Decoded(tokens, first)

    return decode


def _upstream(pair: Pair, block: int, stop: tuple[int, ...]) -> Decode:
    import torch

    try:
        from dflash import model as upstream  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise errors.BackendMissing(
            "way upstream needs the package dflash, which is not installed; run: pip install --no-deps dflash==0.1.0"
        ) from None
    assert pair.draft is not None
    assert pair.draft.source is not None
    assert pair.target.source is not None
    device = pair.target.device
    if not device.startswith("cuda"):
        upstream._cuda_time = time.perf_counter  # it waits for CUDA whether there is one or not
    target = transformers_model(pair.target.source, pair.target.dtype, device)
    kind: Any = upstream.DFlashDraftModel
    draft = pair.draft.source.obj
    if draft is None:
        draft = kind.from_pretrained(pair.draft.source.folder, dtype=getattr(torch, pair.draft.dtype)).to(device).eval()

    def decode(ids: list[int], count: int) -> Decoded:
        given: Any = torch.tensor([ids], device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what upstream calls is not for who measures it to mend
            made: Any = upstream.dflash_generate(
                draft, target, given, count, list(stop), block_size=block, return_stats=True
            )
        return Decoded(
            made.output_ids[0, len(ids) :].tolist(), made.time_to_first_token, tuple(made.acceptance_lengths)
        )

    return decode
