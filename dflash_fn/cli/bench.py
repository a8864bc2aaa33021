"""`dflash-fn bench`: the same questions to several ways of decoding, and what each took."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dflash_fn.cli import bench_report, exits, signals, terminal
from dflash_fn.cli.bench_options import BenchOptions, check_bench, check_head, options_of
from dflash_fn.cli.bench_subjects import Opened, open_all

if TYPE_CHECKING:
    from dflash_fn.bench.asking import Record
    from dflash_fn.bench.questions import Question
    from dflash_fn.bench.ranks import World
    from dflash_fn.bench.reply_files import ReplyFolder

__all__ = ["bench"]


@dataclass(slots=True)
class Asked:
    """What came of asking, in this process.

    Attributes:
        records: in the order in which they came.
        told: tau by servers that tell no steps.
        interrupted: whether Ctrl-C ended it.
    """

    records: list[Record] = field(default_factory=list)
    told: dict[str, float | None] = field(default_factory=dict)
    interrupted: bool = False


def bench(wanted: BenchOptions) -> None:
    """Run the command.

    Raises:
        typer.Exit: 1 where a reply failed, 130 after Ctrl-C.
        DflashError: of any kind.
    """
    from dflash_fn.bench.questions import read_questions
    from dflash_fn.bench.ranks import World, joined

    check_bench(wanted)
    questions = read_questions(
        wanted.names, wanted.data, source=wanted.source, limit=wanted.limit, shuffle=wanted.shuffle, raw=wanted.raw
    )
    check_head(wanted, questions)
    with joined(World.of(), wanted.load.device) as world:
        folder = _folder(wanted, questions, world)
        if world.rank:
            os.environ["NO_COLOR"] = "1"  # of several processes the first alone shows how far it is
        opened = open_all(wanted, world.device(wanted.load.device))
        questions = opened.prepared(questions)
        asked = _asked(wanted, opened, world.share(questions), folder)
        _finish(wanted, opened, questions, asked, folder, world)


def _folder(wanted: BenchOptions, questions: Sequence[Question], world: World) -> ReplyFolder | None:
    """Return the folder of `--out`, which the first process makes ready, or checks."""
    from dflash_fn.bench.questions import digest
    from dflash_fn.bench.reply_files import ReplyFolder

    if wanted.out is None:
        return None
    folder = ReplyFolder(Path(wanted.out), rank=world.rank, alone=world.alone)
    if world.rank == 0:
        folder.begin(options_of(wanted, digest(questions)), resume=wanted.resume)
    world.wait()
    folder.read()
    return folder


def _asked(wanted: BenchOptions, opened: Opened, questions: Sequence[Question], folder: ReplyFolder | None) -> Asked:
    """Ask, writing each reply down as it comes; Ctrl-C ends it and keeps what there is."""
    from dflash_fn.bench.asking import ask_all, warm_up

    asked, known = Asked(), folder.known if folder else {}
    total = len(opened.subjects) * sum(len(question.turns) for question in questions)
    try:
        if any(_is_open(opened, question, known) for question in questions):
            with terminal.status("warming up"):
                warm_up(opened.subjects, questions, wanted.max_new_tokens)
        watches = {subject.name: subject.watch() for subject in opened.subjects if subject.watch is not None}
        with terminal.progress("asking", total) as advance:
            for record in ask_all(
                opened.subjects, questions, max_new_tokens=wanted.max_new_tokens, known=known, peak=opened.peak
            ):
                if folder:
                    folder.add(record)
                asked.records.append(record)
                advance()
        asked.told = {name: watch() for name, watch in watches.items()}
    except KeyboardInterrupt:
        asked.interrupted = True
    if folder:
        folder.close()
    return asked


def _is_open(opened: Opened, question: Question, known: Any) -> bool:
    """Whether something of a question is still to be asked."""
    keys = [(question.name, turn, subject.name) for turn in range(len(question.turns)) for subject in opened.subjects]
    return not all(key in known and known[key].reply.error is None for key in keys)


def _finish(
    wanted: BenchOptions,
    opened: Opened,
    questions: Sequence[Question],
    asked: Asked,
    folder: ReplyFolder | None,
    world: World,
) -> None:
    """Put together what all processes have, and report it once."""
    if asked.interrupted and not world.alone:
        signals.ignore()  # torchrun sends another one to each, though the terminal has
        _say_interrupted(folder, asked)
        raise typer.Exit(exits.INTERRUPTED)
    everybody = world.gather((asked.records, asked.told))
    failed = 0
    if world.rank == 0:
        records = _in_order([record for part, _ in everybody for record in part], opened, questions)
        told = {name: tau for _, part in everybody for name, tau in part.items()}
        if folder and not asked.interrupted:
            folder.finish(records)
        failed = bench_report.report(wanted, opened, questions, records, told)
    world.wait()
    if folder and not asked.interrupted:
        folder.remove_own()
    if asked.interrupted:
        _say_interrupted(folder, asked)
        raise typer.Exit(exits.INTERRUPTED)
    if failed:
        raise typer.Exit(exits.DIFFERENT)


def _in_order(records: Sequence[Record], opened: Opened, questions: Sequence[Question]) -> list[Record]:
    place = {question.name: index for index, question in enumerate(questions)}
    ways = {subject.name: index for index, subject in enumerate(opened.subjects)}
    key: Callable[[Record], Any] = lambda record: (place[record.question], record.turn, ways[record.way])  # noqa: E731
    return sorted(records, key=key)


def _say_interrupted(folder: ReplyFolder | None, asked: Asked) -> None:
    kept = (
        f"; {len(asked.records)} replies are in {folder.folder}, --resume goes on from them"
        if folder and asked.records
        else ""
    )
    typer.echo(f"interrupted{kept}", err=True)
