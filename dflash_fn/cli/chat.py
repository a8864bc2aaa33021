"""`dflash-fn generate --chat`: a conversation, one state that every turn extends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from dflash_fn.cli import exits, render, saved, stdin, terminal
from dflash_fn.cli.answer import Answer, decode_answer, extended, opened
from dflash_fn.cli.block_size import pace_of
from dflash_fn.cli.options import AUTO, Options, check_options, read_prompt
from dflash_fn.cli.pairs import asks_for_draft, block_and_width, open_pair, proposer_of
from dflash_fn.cli.policy import policy_of
from dflash_fn.errors import InputError
from dflash_fn.text import Message, chat_prompt, next_turn

if TYPE_CHECKING:
    from dflash_fn.policies import Policy
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


@dataclass(frozen=True, slots=True)
class Setup:
    """What stays the same from turn to turn.

    Attributes:
        options: what was asked for.
        pair: who answers.
        raw: whether there is no chat template to follow.
        block_size: B.
        width: W of a new state.
        policy: what is kept of a block.
    """

    options: Options
    pair: Pair
    raw: bool
    block_size: int
    width: int
    policy: Policy


def chat(options: Options) -> None:
    """Answer one line after another until /quit, the end of stdin, or Ctrl-C at the prompt.

    Ctrl-C during an answer keeps what was written. With a chat template each line is a user's message; without one
    it is a new line of the text, which the model goes on from. A line that cannot be used, such as one that no longer
    fits the context, is left out, and the conversation goes on without it.

    Raises:
        typer.Exit: with the code of bad input, where a line was left out.
        DflashError: of any kind but those.
    """
    check_options(options)
    policy_of(options.policy, paced=options.block_size == AUTO)
    stdin.source()
    load = saved.pair_of(options)
    first = read_prompt(options.prompt) if options.prompt is not None else None
    pair = open_pair(load, needs_draft=asks_for_draft(options), proposers=True)
    setup, so_far = _begun(options, pair)
    _welcome(setup)
    left_out = 0
    for line in turns(first):
        try:
            so_far = _turn(setup, so_far, stdin.checked(line, "the line"))
        except InputError as error:
            left_out += 1
            exits.say_error(f"{error} (this line is left out; the conversation goes on)")
    if left_out:
        raise typer.Exit(exits.BAD_INPUT)


def _welcome(setup: Setup) -> None:
    console = terminal.console()
    if setup.pair.draft is None and not setup.options.load.word:
        console.print(Text(render.NO_DRAFT, style="dim"))
    if stdin.watched():
        how = "each line goes on from the text so far" if setup.raw else "each line is a message"
        console.print(Text(f"{how}; Ctrl-C cuts an answer, /quit or Ctrl-D ends", style="dim"))


def _begun(options: Options, pair: Pair) -> tuple[Setup, Conversation]:
    raw, policy = options.raw or pair.tokenizer.chat_template is None, policy_of(options.policy)
    block_size, width = block_and_width(options, pair)
    if options.resume is None:
        return Setup(options, pair, raw, block_size, width, policy), Conversation()
    state, _ = saved.resumed(options, pair)
    block_size = saved.block_size(options, pair, state)
    return Setup(options, pair, raw, block_size, state.width, policy), Conversation(state, saved.past(state, pair))


def _turn(setup: Setup, so_far: Conversation, line: str) -> Conversation:
    """Answer a line, and return the conversation after it."""
    options, pair = setup.options, setup.pair
    try:
        state, seconds = _opened(setup, so_far, line)
    except KeyboardInterrupt:
        terminal.console().print(Text("[Ctrl-C came before the first token; the line is left out]", style="dim"))
        return so_far
    with terminal.whole_lines() as write:
        answer = decode_answer(
            state,
            pair,
            max_new_tokens=options.max_new_tokens,
            block_size=pace_of(options, state, pair, setup.block_size),
            seconds=seconds,
            write=write,
            continues=setup.raw,
            policy=setup.policy,
            proposer=proposer_of(options.load),
        )
    terminal.console().print(render.turn_line(answer))
    saved.save(options, answer.state, pair)
    return Conversation(answer.state, (*so_far.messages, user(line), said(answer)))


def turns(first: str | None) -> Iterator[str]:
    """Yield what the user says, the prompt argument first; blank lines are skipped."""
    if first is not None:
        if stdin.watched():
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
        InputError: stdin is closed or cannot be read.
    """
    return _ask() if stdin.watched() else stdin.read_line()


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


def _opened(setup: Setup, so_far: Conversation, line: str) -> tuple[DecodeState, float]:
    """Return the state to answer from, and the seconds that it took: the first prompt, or the last state extended."""
    pair, raw = setup.pair, setup.raw
    if so_far.state is None:
        prompt = line if raw else chat_prompt(pair.tokenizer, [user(line)])
        return opened(pair, prompt, seed=setup.options.first_seed, width=setup.width)
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
