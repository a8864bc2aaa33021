"""Text in and out: streaming detokenisation as a pure step, and chat turns as token ids.

Two things make streaming harder than decoding each token alone. A character's bytes may be spread over tokens, so
the last few characters of what is decoded so far may still change. And decoders of the sentencepiece kind drop the
first space of whatever they are given, so the text of a suffix is not a suffix of the text. Hence a `TextStream`
keeps a short window of recent tokens, of which a part has been given out already, and gives out what the window's
text has gained.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from dflash_fn import errors

__all__ = ["Message", "TextStream", "chat_prompt", "conversation_ids", "encoded", "feed", "flush", "next_turn"]

Message: TypeAlias = dict[str, str]
"""`{"role": "user", "content": "..."}`, as chat templates read it."""

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

MAX_PARTIAL = 3
"""A character has at most 4 bytes, so at most this many replacement characters at the end may yet become one."""
CLEAN_UP_REACH = 8
"""Cleaning up spaces rewrites at most 4 characters at once, some of which may be a rewriting's result."""
KEPT = 12
"""Tokens that a window is cut down to: more than enough bytes to find the next character's start in."""
LIMIT = 32
"""Tokens at which a window is cut down."""


@dataclass(frozen=True, slots=True)
class TextStream:
    """How far the text of a growing list of tokens has been given out; `TextStream(tokenizer)` is the start.

    Attributes:
        tokenizer: a transformers tokenizer.
        window: recent tokens, enough of them to decode what comes next.
        given: characters of the window's text that have been given out.
        held: byte tokens such as `<0xE4>` since the window: a decoder judges a run of them as a whole.
        hidden: ids that decoding skips; None until the first `feed` asks the tokenizer.

    """

    tokenizer: Any
    window: tuple[int, ...] = ()
    given: int = 0
    held: tuple[int, ...] = ()
    hidden: frozenset[int] | None = None


def feed(stream: TextStream, token_ids: Sequence[int]) -> tuple[TextStream, str]:
    """Read more tokens and give out the text that they settle.

    The pieces of a stream and its `flush`, joined, are `tokenizer.decode(all ids, skip_special_tokens=True)`. A
    piece never ends within a character and is never taken back. The cost does not depend on what came before.

    Args:
        stream: where the text stands; unchanged by the call.
        token_ids: the next tokens, any number of them.

    Returns:
        the stream after them, and the text, often "".

    Example:
        >>> class Letters:
        ...     clean_up_tokenization_spaces = False
        ...     added_tokens_decoder = {}
        ...     def convert_ids_to_tokens(self, i): return chr(i)
        ...     def decode(self, ids, skip_special_tokens): return bytes(ids).decode(errors="replace")
        >>> stream, text = feed(TextStream(Letters()), [72, 105, 0xC3])
        >>> text, feed(stream, [0xA9])[1]
        ('Hi', 'é')

    """
    tokenizer = stream.tokenizer
    hidden = _hidden_ids(tokenizer) if stream.hidden is None else stream.hidden
    seen = [int(token) for token in token_ids if token not in hidden]
    whole = _before_byte_run(tokenizer, seen)
    if not whole:
        return replace(stream, held=(*stream.held, *seen), hidden=hidden), ""
    window = (*stream.window, *stream.held, *seen[:whole])
    text = _decode(tokenizer, window)
    given = max(stream.given, _settled(text, tokenizer.clean_up_tokenization_spaces))
    piece = text[stream.given : given]
    window, given = _shorten(tokenizer, window, text, given)
    return TextStream(tokenizer, window, given, tuple(seen[whole:]), hidden), piece


def flush(stream: TextStream) -> str:
    """Return what is left when no more tokens will come: half a character comes out as U+FFFD, as in `decode`."""
    return _decode(stream.tokenizer, (*stream.window, *stream.held))[stream.given :]


def _decode(tokenizer: Any, window: Sequence[int]) -> str:
    return tokenizer.decode(list(window), skip_special_tokens=True) if window else ""


def _hidden_ids(tokenizer: Any) -> frozenset[int]:
    # They are dropped here: a window of nothing but hidden tokens would not keep the next one's leading space.
    return frozenset(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)


def _before_byte_run(tokenizer: Any, tokens: Sequence[int]) -> int:
    """Count the tokens up to the last that is no byte token."""
    for count in range(len(tokens), 0, -1):
        token = tokenizer.convert_ids_to_tokens(tokens[count - 1])
        if not (isinstance(token, str) and BYTE_TOKEN.fullmatch(token)):
            return count
    return 0


def _settled(text: str, cleans_up: bool) -> int:
    """Count the characters that no later token changes."""
    end = len(text) - (CLEAN_UP_REACH if cleans_up else 0)
    partial = len(text) - len(text.rstrip(REPLACEMENT))
    return max(0, min(end, len(text) - min(partial, MAX_PARTIAL)))


