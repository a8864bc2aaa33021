"""What people and programs see of a benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_fn.cli import report as reports
from dflash_fn.cli import terminal
from dflash_fn.cli.bench_options import BenchOptions
from dflash_fn.cli.bench_subjects import Opened
from dflash_fn.cli.render import counted
from dflash_fn.errors import BackendMissing

if TYPE_CHECKING:
    from dflash_fn.bench.asking import Record
    from dflash_fn.bench.figures import Figures
    from dflash_fn.bench.questions import Question
    from dflash_fn.bench.tables import Grid

__all__ = ["report", "setting_line"]

NARROW, WIDE = 100, 130
"""On a terminal of fewer columns a way gets lines of its own; elsewhere tables may be so wide."""


def report(
    wanted: BenchOptions,
    opened: Opened,
    questions: Sequence[Question],
    records: Sequence[Record],
    told: Mapping[str, float | None],
) -> int:
    """Print the tables, or one object, and write table and pictures into `--out`; return how many replies failed."""
    from dflash_fn.bench.figures import figures_of
    from dflash_fn.bench.tables import as_markdown, as_object, failures

    ways = [subject.name for subject in opened.subjects]
    figures = figures_of(records, ways, blocks=opened.blocks, told=told)
    line = setting_line(wanted, opened, questions, records)
    table = as_markdown(line, figures, records)
    if wanted.json:
        setting = opened.setting | {"max_new_tokens": wanted.max_new_tokens, "thinking": wanted.thinking,
                                    "ignore_eos": wanted.ignore_eos, "source": wanted.source,
                                    "questions": [question.name for question in questions]}  # fmt: skip
        reports.print_object(as_object(setting, figures, records))
    elif wanted.markdown:
        terminal.console(stderr=False).print(table, soft_wrap=True)
    else:
        _show(terminal.console(stderr=False), line, figures, records)
    if wanted.out is not None:
        _keep(Path(wanted.out), line, table, figures)
    return len(failures(records))


def setting_line(wanted: BenchOptions, opened: Opened, questions: Sequence[Question], records: Sequence[Record]) -> str:
    """Return what was run in one line, and how much of it where that is not all."""
    setting = opened.setting
    sets = Counter(question.name.rpartition("/")[0] or question.name for question in questions)
    named = ", ".join(name if count == 1 else f"{name} {count}" for name, count in sets.items())
    words = [setting[name] for name in ("pair", "backend", "dtype", "device") if setting[name]]
    words += ["compiled"] if setting.get("compile") else []
    words += [f"{counted(len(questions), 'question')} ({named})", f"{wanted.max_new_tokens} tokens at most, greedy"]
    words.append("raw" if setting["raw"] else "chat template")
    if wanted.names:
        words.append(f"{wanted.source} rows")
    if wanted.thinking is not None:
        words.append("thinking" if wanted.thinking else "no thinking")
    if wanted.ignore_eos:
        words.append("past stop tokens")
    total = len(opened.subjects) * sum(len(question.turns) for question in questions)
    if len(records) < total:
        words.append(f"{len(records)} of {total} replies")
    return ", ".join(words)


def _keep(folder: Path, line: str, table: str, figures: Sequence[Figures]) -> None:
    from dflash_fn.bench.plots import draw

    (folder / "table.md").write_text(table + "\n", encoding="utf-8")
    try:
        draw(figures, line, folder)
    except BackendMissing as missing:  # the numbers are there either way
        typer.echo(f"no pictures: {missing}", err=True)


def _show(console: Console, line: str, figures: Sequence[Figures], records: Sequence[Record]) -> None:
    from dflash_fn.bench.tables import failures, grids, notes

    console.print(Text(line, style="bold"))
    for grid in grids(figures):
        console.print()
        if grid.title:
            console.print(Text(grid.title))
        _show_grid(console, grid)
    console.print()
    for note in notes(figures):
        console.print(Text(note, style="dim"))
    lost = failures(records)
    if lost:
        console.print(Text(f"{len(lost)} of {len(records)} replies failed:", style="bold red"))
    for one in lost:
        console.print(Text(one, style="red"))


def _show_grid(console: Console, grid: Grid) -> None:
    if console.is_terminal and console.width < NARROW:
        for row in grid.rows:
            console.print(Text(row[0], style="bold"))
            for name, cell in zip(grid.head[1:], row[1:], strict=True):
                console.print(Text(f"  {name:<24}{cell}"))
        return
    made: Any = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    made.add_column(grid.head[0], no_wrap=True)
    for name in grid.head[1:]:
        made.add_column(name, justify="right")
    for row in grid.rows:
        made.add_row(*row)
    if not console.is_terminal:
        console.width = WIDE
    console.print(made)
