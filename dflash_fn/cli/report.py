"""JSON objects for stdout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from dflash_fn.cli.answer import Answer
from dflash_fn.cli.check import Check, NotChecked

if TYPE_CHECKING:
    from dflash_fn.policies import Policy
    from dflash_fn.records import Pair

__all__ = ["answer_object", "check_object", "print_object"]


def print_object(value: dict[str, Any]) -> None:
    """Print one JSON object on one line, in ASCII, so that no terminal or pipe can spoil it."""
    typer.echo(json.dumps(value, allow_nan=False))


def answer_object(
    pair: Pair, answer: Answer, policy: Policy, *, block_size: int, check: Check | NotChecked | None = None
) -> dict[str, Any]:
    """Return what `generate --json` prints.

    `ttft_s` runs from the start of prefill to the first token; `tpot_s` is the mean time of a later token and
    `tokens_per_s` its inverse. Times and tau are null where there are too few tokens. `finish_reason` is `stop` or
    `length`, and `interrupted` after Ctrl-C.
    """
    summary = answer.summary
    value: dict[str, Any] = {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "prompt_tokens": answer.prompt_tokens,
        "finish_reason": answer.finish_reason,
        "steps": summary.steps,
        "num_accepted": list(summary.num_accepted),
        "block_sizes": [info.block_size for info in answer.infos if info.step > 0],
        "tau": summary.tau,
        "ttft_s": answer.ttft_s,
        "tpot_s": answer.tpot_s,
        "tokens_per_s": answer.tokens_per_s,
        "pair": pair.name,
        "port": pair.port.name,
        "dtype": pair.target.dtype,
        "device": pair.target.device,
        "block_size": block_size,
        "width": answer.state.width,
        "seed": answer.state.seed[0],
        "policy": policy.name,
    }
    if check:
        value["check"] = check_object(check)
    return value


def check_object(check: Check | NotChecked) -> dict[str, Any]:
    """Return what `--check` found; all is null but the reason where nothing was compared."""
    names = ("tokens_identical", "logits_identical", "baseline_tokens_per_s", "speedup")
    made: dict[str, Any] = {name: getattr(check, name, None) for name in names}
    return made | {"not_done": check.reason if isinstance(check, NotChecked) else None}
