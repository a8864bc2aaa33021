"""`dflash-fn trace`: golden traces, recorded and held against a port."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dflash_fn.cli import exits, report, saved, terminal, trace_report
from dflash_fn.cli.options import Options, PairOptions, check_load, check_options, check_place, read_prompt
from dflash_fn.cli.pairs import asks_for_draft, block_and_width, open_pair
from dflash_fn.cli.policy import PolicyOptions, policy_of
from dflash_fn.cli.render import counted
from dflash_fn.errors import InputError
from dflash_fn.text import chat_prompt

if TYPE_CHECKING:
    from dflash_fn.policies import Policy
    from dflash_fn.records import Pair
    from dflash_fn.trace import Trace

__all__ = ["check", "record"]


def record(path: str, options: Options, *, keep: int) -> None:
    """Decode a prompt and write the trace.

    Raises:
        DflashError: of any kind.
    """
    from dflash_fn.trace import write_trace

    check_options(options)
    check_place("FILE", path)
    if keep < 0 or keep == 1:
        raise InputError(f"--keep: got {keep}, expected 2 or more, or 0 for all")
    policy = policy_of(options.policy)
    text = read_prompt(options.prompt or "")
    pair = open_pair(options.load, needs_draft=asks_for_draft(options))
    with terminal.status("recording"):
        made = _recorded(options, pair, policy, text, keep or None)
        write_trace(path, made)
    value = _summary(path, made)
    if options.json:
        report.print_object(value)
    else:
        parts = f"{counted(value['steps'], 'step')}, {counted(value['tokens'], 'token')}, {value['bytes']} bytes"
        terminal.console(stderr=False).print(f"{path}: {parts}")


def _recorded(options: Options, pair: Pair, policy: Policy, text: str, keep: int | None) -> Trace:
    from dflash_fn import prefill
    from dflash_fn.trace import record as record_trace

    block_size, width = block_and_width(options, pair)
    raw = options.raw or pair.tokenizer.chat_template is None
    prompt = text if raw else chat_prompt(pair.tokenizer, [{"role": "user", "content": text}])
    state = prefill(pair, prompt, seed=options.first_seed, width=width)
    _, made = record_trace(
        state, pair, top_k=keep, policy=policy, max_new_tokens=options.max_new_tokens, block_size=block_size
    )
    return made


def _summary(path: str, made: Trace) -> dict[str, Any]:
    return {
        "file": path,
        "bytes": Path(path).stat().st_size,
        "steps": len(made.steps),
        "tokens": made.num_tokens,
        "prompt_tokens": len(made.prompts[0]),
        "pair": made.pair,
        "port": made.port,
        "dtype": made.dtype,
        "block_size": made.block_size,
        "width": made.width,
        "seed": made.seed[0],
        "policy": made.policy,
    }


def check(path: str, load: PairOptions, policy: PolicyOptions, *, as_json: bool) -> None:
    """Replay a trace and report.

    Args:
        path: the trace.
        load: the pair's flags.
        policy: the policy's; without any, and with "" for its name, the policy is the trace's.
        as_json: whether to print JSON.

    Raises:
        typer.Exit: with the code of a difference.
        DflashError: of any kind.
    """
    from dflash_fn.trace import check_trace, read_trace

    check_load(load)
    asked = replace(policy, policy=policy.policy or "match")
    rule = None if policy == PolicyOptions("") else policy_of(asked)
    made = read_trace(path)
    pair = open_pair(saved.of_file(load, {"pair": made.pair, "dtype": made.dtype}, path), needs_text=False)
    with terminal.status("replaying"):
        found = check_trace(made, pair, policy=rule)
    if as_json:
        report.print_object({"file": path, **trace_report.as_object(found)})
    else:
        trace_report.show(terminal.console(stderr=False), found)
    if not found.fine:
        raise typer.Exit(exits.DIFFERENT)
