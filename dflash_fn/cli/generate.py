"""`dflash-fn generate`: one prompt, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dflash_fn.cli import exits, render, report, terminal
from dflash_fn.cli.answer import Answer, decode_answer, opened, silent
from dflash_fn.cli.check import Check, check_against_plain, warm_up
from dflash_fn.cli.options import Options, check_options, read_prompt
from dflash_fn.cli.pairs import block_and_width, open_pair
from dflash_fn.text import chat_prompt

if TYPE_CHECKING:
    from dflash_fn.records import Pair

__all__ = ["generate"]


def generate(options: Options) -> None:
    """Run the command.

    Raises:
        typer.Exit: with the code of a difference or of Ctrl-C.
        DflashError: of any kind.
    """
    check_options(options)
    text = read_prompt(options.prompt or "")
    pair = open_pair(options.load, needs_draft="--check" if options.check else "")
    block_size, width = block_and_width(options, pair)
    raw = options.raw or pair.tokenizer.chat_template is None
    prompt = text if raw else chat_prompt(pair.tokenizer, [{"role": "user", "content": text}])
    answer = _answered(options, pair, prompt, raw=raw, block_size=block_size, width=width)
    check = _checked(options, pair, prompt, answer) if options.check and not answer.interrupted else None
    if options.json:
        report.print_object(report.answer_object(pair, answer, block_size=block_size, check=check))
    elif check:
        terminal.console().print(render.check_lines(check, len(answer.tokens)))
    if answer.interrupted:
        raise typer.Exit(exits.INTERRUPTED)
    if check and not check.identical:
        raise typer.Exit(exits.DIFFERENT)


def _answered(
    options: Options, pair: Pair, prompt: str | list[int], *, raw: bool, block_size: int, width: int
) -> Answer:
    show = not options.json
    with terminal.note("reading the prompt"):
        state, seconds = opened(pair, prompt, seed=options.seed, width=width)
        if options.check:
            warm_up(state, pair, block_size=block_size)
    if show and isinstance(prompt, str):
        terminal.write(prompt, dim=True)
    answer = decode_answer(
        state,
        pair,
        max_new_tokens=options.max_new_tokens,
        block_size=block_size,
        seconds=seconds,
        write=terminal.write if show else silent,
        continues=raw,
        digests=options.check,
    )
    if show:
        terminal.write("" if answer.text.endswith("\n") else "\n")
        render.show_answer(terminal.console(), answer)
    return answer


def _checked(options: Options, pair: Pair, prompt: str | list[int], answer: Answer) -> Check:
    with terminal.note("decoding without the draft"):
        return check_against_plain(pair, prompt, answer, max_new_tokens=options.max_new_tokens)
