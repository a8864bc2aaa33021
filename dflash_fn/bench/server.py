"""Asking an OpenAI-compatible server (vLLM, SGLang, oMLX, llama.cpp, transformers, mlx-lm) as a benchmark asks a pair.

Answers are streamed and greedy. Nothing is tried twice, so that what is measured is what happened; what goes wrong
with one question is the error of its reply and of no other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dflash_fn import errors
from dflash_fn.bench.replies import Reply, Subject
from dflash_fn.bench.server_acceptance import ASKS, steps_of, watching
from dflash_fn.bench.server_client import (
    CONNECT,
    STALL,
    Malformed,
    Server,
    explain_failure,
    object_of,
    open_client,
    told,
)
from dflash_fn.bench.server_silence import within
from dflash_fn.text import Message

__all__ = ["open_server"]


def open_server(
    url: str,
    *,
    model: str | None = None,
    name: str | None = None,
    concurrency: int = 1,
    timeout: float = STALL,
    connect_timeout: float = CONNECT,
    api_key: str | None = None,
    raw: bool = False,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
    lossless: bool = True,
) -> Subject:
    """Reach a server, and return it as what a benchmark measures.

    Args:
        url: its address, with or without `/v1`.
        model: whom to ask; None takes the only one that it serves.
        name: for tables; None takes the model's.
        concurrency: how many questions to ask at once.
        timeout: seconds without data after which a request has stalled; comments, which keep a connection alive, are
            no data.
        connect_timeout: seconds to wait for a connection.
        api_key: for servers that want one.
        raw: whether the last message's text is gone on from (completions), in place of answered (chat completions).
        tokenizer: counts tokens where the server does not tell (`usage`); replies say who counted. Without one, such
            a reply is an error: pieces of a stream are no tokens.
        options: fields for every request beside the API's own, such as `{"chat_template_kwargs":
            {"enable_thinking": False}}`.
        lossless: whether its text is to equal that of decoding without a draft.

    Raises:
        InputError: no address, no concurrency, or a model is to be named.
        BackendMissing: the package `openai` is not installed.
        ServerError: nobody answers, or not as such a server does.
    """
    if concurrency < 1:
        raise errors.InputError(f"concurrency: got {concurrency}, expected 1 or more")
    server = open_client(url, model=model, api_key=api_key, connect=connect_timeout, stall=timeout)
    wants = {**ASKS.get(server.kind or "", {}), **(options or {})}
    asker = _Asker(server, raw, tokenizer, wants)
    watch = partial(watching, server.root, server.kind, api_key)
    return Subject(name or server.model, asker.ask, concurrency, lossless, watch)


@dataclass(slots=True)
class _Asker:
    """Asks questions of a server; remembers whether it refuses `stream_options`."""

    server: Server
    raw: bool
    tokenizer: Any
    wants: Mapping[str, Any]
    usage: bool = True

    def ask(self, messages: Sequence[Message], budget: int) -> Reply:
        """Ask, and read the answer as it comes."""
        url = f"{self.server.url}/{'completions' if self.raw else 'chat/completions'}"
        heard = _Heard(time.perf_counter())
        try:
            for piece in self._pieces(messages, budget):
                heard.add(piece)
        except Exception as error:  # anything may come from a server, and costs this question alone
            return heard.reply(explain_failure(error, url, self.server.stall), self.tokenizer)
        return heard.reply(heard.fault(url), self.tokenizer, url)

    def _pieces(self, messages: Sequence[Message], budget: int) -> Iterator[Mapping[str, Any]]:
        import openai

        try:
            stream = self._begin(messages, budget)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            if not (self.usage and "stream_options" in told(error)):
                raise
            self.usage = False  # a server of an older API; its refusal took no decoding, so asking again hides nothing
            stream = self._begin(messages, budget)
        with stream:
            within(stream.response, self.server.stall)
            for piece in stream:
                yield object_of(piece, "a piece of the stream")

    def _begin(self, messages: Sequence[Message], budget: int) -> Any:
        client, shared = self.server.client, self._shared(budget)
        if self.raw:
            return client.completions.create(prompt=messages[-1]["content"], **shared)
        conversation: Any = list(messages)  # plain dictionaries, which the client's types want named
        return client.chat.completions.create(messages=conversation, **shared)

    def _shared(self, budget: int) -> dict[str, Any]:
        asked = {"stream_options": {"include_usage": True}} if self.usage else {}
        return {
            "model": self.server.model,
            "max_tokens": budget,
            "temperature": 0.0,
            "stream": True,
            "extra_body": dict(self.wants),
            **asked,
        }


@dataclass(slots=True)
class _Heard:
    """What has come of an answer."""

    began: float
    text: str = ""
    thought: str = ""
    first: float | None = None
    last: float | None = None
    finish: str | None = None
    choices: int = 0
    usage: Any = None
    emitted: tuple[int, ...] = ()
    steps: int | None = None
    pieces: int = 0

    def add(self, piece: Mapping[str, Any]) -> None:
        """Read a piece of the stream."""
        self.pieces += 1
        choices = piece.get("choices") or ()
        if not isinstance(choices, list | tuple):
            raise Malformed("choices of a piece is no list")
        for choice in choices:
            self.choices += 1
            self._say(object_of(choice, "a choice"))
        usage = piece.get("usage")
        if isinstance(usage, Mapping) and usage.get("completion_tokens") is not None:
            self.usage = usage["completion_tokens"]
        emitted, steps = steps_of(piece)
        if steps is not None:
            self.emitted, self.steps = emitted, steps

    def _say(self, choice: Mapping[str, Any]) -> None:
        delta = object_of(choice.get("delta") or {}, "a delta")
        said = str(delta.get("content") or choice.get("text") or "")
        thought = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
        if said or thought:
            self.last = time.perf_counter() - self.began
            self.first = self.last if self.first is None else self.first
        self.text += said
        self.thought += thought
        self.finish = choice.get("finish_reason") or self.finish

    def fault(self, url: str) -> str | None:
        """Say what is wrong with a stream that has ended in good order; None if nothing is."""
        if not self.pieces:
            return f"{url}: the answer is empty; is this the right address?"
        if not self.choices:
            return f"{url}: the answer holds no choices; look at the server's log"
        if self.finish is None:
            length = len(self.text)
            return (
                f"{url}: the stream ended without a finish_reason, after {length} characters; the server died or cut it"
            )
        if not (self.usage is None or self.counted):
            return (
                f"{url}: the server counts {self.usage!r} tokens (usage.completion_tokens), expected an integer of at "
                "least 0; look at its log"
            )
        return None

    @property
    def counted(self) -> bool:
        """Whether the server's count of tokens is one."""
        return isinstance(self.usage, int) and not isinstance(self.usage, bool) and self.usage >= 0

    def reply(self, error: str | None, tokenizer: Any, url: str = "") -> Reply:
        """Make what has come a reply."""
        tokens, counted_by = self.usage if self.counted else None, "server"
        if tokens is None and tokenizer is not None:
            tokens = len(tokenizer.encode(self.thought + self.text, add_special_tokens=False))
            counted_by = "tokenizer"
        if tokens is None and error is None:
            error = (
                f"{url}: the server does not count tokens (usage); name a tokenizer to count them with by --target "
                "(in Python tokenizer=)"
            )
        seconds = self.last if self.last is not None else time.perf_counter() - self.began
        return Reply(
            self.text,
            tokens or 0,
            seconds,
            self.first,
            self.emitted,
            error=error,
            steps=self.steps,
            counted_by=counted_by if tokens is not None else None,
        )
