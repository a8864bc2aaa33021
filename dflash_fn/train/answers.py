"""Making the texts that a draft learns from: prompts, and the target's own greedy answers to them.

Everything is made in batches whose content depends on their number alone, so that a run that was cut goes on with the
next one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_fn import errors, prompts
from dflash_fn.loop import decode
from dflash_fn.opening import prefill
from dflash_fn.policies import match
from dflash_fn.records import Pair
from dflash_fn.sampling import Sampling
from dflash_fn.text import Message, chat_prompt, encoded
from dflash_fn.train.options import TextOptions
from dflash_fn.train.order import numbers, subseed

__all__ = ["Ask", "Asked", "answer", "ask_chat", "ask_given", "ask_stream", "read_given"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt.

    Attributes:
        ids: its tokens.
        answer: tokens of an answer that is given already; None where the target is to answer.
    """

    ids: tuple[int, ...]
    answer: tuple[int, ...] | None = None


Ask = Callable[[int, int], list[Asked]]
"""Returns prompts `first` to `last`, the last one not included: a function of these two numbers."""


def answer(pair: Pair, asked: Sequence[Asked], max_new_tokens: int) -> list[tuple[tuple[int, ...], int]]:
    """Let the target answer greedily, all prompts at once, and return (tokens, start of the answer) pairs.

    Prompts that fill the context, and answers without a token to learn from, are left out.
    """
    room = pair.target.spec.max_context - 1
    open_ones = [one for one in asked if one.answer is None and len(one.ids) < room]
    made = [((*one.ids, *one.answer), len(one.ids)) for one in asked if one.answer is not None]
    if open_ones:
        state = prefill(pair, [one.ids for one in open_ones], width=1)
        after = decode(state, pair, max_new_tokens=max_new_tokens, block_size=1)
        made += [(ids, len(one.ids)) for ids, one in zip(after.tokens, open_ones, strict=True)]
    return [(ids, start) for ids, start in made if start + 1 < len(ids) <= pair.target.spec.max_context]


def ask_stream(pair: Pair, stream: np.ndarray, options: TextOptions, seed: int) -> Ask:
    """Return prompts that are pieces of a stream of tokens; each begins with a line, and ends anywhere.

    Args:
        pair: whose tokenizer says where lines begin; end-of-text ids are its stop tokens.
        stream: [T] tokens.
        options: how long the pieces are.
        seed: of the run.

    Raises:
        InputError: the stream is shorter than a prompt.
    """
    low, high = options.prompt_tokens
    if len(stream) <= high:
        raise errors.InputError(f"text.prompt_tokens: got up to {high}, and there are {len(stream)} tokens in all")
    ends = [i for i in range(len(pair.tokenizer)) if pair.tokenizer.decode([i]).endswith("\n")]
    stops = np.array(pair.target.spec.eos_token_ids)
    begins = np.flatnonzero(np.isin(stream[:-high], [*ends, *stops])) + 1
    begins = begins if len(begins) else np.arange(len(stream) - high)

    def ask(first: int, last: int) -> list[Asked]:
        made = []
        for index in range(first, last):
            where, size = numbers(seed, "prompts", index, 2)
            begin = int(begins[int(where * len(begins))])
            ids = stream[begin : begin + low + int(size * (high - low + 1))]
            made.append(Asked(tuple(_within_one_text(ids, stops).tolist())))
        return made

    return ask


