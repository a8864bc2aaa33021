"""A server as a way to decode: prompts by their token ids, answers with what the server tells of its logits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_fn import errors
from dflash_fn.bench.server_client import Server, explain_failure, open_client
from dflash_fn.bench.server_logprobs import Names, read_choice
from dflash_fn.bench.ways import Answer, Recipe, Way
from dflash_fn.config import parse_target
from dflash_fn.serving import any_tokenizer
from dflash_fn.sources import resolve
from dflash_fn.text import chat_prompt
from dflash_fn.tolerances import PEAK

__all__ = ["open_server_way"]

TOPS = 10
"""Log probabilities to ask for at each position; mlx-lm gives no more than 11."""

PATIENCE = 600.0
"""Seconds for an answer, which is not streamed: log probabilities come with it."""

EXTRAS: dict[str, dict[str, Any]] = {
    "vllm": {"return_tokens_as_token_ids": True, "return_token_ids": True, "ignore_eos": True},
    "sglang": {"return_token_ids": True, "ignore_eos": True},
    "llama.cpp": {"ignore_eos": True},
}
"""Fields by kind of server: that tokens come as ids, and that stop tokens do not stop."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A form in which a server may be asked.

    Attributes:
        api: `completions` or `chat`.
        ids: whether the prompt goes as token ids, else as text.
        wants: what asks for log probabilities: a number, or a flag and a number (chat, mlx-lm), or nothing.
    """

    api: str
    ids: bool
    wants: Mapping[str, Any]


NUMBER = {"logprobs": TOPS}
FLAG = {"logprobs": True, "top_logprobs": TOPS}

SHAPES = (
    Shape("completions", True, NUMBER),
    Shape("completions", False, FLAG),
    Shape("completions", False, NUMBER),
    Shape("chat", False, FLAG),
    Shape("completions", True, {}),
    Shape("completions", False, {}),
    Shape("chat", False, {}),
)
"""In the order in which they are tried: those that leave least to guess first."""


def open_server_way(text: str, recipe: Recipe, target: str | Path) -> Way:
    """Reach a server, and find out how much it tells.

    The environment's OPENAI_API_KEY is the key of a server that wants one.

    Args:
        text: the recipe, as it was written.
        recipe: with the url.
        target: folder or hub id of what the server runs, for its config and tokenizer; weights are not read.

    Raises:
        InputError: no tokenizer, or a model is to be named.
        ServerError: nobody answers, or not as such a server does.
    """
    source = resolve(target, role="target", weights=False)
    spec = parse_target(source.config, name=source.name)
    tokenizer = any_tokenizer(source)
    if tokenizer is None:
        raise errors.InputError(f"way {text!r}: target {source.name} has no tokenizer, which a server's text needs")
    key = os.environ.get("OPENAI_API_KEY")
    server = open_client(recipe.url or "", model=recipe.model, api_key=key, stall=PATIENCE)
    asker = _Asker(server, tokenizer, Names(tokenizer, spec.vocab_size))
    asker.settle([shape for shape in SHAPES if recipe.api in (None, shape.api)])
    return Way(text, recipe.dtype or spec.dtype, spec, tokenizer, asker.answer, float(recipe.peak or PEAK))


@dataclass(slots=True)
class _Asker:
    """Asks for whole answers, in the shape that tells most."""

    server: Server
    tokenizer: Any
    names: Names
    shape: Shape = SHAPES[0]

    def settle(self, shapes: Sequence[Shape]) -> None:
        """Ask for two tokens in each shape, and keep the first that gives log probabilities, or else any answer."""
        ids = list(self.tokenizer.encode("a b"))
        answered, refusal = None, ""
        for shape in shapes:
            self.shape = shape
            try:
                choice = self._choice(chat_prompt(self.tokenizer, CHAT) if shape.api == "chat" else ids, 2)
            except (errors.ServerError, errors.InputError) as error:
                refusal = refusal or str(error)
                continue
            if choice.get("logprobs"):
                return
            answered = answered or shape
        if answered is None:
            raise errors.ServerError(refusal)
        self.shape = answered

    def answer(self, ids: Sequence[int], count: int) -> Answer:
        """Decode a prompt."""
        choice = self._choice(ids, count)
        text = str(choice.get("text") or (choice.get("message") or {}).get("content") or "")
        ended = choice.get("finish_reason") == "stop"
        rows = read_choice(choice, text, self.names)
        if rows is None:
            return Answer([], [], text=text, ended=ended)
        return Answer([row.chosen for row in rows if row.chosen is not None], rows, ended=ended)

    def _choice(self, ids: Sequence[int], count: int) -> Mapping[str, Any]:
        url = f"{self.server.url}/{'chat/completions' if self.shape.api == 'chat' else 'completions'}"
        try:
            answer = self._send(ids, count).to_dict()
            choice = answer["choices"][0]
        except errors.DflashError:
            raise
        except Exception as error:  # anything may come from a server
            raise errors.ServerError(explain_failure(error, url, self.server.stall)) from error
        read = (answer.get("usage") or {}).get("prompt_tokens")
        if isinstance(read, int) and read != len(ids):
            raise errors.ServerError(
                f"{url}: the server read the prompt as {read} tokens, here it has {len(ids)}; is --target what the "
                "server runs, and its tokenizer the same?"
            )
        return choice

    def _send(self, ids: Sequence[int], count: int) -> Any:
        client = self.server.client
        shared: dict[str, Any] = {
            "model": self.server.model,
            "max_tokens": count,
            "temperature": 0.0,
            "extra_body": {**self.shape.wants, **EXTRAS.get(self.server.kind or "", {})},
        }
        if self.shape.api == "chat":
            messages: Any = [{"role": "user", "content": _question(self.tokenizer, ids)}]
            return client.chat.completions.create(messages=messages, **shared)
        prompt = list(ids) if self.shape.ids else _text(self.tokenizer, ids)
        return client.completions.create(prompt=prompt, **shared)


CHAT = [{"role": "user", "content": "a b"}]
MARK = "(here-is-the-question)"


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text that a server tokenizes to these ids; a first token that it adds itself is left out."""
    whole = [tokenizer.decode(list(ids)[start:], skip_special_tokens=False) for start in (0, 1)]
    return next((text for text in whole if list(tokenizer.encode(text)) == list(ids)), whole[0])


def _question(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the user's message of a prompt in the chat template, for servers that only take messages."""
    before, _, after = tokenizer.decode(
        chat_prompt(tokenizer, [{"role": "user", "content": MARK}]), skip_special_tokens=False
    ).partition(MARK)
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    if not (text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)):
        raise errors.InputError("api=chat takes prompts in the target's chat template; leave out --raw, or api=chat")
    return text[len(before) : len(text) - len(after)]
