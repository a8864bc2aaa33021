"""`dflash-fn generate`: one prompt, one answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from dflash_fn.cli import exits, render, report, saved, terminal
from dflash_fn.cli.answer import Answer, Write, decode_answer, opened, silent
from dflash_fn.cli.block_size import pace_of
from dflash_fn.cli.check import INTERRUPTED, Check, NotChecked, check_against_plain, nothing_to_check, warm_up
from dflash_fn.cli.options import AUTO, Options, check_options, read_prompt
from dflash_fn.cli.pairs import asks_for_draft, block_and_width, open_pair, proposer_of
from dflash_fn.cli.policy import policy_of
from dflash_fn.text import chat_prompt

if TYPE_CHECKING:
    from dflash_fn.policies import Policy
    from dflash_fn.records import DecodeState, Pace, Pair

__all__ = ["generate"]


@dataclass(frozen=True, slots=True)
class Begun:
    """Where an answer begins.

    Attributes:
        state: to decode from.
        seconds: that it took.
        shown: text before the answer, which the answer goes on from; "" where it starts anew.
        continues: whether the answer's first token belongs to the text before it.
        block_size: B.
    """

    state: DecodeState
    seconds: float
    shown: str
    continues: bool
    block_size: int


def generate(options: Options) -> None:
    """Run the command.

    Raises:
        typer.Exit: with the code of a difference or of Ctrl-C.
        DflashError: of any kind.
    """
    check_options(options)
    policy = policy_of(options.policy, check=options.check, paced=options.block_size == AUTO)
    load = saved.pair_of(options)
    text = read_prompt(options.prompt) if options.prompt is not None else None
    pair = open_pair(load, needs_draft=asks_for_draft(options), proposers=True)
    raw = options.raw or pair.tokenizer.chat_template is None
    with terminal.note("reading the prompt"):
        begun = _begun(options, pair, text or "", raw) if options.resume is None else _resumed(options, pair, text, raw)
        if options.check:
            warm_up(begun.state, pair, block_size=begun.block_size, policy=policy, proposer=proposer_of(options.load))
        pace = pace_of(options, begun.state, pair, begun.block_size)
    answer = _answered(options, pair, policy, begun, pace)
    check = _checked(options, pair, policy, begun, answer) if options.check else None
    if options.json:
        report.print_object(report.answer_object(pair, answer, policy, block_size=begun.block_size, check=check))
    elif check:
        terminal.console().print(render.check_lines(check, len(answer.tokens)))
    saved.save(options, answer.state, pair)
    if answer.interrupted or check == NotChecked(INTERRUPTED):
        raise typer.Exit(exits.INTERRUPTED)
    if isinstance(check, Check) and not check.identical:
        raise typer.Exit(exits.DIFFERENT)


def _begun(options: Options, pair: Pair, text: str, raw: bool) -> Begun:
    block_size, width = block_and_width(options, pair)
    prompt = text if raw else chat_prompt(pair.tokenizer, [{"role": "user", "content": text}])
    state, seconds = opened(pair, prompt, seed=options.first_seed, width=width)
    return Begun(state, seconds, text if raw else "", raw, block_size)


def _resumed(options: Options, pair: Pair, text: str | None, raw: bool) -> Begun:
    state, seconds = saved.resumed(options, pair)
    state, seconds = saved.gone_on(state, pair, text, raw=raw, seconds=seconds)
    shown = saved.text_of(state, pair) if raw else ""
    return Begun(state, seconds, shown, raw or text is None, saved.block_size(options, pair, state))


def _answered(options: Options, pair: Pair, policy: Policy, begun: Begun, pace: int | Pace) -> Answer:
    if options.json:
        return _decoded(options, pair, policy, begun, pace, silent)
    with terminal.whole_lines() as write:
        write(begun.shown, dim=True)
        answer = _decoded(options, pair, policy, begun, pace, write)
    drafts = pair.draft is not None or options.load.word is not None
    render.show_answer(terminal.console(), answer, drafts=drafts, paced=options.block_size == AUTO)
    return answer


def _decoded(options: Options, pair: Pair, policy: Policy, begun: Begun, pace: int | Pace, write: Write) -> Answer:
    return decode_answer(
        begun.state,
        pair,
        max_new_tokens=options.max_new_tokens,
        block_size=pace,
        seconds=begun.seconds,
        write=write,
        continues=begun.continues,
        digests=options.check,
        policy=policy,
        proposer=proposer_of(options.load),
    )


def _checked(options: Options, pair: Pair, policy: Policy, begun: Begun, answer: Answer) -> Check | NotChecked:
    if nothing := nothing_to_check(answer, block_size=begun.block_size):
        return nothing
    prompt = list(begun.state.tokens[0])
    try:
        with terminal.note("decoding without the draft"):
            return check_against_plain(pair, prompt, answer, max_new_tokens=options.max_new_tokens, policy=policy)
    except KeyboardInterrupt:
        return NotChecked(INTERRUPTED)
