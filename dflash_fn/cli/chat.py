"""`dflash-fn generate --chat`: a conversation, one state that every turn extends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from dflash_fn.cli import render, saved, terminal
from dflash_fn.cli.answer import Answer, decode_answer, extended, opened
from dflash_fn.cli.options import Options, check_options, read_prompt
from dflash_fn.cli.pairs import block_and_width, open_pair
from dflash_fn.cli.policy import policy_of
from dflash_fn.errors import InputError
from dflash_fn.text import Message, chat_prompt, next_turn

if TYPE_CHECKING:
    from dflash_fn.records import DecodeState, Pair

__all__ = ["chat"]

PROMPT = "> "
QUIT = {"/quit", "/exit"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What has been said.

    Attributes:
        state: after the last answer; None before the first.
        messages: both sides, as chat templates read them.
    """

    state: DecodeState | None = None
    messages: tuple[Message, ...] = ()


def chat(options: Options) -> None:
    """Answer one line after another until /quit, the end of stdin, or Ctrl-C at the prompt.

    Ctrl-C during an answer keeps what was written. With a chat template each line is a user's message; without one
    it is a new line of the text, which the model goes on from.

    Raises:
        DflashError: of any kind; such as a conversation that no longer fits the context.
    """
    check_options(options)
    policy = policy_of(options.policy)
    load = saved.pair_of(options)
    first = read_prompt(options.prompt) if options.prompt is not None else None
    pair = open_pair(load)
    raw = options.raw or pair.tokenizer.chat_template is None
    block_size, width = block_and_width(options, pair)
    so_far = Conversation()
    if options.resume is not None:
        state, _ = saved.resumed(options, pair)
        so_far, block_size = Conversation(state, saved.past(state, pair)), saved.block_size(options, pair, state)
    for line in turns(first):
        state, seconds = _opened(pair, so_far, line, raw=raw, seed=options.first_seed, width=width)
        answer = decode_answer(
            state,
            pair,
            max_new_tokens=options.max_new_tokens,
            block_size=block_size,
            seconds=seconds,
            write=terminal.write,
            continues=raw,
            policy=policy,
        )
        so_far = Conversation(answer.state, (*so_far.messages, user(line), said(answer)))
        _end_turn(answer)
        saved.save(options, answer.state, pair)


def turns(first: str | None) -> Iterator[str]:
    """Yield what the user says, the prompt argument first; blank lines are skipped."""
    if first is not None:
        if sys.stdin.isatty():
            terminal.write(f"{PROMPT}{first}\n", dim=True)
        yield first
    while True:
        try:
            line = read_line()
        except EOFError:
            return
        if line.strip() in QUIT:
            return
        if line.strip():
            yield line


def read_line() -> str:
    """Read a line; a person at a terminal gets a prompt sign and line editing.

    Raises:
        EOFError: there is none.
        InputError: it is no text.
    """
    try:
        if sys.stdin.isatty():
            return _ask()
        line = sys.stdin.readline()
    except UnicodeError as error:
        raise InputError(f"a line of stdin is no UTF-8 text ({error})") from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _ask() -> str:
    with suppress(ImportError):  # gives `input` line editing, where the platform has it
        import readline  # noqa: F401
    ours = PROMPT if sys.stdout.isatty() else ""  # `input` writes it to stdout, which may be a file
    if not ours:
        typer.echo(PROMPT, err=True, nl=False)
    try:
        return input(ours)
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        raise


def _opened(
    pair: Pair, so_far: Conversation, line: str, *, raw: bool, seed: int, width: int
) -> tuple[DecodeState, float]:
    """Return the state to answer from, and the seconds that it took: the first prompt, or the last state extended."""
    if so_far.state is None:
        prompt = line if raw else chat_prompt(pair.tokenizer, [user(line)])
        return opened(pair, prompt, seed=seed, width=width)
    if raw:
        begun = "" if so_far.messages[-1]["content"].endswith("\n") else "\n"
        ids = pair.tokenizer.encode(begun + line, add_special_tokens=False)
    else:
        ids = next_turn(pair.tokenizer, so_far.messages, line, so_far.state.tokens[0])
    return extended(pair, so_far.state, ids)


def user(line: str) -> Message:
    """Return the user's message."""
    return {"role": "user", "content": line}


def said(answer: Answer) -> Message:
    """Return the assistant's message, as far as it got."""
    return {"role": "assistant", "content": answer.text}


def _end_turn(answer: Answer) -> None:
    terminal.write("" if answer.text.endswith("\n") else "\n")
    terminal.console().print(render.turn_line(answer))