def _shorten(tokenizer: Any, window: tuple[int, ...], text: str, given: int) -> tuple[tuple[int, ...], int]:
    """Drop old tokens if the rest still decodes to the same text from the last given character on."""
    if len(window) <= LIMIT or not given:
        return window, given
    short = window[-KEPT:]
    tail = _decode(tokenizer, short)
    if not tail.endswith(text[given - 1 :]):
        return window, given
    return short, len(tail) - (len(text) - given)


def encoded(tokenizer: Any, prompt: str, *, raw: bool) -> list[int]:
    """Return a prompt's token ids, in the chat template if there is one and `raw` is False."""
    return conversation_ids(tokenizer, [{"role": "user", "content": prompt}], raw=raw)


def conversation_ids(
    tokenizer: Any, messages: Sequence[Message], *, raw: bool = False, thinking: bool | None = None
) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    Args:
        tokenizer: a transformers tokenizer.
        messages: the conversation, last message by the user.
        raw: whether the messages are lines of one text that is to go on, as they are for a tokenizer without a
            template.
        thinking: see `chat_prompt`.

    Raises:
        InputError: the template refuses the messages, or thinking is asked of a template without a switch for it, or
            of a tokenizer without a template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if thinking is not None and not raw and not has_template:
        raise errors.InputError(
            "thinking: is a switch of chat templates, and the tokenizer has none; leave --thinking and --no-thinking "
            "out"
        )
    if raw or not has_template:
        return list(tokenizer.encode("\n".join(message["content"] for message in messages)))
    return chat_prompt(tokenizer, messages, thinking=thinking)


def chat_prompt(tokenizer: Any, messages: Sequence[Message], *, thinking: bool | None = None) -> list[int]:
    """Return the ids of a conversation in the tokenizer's chat template, up to where the answer begins.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        messages: the conversation, last message by the user.
        thinking: whether the answer is to begin with reasoning, for templates that have the switch `enable_thinking`;
            None leaves it to the template.

    Raises:
        InputError: there is no chat template, it refuses these messages, or it has no such switch.

    """
    if thinking is None:
        return _encode(tokenizer, _render(tokenizer, messages))
    if "enable_thinking" not in str(tokenizer.chat_template or ""):
        raise errors.InputError(
            "thinking: the chat template has no switch enable_thinking; leave --thinking and --no-thinking out"
        )
    return _encode(tokenizer, _render(tokenizer, messages, enable_thinking=thinking))


def next_turn(
    tokenizer: Any, messages_so_far: Sequence[Message], user_text: str, state_tokens: Sequence[int]
) -> list[int]:
    """Return the ids that `extend` takes for the user's next message.

    They end the assistant's message where the model did not (a budget or Ctrl-C cut it), then come the user's
    message and the opening of the next answer. State tokens and these are together the template of the whole
    conversation wherever that is possible. It is not where the template rewrites earlier answers (Qwen3 drops their
    reasoning), or where the model spelled its answer in other tokens than the tokenizer would; then the ids are
    those that the template writes after an answer.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        messages_so_far: the conversation, last message by the assistant, its text as it was given out.
        user_text: what the user says next.
        state_tokens: the row's tokens so far, prompt included.

    Raises:
        InputError: there is no chat template, it refuses these messages, or hides where an answer ends.

    """
    if not messages_so_far or messages_so_far[-1]["role"] != "assistant":
        raise errors.InputError("next turn: expected messages that end with the assistant's, to go on from")
    user = {"role": "user", "content": user_text}
    conversation = chat_prompt(tokenizer, [*messages_so_far, user])
    known = len(state_tokens)
    if known < len(conversation) and conversation[:known] == list(state_tokens):
        return conversation[known:]
    return _after_answer(tokenizer, [*messages_so_far[:-1]], user, state_tokens[-1])


def _after_answer(tokenizer: Any, before: list[Message], user: Message, last_token: int) -> list[int]:
    """Encode what the template writes after an answer, less the end token if that is where the state stands."""
    mark = "(here-the-answer-ends)"
    text = _render(tokenizer, [*before, {"role": "assistant", "content": mark}, user])
    _, found, rest = text.rpartition(mark)
    if not found:
        raise errors.InputError("next turn: the chat template does not show answers as they are; start a new prompt")
    tokens = _encode(tokenizer, rest)
    ends = _hidden_ids(tokenizer) | {tokenizer.eos_token_id}
    first_end = next((slot for slot, token in enumerate(tokens) if token in ends), None)
    if first_end is not None and tokens[first_end] == last_token:
        return tokens[first_end + 1 :]
    return tokens


def _render(tokenizer: Any, messages: Sequence[Message], **switches: bool) -> str:
    if tokenizer.chat_template is None:
        raise errors.InputError("the tokenizer has no chat template; give plain text (--raw on the command line)")
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **switches)
    except Exception as error:  # templates are programs of their own: whatever one raises is about these messages
        raise errors.InputError(f"the chat template refuses these messages: {error}") from error


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
