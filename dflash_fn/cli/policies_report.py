"""What people and programs see of policies, listed and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dflash_fn.bench.estimates import written
from dflash_fn.cli.render import counted
from dflash_fn.metrics import TAU_DEFINITION

if TYPE_CHECKING:
    from dflash_fn.bench.estimates import Estimate
    from dflash_fn.bench.policy_runs import Result
    from dflash_fn.policies.catalogue import About

__all__ = ["Setting", "as_markdown", "as_object", "show", "show_list"]

NARROW, WIDE = 96, 120
"""On a terminal of fewer columns a policy gets lines of its own; elsewhere tables may be so wide."""

INDENT = (0, 0, 0, 2)

NOTES = (
    TAU_DEFINITION + "; gain: over the first policy, text by text",
    "divergence: total variation of a judged slot's law from p. proven: 0 by enumeration; exact: along the path",
    "surprise: mean of -log p(x) - H(p) in nats a token; beyond its interval (its variance under p) the law is not p",
)


def interval_of(results: Sequence[Result]) -> str:
    """Say what the intervals are over, or why there are none."""
    from dflash_fn.bench.estimates import LEAST

    texts = results[0].contender.texts if results else []
    prompts = len({text.prompt for text in texts})
    count, unit = (prompts, "prompt") if prompts > 1 else (len(texts), "text")
    if count < LEAST:
        more = f"{LEAST} or more" if prompts > 1 else f"{LEAST} prompts, or {LEAST} seeds of one"
        return f"95 %, of the surprise alone; {counted(count, unit)} are too few for others: give {more}"
    over = "prompts, each with all its seeds" if prompts > 1 else "seeds of one prompt, which speak for no other"
    return f"95 %; over {over}, by the jackknife and Student's t"


@dataclass(frozen=True, slots=True)
class Setting:
    """What was run."""

    pair: str
    port: str
    dtype: str
    device: str
    sampling: str
    block_size: int
    width: int
    max_new_tokens: int
    prompts: list[str]
    seeds: list[int]

    @property
    def line(self) -> str:
        """The setting in one line."""
        size = f"{counted(len(self.prompts), 'prompt')} x {counted(len(self.seeds), 'seed')}"
        return f"{self.pair}, {self.port}, {self.dtype}, {self.sampling}, blocks of {self.block_size}, {size}, \
{self.max_new_tokens} tokens each"


def show_list(console: Console, found: Sequence[About]) -> None:
    """Print a table of policies; on a narrow terminal a list."""
    yes = {True: "yes", False: "no"}
    if console.is_terminal and console.width < NARROW:
        for one in found:
            console.print(Text(one.name, style="bold"))
            flags = f"lossless {yes[one.lossless]}, same text {yes[one.invariant]}, needs q {yes[one.needs_q]}"
            for line in (flags, one.rule, one.source):
                console.print(Padding(line, INDENT))
        return
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("policy", "lossless", "same text", "needs q"):
        made.add_column(name, no_wrap=True)
    made.add_column("rule", overflow="fold")
    made.add_column("source", overflow="fold")
    for one in found:
        made.add_row(one.name, yes[one.lossless], yes[one.invariant], yes[one.needs_q], one.rule, one.source)
    _print(console, made)
    console.print(Text("lossless: the target's law; same text: token for token that of plain decoding", style="dim"))


COLUMNS: dict[str, Callable[[Result], str]] = {
    "tau": lambda one: written(one.tau, 2),
    "gain": lambda one: written(one.tau_gain, 2, sign=True),
    "divergence": lambda one: _divergence(one),
    "surprise": lambda one: (
        written(one.surprise, 2, sign=True) + (f", {one.impossible} x p = 0" if one.impossible else "")
    ),
    "ms a step": lambda one: "-" if one.seconds is None else f"{1e3 * one.seconds.value:.1f}",
}


def _divergence(one: Result) -> str:
    if one.divergence_known == "exact":
        return written(one.divergence, 3)
    return f"0, {one.divergence_known}" if one.divergence is not None else one.divergence_known


def show(console: Console, setting: Setting, results: Sequence[Result]) -> None:
    """Print both tables, and what the numbers mean."""
    console.print(Text(setting.line, style="bold"))
    console.print()
    if console.is_terminal and console.width < NARROW:
        _show_lines(console, results)
    else:
        made = _table(["policy", *COLUMNS])
        for one in results:
            made.add_row(one.contender.name, *(column(one) for column in COLUMNS.values()), style=_style(one))
        _print(console, made)
    console.print()
    console.print(Text("kept by slot after the anchor, %"))
    _show_slots(console, results)
    console.print()
    for note in (*NOTES, f"intervals: {interval_of(results)}"):
        console.print(Text(note, style="dim"))


def _print(console: Console, table: Table) -> None:
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def _style(one: Result) -> str | None:
    return None if one.contender.policy.lossless else "yellow"


def _show_lines(console: Console, results: Sequence[Result]) -> None:
    for one in results:
        console.print(Text(one.contender.name, style=_style(one) or "bold"))
        for name, column in COLUMNS.items():
            console.print(f"  {name:<12}{column(one)}")


def _table(names: Sequence[str]) -> Table:
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    made.add_column(names[0], no_wrap=True)
    for name in names[1:]:
        made.add_column(name, justify="right", no_wrap=len(names) < 9)
    return made


def _show_slots(console: Console, results: Sequence[Result]) -> None:
    """Print a row a policy; on a narrow terminal its name gets a line, and the slots fold."""
    if console.is_terminal and console.width < NARROW:
        for one in results:
            cells = [f"{slot}: {written(value, 0, scale=100)}" for slot, value in enumerate(one.by_slot, start=1)]
            whole = "   ".join(cells).replace(" \u00b1 ", "\u00a0\u00b1\u00a0").replace(": ", ":\u00a0")
            console.print(Text(one.contender.name, style=_style(one) or "bold"))
            console.print(Padding(whole, INDENT))
        return
    most = max((len(one.by_slot) for one in results), default=0)
    made = _table(["policy", *map(str, range(1, most + 1))])
    for one in results:
        made.add_row(one.contender.name, *(written(value, 0, scale=100) for value in one.by_slot), style=_style(one))
    _print(console, made)


def as_markdown(setting: Setting, results: Sequence[Result]) -> str:
    """Return both tables and the notes as Markdown."""
    from dflash_fn.bench.common import markdown

    most = max((len(one.by_slot) for one in results), default=0)
    rows = [[f"`{one.contender.name}`", *(column(one) for column in COLUMNS.values())] for one in results]
    slots = [[f"`{one.contender.name}`", *(written(value, 1, scale=100) for value in one.by_slot)] for one in results]
    notes = "\n".join(f"* {note}" for note in (*NOTES, f"intervals: {interval_of(results)}"))
    first = markdown(["policy", *COLUMNS], rows)
    second = markdown(["kept by slot, %", *map(str, range(1, most + 1))], slots)
    return f"{setting.line}\n\n{first}\n\n{second}\n\n{notes}"


def as_object(setting: Setting, results: Sequence[Result]) -> dict[str, Any]:
    """Return all of it for JSON; what is not known is null."""
    return asdict(setting) | {"interval": interval_of(results), "policies": [_entry(one) for one in results]}


def _entry(one: Result) -> dict[str, Any]:
    texts, policy = one.contender.texts, one.contender.policy
    return {
        "name": one.contender.name,
        "policy": policy.name,
        "lossless": policy.lossless,
        "tau": _number(one.tau),
        "tau_gain": _number(one.tau_gain),
        "by_slot": [_number(value) for value in one.by_slot],
        "divergence": _number(one.divergence),
        "divergence_known": one.divergence_known,
        "surprise": _number(one.surprise),
        "impossible": one.impossible,
        "seconds_a_step": _number(one.seconds),
        "steps": sum(text.steps for text in texts),
        "tokens": sum(text.tokens for text in texts),
    }


def _number(value: Estimate | None) -> dict[str, float | None] | None:
    if value is None:
        return None
    made = {"value": value.value, "half": value.half}
    return made if value.ends is None else made | dict(zip(("low", "high"), value.ends, strict=True))