def _within_one_text(ids: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the longest part of a piece that no end of a text interrupts."""
    parts = [part[~np.isin(part, stops)] for part in np.split(ids, np.flatnonzero(np.isin(ids, stops)) + 1)]
    longest = max(parts, key=len)
    return longest if len(longest) else ids


def ask_chat(pair: Pair, options: TextOptions, seed: int) -> Ask:
    """Return prompts whose user turn the target wrote itself, from its own template.

    Raises:
        InputError: the tokenizer has no chat template.
    """
    if not getattr(pair.tokenizer, "chat_template", None):
        raise errors.InputError(
            "text.kind: got 'chat', and the target's tokenizer has no chat template; use 'continue'"
        )
    before = _before_user_turn(pair.tokenizer)
    policy = match(Sampling(options.temperature)) if options.temperature else match()

    def ask(first: int, last: int) -> list[Asked]:
        openers = [_opener(options, seed, index) for index in range(first, last)]
        begun = [pair.tokenizer.encode(before + opener, add_special_tokens=False) for opener in openers]
        seeds = [subseed(seed, f"turn {index}") for index in range(first, last)]
        state = prefill(pair, begun, seed=seeds, width=1)
        after = decode(state, pair, policy=policy, max_new_tokens=options.turn_tokens, block_size=1)
        new = [ids[len(prompt) :] for ids, prompt in zip(after.tokens, begun, strict=True)]
        decoded = [pair.tokenizer.decode(list(ids), skip_special_tokens=True) for ids in new]
        turns = [(opener + text).strip() for opener, text in zip(openers, decoded, strict=True)]
        return [_user(pair.tokenizer, turn) for turn in turns if turn]

    return ask


def _opener(options: TextOptions, seed: int, index: int) -> str:
    share, which = numbers(seed, "openers", index, 2)
    return options.openers[int(which * len(options.openers))] if options.openers and share < options.opened else ""


def _before_user_turn(tokenizer: Any) -> str:
    mark = "\N{SYMBOL FOR UNIT SEPARATOR}"
    return tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False).partition(mark)[0]


def _user(tokenizer: Any, text: str) -> Asked:
    return Asked(tuple(encoded(tokenizer, text, raw=False)))


def ask_given(pair: Pair, files: Sequence[str]) -> tuple[Ask, int]:
    """Return the prompts of JSONL files, and how many there are.

    Raises:
        InputError: a file or a row that `read_given` refuses, or a conversation where there is no chat template.
    """
    made = [_given(pair, record, where) for where, record in read_given(files)]
    return (lambda first, last: made[first:last]), len(made)


def read_given(files: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of JSONL files, each behind what names it in messages.

    A row has a prompt (`prompt`, `question`, `problem`, or `turns`, of which the first counts), or `messages`, a
    conversation. One that ends with the assistant's words is learned from as it is; any other is answered.

    Raises:
        InputError: a file that cannot be read, or a row with neither of the two.
    """
    rows = [row for file in files for row in prompts.records(file)]
    for where, record in rows:
        if isinstance(record, dict) and "messages" in record:
            _check_messages(record["messages"], where)
        elif isinstance(record, dict) and not any(field in record for field in prompts.FIELDS):
            raise errors.InputError(f"{where}: has none of the fields {', '.join((*prompts.FIELDS, 'messages'))}")
        else:
            prompts.turns_of(record, where)
    return rows


def _check_messages(messages: Any, where: str) -> None:
    def whole(one: Any) -> bool:
        return isinstance(one, dict) and all(isinstance(one.get(key), str) and one[key] for key in ("role", "content"))

    if not isinstance(messages, list) or not messages or not all(map(whole, messages)):
        raise errors.InputError(
            f"{where}: field 'messages': got {reprlib.repr(messages)}, expected a list of objects with a role and its "
            "content, both texts"
        )


def _given(pair: Pair, record: Mapping[str, Any], where: str) -> Asked:
    messages: list[Message] | None = record.get("messages")
    if messages is None:
        return _user(pair.tokenizer, prompts.turns_of(record, where)[0])
    if not getattr(pair.tokenizer, "chat_template", None):
        raise errors.InputError(f"{where}: holds a conversation, and the target's tokenizer has no chat template")
    if messages[-1]["role"] != "assistant":
        return Asked(tuple(chat_prompt(pair.tokenizer, messages)))
    spoken = pair.tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
    return Asked(tuple(chat_prompt(pair.tokenizer, messages[:-1])), (*spoken, *pair.target.spec.eos_token_ids[:1]))
