"""`dflash-fn compare`: two ways of decoding the same prompts, and every first divergence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from dflash_fn.cli import exits, report, terminal
from dflash_fn.cli.options import PairOptions, check_load
from dflash_fn.cli.render import counted
from dflash_fn.errors import InputError

if TYPE_CHECKING:
    from dflash_fn.bench.compare import Compared, Comparison
    from dflash_fn.bench.noise import Noise
    from dflash_fn.bench.ways import Way
    from dflash_fn.divergence import Divergence, Top2

__all__ = ["compare"]


def compare(
    ways: tuple[str, str],
    *,
    load: PairOptions,
    prompts: Sequence[str],
    data: Sequence[str],
    raw: bool,
    max_new_tokens: int,
    as_json: bool,
) -> None:
    """Compare and report.

    Raises:
        typer.Exit: with the code of a difference, where rounding does not explain one.
        DflashError: of any kind.
    """
    from dflash_fn.bench.compare import compare as compare_ways
    from dflash_fn.bench.ways import open_way, parse

    check_load(load)
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens: got {max_new_tokens}, expected 1 or more")
    for text in ways:
        parse(text)
    places = _places(load)
    with terminal.status("loading both ways"):
        first, second = (open_way(text, *places) for text in ways)
    rows = _prompts(first, prompts, data, raw)
    with terminal.progress("comparing", len(rows)) as advance:
        found = compare_ways(first, second, rows, max_new_tokens, advance)
    if as_json:
        report.print_object(_object(first, second, found))
    else:
        _show(first, second, found)
    if not all(one.explained for one in found.prompts):
        raise typer.Exit(exits.DIFFERENT)


def _places(load: PairOptions) -> tuple[Any, Any]:
    """Return the target's place and the draft's, that of a zoo pair where none is given."""
    from dflash_fn import zoo

    if load.word:
        raise InputError(f"--draft {load.word}: write it in a way, as in ours,draft={load.word}")
    if load.zoo_name is None:
        return load.target, load.draft
    files = zoo.fetch(load.zoo_name)
    return files.target, load.draft or files.draft


def _prompts(way: Way, prompts: Sequence[str], data: Sequence[str], raw: bool) -> list[tuple[str, list[int]]]:
    from dflash_fn.prompts import read_rows
    from dflash_fn.text import encoded

    named = [(f"prompt {index}", text) for index, text in enumerate(prompts, start=1)] + read_rows(data)
    if not named:
        raise InputError("no prompts; give some, or --data FILE")
    if way.tokenizer is None:
        raise InputError("the target has no tokenizer, which text needs")
    return [(name, encoded(way.tokenizer, text, raw=raw)) for name, text in named]


def _show(first: Way, second: Way, found: Comparison) -> None:
    console = terminal.console(stderr=False)
    for letter, way in (("A", first), ("B", second)):
        console.print(Text(f"{letter}  ", style="bold").append(way.name, style="not bold"))
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    made.add_column("prompt", overflow="fold")
    made.add_column("tokens alike", justify="right", no_wrap=True)
    made.add_column("then", no_wrap=True)
    for one in found.prompts:
        made.add_row(one.name, str(one.tokens), _word(one), style=None if one.explained else "bold red")
    console.print(made)
    for one in found.prompts:
        if one.divergence is not None:
            console.print(_details(one, one.divergence, first.tokenizer))
    console.print(_noise(found.noise))
    console.print(_verdict(found.prompts))


def _word(one: Compared) -> str:
    if one.divergence is None:
        alike = [word for word, known in (("bits", one.bits_identical), ("steps", one.same_steps)) if known]
        if not one.explained:
            return "the end, NOT the same bits"
        return f"the end, same {' and '.join(alike)}" if alike else "the end"
    if one.divergence.unknown is not None:
        return "unknown"
    return "a near tie" if one.divergence.near_tie else "NOT explained by rounding"


def _details(one: Compared, gone: Divergence, tokenizer: Any) -> Text:
    sides = [
        f"{letter} chose {_choice(top, tokenizer)}" + ("" if slot is None else f" in slot {slot}")
        for letter, top, slot in zip("AB", (gone.ours, gone.theirs), one.slots, strict=True)
    ]
    known = gone.apart is not None and gone.bound is not None
    reach = f"logits {gone.apart:.2g} apart, rounding reaches {gone.bound:.2g}" if known else gone.verdict
    text = f"{one.name}, position {gone.position}: {sides[0]}, {sides[1]}; {reach}"
    text += f"; {gone.reason}" if gone.reason else ""
    return Text(text, style="yellow" if gone.near_tie else "red")


def _choice(top: Top2, tokenizer: Any) -> str:
    best = _token(top.best, tokenizer)
    if top.second is None or top.gap is None:
        return best
    return f"{best} before {_token(top.second, tokenizer)} by {top.gap:.3g}"


def _token(token: int, tokenizer: Any) -> str:
    """Return a token's text and id; the text of part of a character is the sign for what cannot be read."""
    return f"{tokenizer.decode([token])!r} ({token})"


def _noise(noise: Noise) -> Text:
    from dflash_fn.bench.noise import percent

    if noise.promised:
        return Text("noise: none, the contract promises the same bits", style="dim")
    if noise.measured is None:
        known = f"only {noise.positions} positions where A and B agree, so not measured but derived"
        return Text(f"noise: {known}; rounding reaches {percent(noise.reach)} of the peak", style="dim")
    where = f"at {noise.positions} positions where A and B agree"
    known = f"logits typically {percent(noise.measured)} of the peak apart {where}"
    if noise.plausible:
        return Text(f"noise: {known}; rounding reaches {percent(noise.reach)}", style="dim")
    more = f"rounding typically does {percent(noise.typical)} at most: other weights, another dtype, or a mistake"
    return Text(f"noise: {known}; {more}", style="red")


def _verdict(found: Sequence[Compared]) -> Text:
    gone = [one.divergence for one in found if one.divergence is not None]
    ties = sum(one.near_tie for one in gone)
    unknown = sum(one.unknown is not None for one in gone)
    bad = len(gone) - ties - unknown
    same = len(found) - len(gone)
    other = sum(one.divergence is None and not one.explained for one in found)
    text = f"{counted(len(found), 'prompt')}: {same} alike, {ties} part at a near tie, {bad} not explained by rounding"
    if other:
        text += f"; of those alike, {other} not in the bits that the contract promises"
    if unknown:
        text += f", {unknown} unknown, for a server that tells no log probabilities"
    return Text(text, style="bold red" if bad or unknown or other else "green")


def _object(first: Way, second: Way, found: Comparison) -> dict[str, Any]:
    noise = found.noise
    return {
        "ways": [first.name, second.name],
        "noise": {
            "promised_same_bits": noise.promised,
            "measured": noise.measured,
            "positions": noise.positions,
            "typical": noise.typical,
            "reach": noise.reach,
            "plausible": noise.plausible,
        },
        "prompts": [_entry(one, first.tokenizer) for one in found.prompts],
    }


def _entry(one: Compared, tokenizer: Any) -> dict[str, Any]:
    gone = one.divergence
    return {
        "prompt": one.name,
        "tokens_alike": one.tokens,
        "bits_identical": one.bits_identical,
        "same_steps": one.same_steps,
        "divergence": gone
        and {
            "position": gone.position,
            "tokens": [gone.ours.best, gone.theirs.best],
            "texts": [tokenizer.decode([top.best]) for top in (gone.ours, gone.theirs)],
            "gaps": [gone.ours.gap, gone.theirs.gap],
            "slots": list(one.slots),
            "apart": gone.apart,
            "bound": gone.bound,
            "near_tie": None if gone.unknown is not None else gone.near_tie,
            "verdict": gone.verdict,
            "reason": gone.reason,
        },
    }
