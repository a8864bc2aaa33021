"""`dflash-fn train`: a recipe, or a draft for a target, in stages that resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash_fn.cli import exits, report, signals, terminal
from dflash_fn.errors import BackendMissing, InputError

if TYPE_CHECKING:
    from dflash_fn.port import Port
    from dflash_fn.train.options import TrainOptions
    from dflash_fn.train.run import Watch

__all__ = ["TrainRequest", "train"]

SHOWN = ("loss", "tau", "tau_seen", "held_out", "gigabytes")
"""Figures that fit beside a bar."""


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What the flags say.

    Attributes:
        out: the run's folder.
        recipe: name of a recipe.
        target: folder, hub id or zoo name of a target to make a draft for.
        stages: to run; none for all.
        files: JSONL or text files for the stage `data`.
        exclude: JSONL files of prompts to keep out; none leaves the recipe's.
        changes: `key=value`, such as `draft.fit.steps=500`.
        resume: whether the folder may hold a run.
        time_budget: such as `90m`.
        seed: of the run.
        port: that trains.
        device: of the port.
        threads: of the port.
        json: whether one JSON object is printed at the end.
    """

    out: str
    recipe: str | None = None
    target: str | None = None
    stages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    resume: bool = False
    time_budget: str | None = None
    seed: int | None = None
    port: str = "torch"
    device: str | None = None
    threads: int | None = None
    json: bool = False


def train(request: TrainRequest) -> None:
    """Run the command.

    Raises:
        typer.Exit: with the code of Ctrl-C, where that paused the run.
        DflashError: of any kind.
    """
    from dflash_fn.train.budget import Budget, asked_by_ctrl_c, parse_duration
    from dflash_fn.train.run import Paused, open_run
    from dflash_fn.train.stages import check_stages, run_stages

    check_stages(request.stages)
    seconds = None if request.time_budget is None else parse_duration(request.time_budget)
    options = options_of(request)
    port = _port(request.port)
    budget, facts, paused = Budget(seconds), {}, False
    with _watched() as watch, asked_by_ctrl_c(budget, _asked):
        run = open_run(options, Path(request.out), port, resume=request.resume, budget=budget, watch=watch)
        try:
            facts = run_stages(run, request.stages)
        except Paused:
            paused = True
        finally:  # a loss that exploded is looked at too
            _draw_curves(run.folder, run.options.name)
    _tell(run.folder, facts, paused, as_json=request.json)
    if budget.interrupted:
        raise typer.Exit(exits.INTERRUPTED)


def _asked() -> None:
    # not through sys.stderr: the signal may have come in the middle of one of its writes
    os.write(2, b"\nstopping after this step; Ctrl-C again stops at once, and loses what came after the checkpoint\n")


def _port(name: str) -> Port:
    from dflash_fn.registry import get_port

    with terminal.status("loading the port"), signals.at_once():
        return get_port(name)


def options_of(request: TrainRequest) -> TrainOptions | None:
    """Return the options of a new run; None where the flags name none, and the folder's own are meant.

    Raises:
        InputError: flags that exclude each other, or a change that names no option.
    """
    from dflash_fn.train.options import TrainOptions, from_dict, to_dict
    from dflash_fn.train.recipes import recipe

    if request.recipe is not None and request.target is not None:
        raise InputError("--recipe and --target exclude each other")
    base = recipe(request.recipe) if request.recipe is not None else _for_target(request)
    if base is None:
        _refuse_changes(request)
        return None
    values = to_dict(base)
    if request.files:
        values["text"] |= {"kind": _kind(request.files), "files": list(request.files)}
    for change in request.changes:
        _put(values, change)
    made = from_dict(TrainOptions, values)
    given = {"seed": request.seed, "device": request.device, "threads": request.threads, "exclude": request.exclude}
    if request.exclude and made.eval.prompts == base.exclude:
        # a recipe is measured on what it keeps out
        made = replace(made, eval=replace(made.eval, prompts=request.exclude))
    return replace(made, **{name: value for name, value in given.items() if value not in (None, ())})


def _kind(files: Sequence[str]) -> Literal["given", "continue"]:
    """Return whether files hold prompts or plain text, by how their names end."""
    rows, other = ([name for name in files if name.endswith(".jsonl") is jsonl] for jsonl in (True, False))
    if rows and other:
        raise InputError(f"--data: got JSONL ({rows[0]}) and plain text ({other[0]}), expected one of the two")
    wrong = [name for name in other if name.endswith(".json")]
    if wrong:
        raise InputError(f"--data {wrong[0]}: got one JSON file, expected JSONL, named so (.jsonl), or plain text")
    return "given" if rows else "continue"


def _refuse_changes(request: TrainRequest) -> None:
    given = {
        "--set": request.changes, "--data": request.files, "--exclude": request.exclude, "--seed": request.seed,
        "--device": request.device, "--threads": request.threads,
    }  # fmt: skip
    names = [name for name, value in given.items() if value not in (None, ())]
    if names:
        raise InputError(f"{names[0]} is for a new run, which --recipe or --target names; a resumed one has its own")
    if not request.resume:
        raise InputError("nothing to train; give --recipe NAME or --target PATH, or --resume")


def _for_target(request: TrainRequest) -> TrainOptions | None:
    """Return options of a draft for any target: taps spread over its depth, text as the flags say."""
    if request.target is None:
        return None
    from dflash_fn.sources import read_config
    from dflash_fn.train.options import DraftOptions, TextOptions, TrainOptions
    from dflash_fn.train.run import source_folder

    config = read_config(source_folder(request.target))
    depth = (config.get("text_config") or config).get("num_hidden_layers", 0)
    if depth < 2:
        raise InputError(f"{request.target}: its config.json names {depth} layers, expected 2 or more")
    taps = tuple(sorted({max(0, round(depth * share) - 2) for share in (0.3, 0.5, 0.7, 0.9, 1.0)}))
    return TrainOptions(
        name=Path(request.target).name,
        source=request.target,
        text=TextOptions(kind="chat"),
        draft=DraftOptions(taps=taps, start="ridge"),
    )


def _put(values: dict[str, Any], change: str) -> None:
    path, found, text = change.partition("=")
    *parents, last = path.split(".")
    place: Any = values
    for name in parents:
        place = place.get(name) if isinstance(place, dict) else None
    if not found or not isinstance(place, dict) or last not in place:
        raise InputError(f"--set {change}: names no option; write it as in options.json, such as draft.fit.steps=500")
    try:
        place[last] = json.loads(text)
    except json.JSONDecodeError:
        place[last] = text


@contextmanager
def _watched() -> Iterator[Watch]:
    """Show a bar a stage; where nobody watches, a line a stage and one each tenth."""
    screen = terminal.console()
    if screen.color_system is None:
        yield _lines()
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
    )  # fmt: skip
    with Progress(*columns, console=screen) as bar:
        tasks: dict[str, Any] = {}

        def watch(stage: str, done: int, total: int, figures: dict[str, Any]) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"{stage:<8}", total=total, figures="")
            bar.update(tasks[stage], completed=done, total=total)
            if _figures(figures):
                bar.update(tasks[stage], figures=_figures(figures))

        yield watch


def _lines() -> Watch:
    told: dict[str, int] = {}

    def watch(stage: str, done: int, total: int, figures: dict[str, Any]) -> None:
        tenth = 10 * done // max(1, total)
        if told.get(stage) != tenth:
            told[stage] = tenth
            typer.echo(f"{stage} {done}/{total} {_figures(figures)}".rstrip(), err=True)

    return watch


def _figures(figures: dict[str, Any]) -> str:
    return "  ".join(f"{name} {figures[name]:.3g}" for name in SHOWN if name in figures)


def _draw_curves(folder: Path, name: str) -> None:
    """Draw what was logged, for those who have matplotlib; the numbers are in curve.jsonl either way."""
    from dflash_fn.train import curve

    for stage in ("target", "fit"):
        file = folder / stage / "checkpoints" / "curve.jsonl"
        try:
            points = curve.read(file) if file.is_file() else []
            if points:
                place = folder / f"{stage}-curve.png"
                curve.draw(place, points, names=("loss", "held_out", "tau"), title=f"{name}: {stage}")
        except (BackendMissing, InputError) as error:
            typer.echo(f"no picture of the curve: {error}", err=True)
            return


def _tell(folder: Path, facts: dict[str, Any], paused: bool, *, as_json: bool) -> None:
    if as_json:
        report.print_object({"folder": str(folder), "paused": paused, **facts})
        return
    console = terminal.console(stderr=False)
    if paused:
        console.print(f"paused; everything is saved. Go on with: dflash-fn train --out {folder} --resume")
        return
    for name, found in (facts.get("sets") or {}).items():
        tau, free = ("-" if found[key] is None else f"{found[key]:.2f}" for key in ("tau", "ngrams"))
        console.print(f"{name}: tau {tau} over {found['prompts']} prompts; n-grams alone {free}")
    if facts.get("sets") == {}:
        console.print("nothing was measured: no prompts were named (--exclude FILE, or --set eval.prompts)")
    made = [path for path in (folder / "draft", folder / "MODEL_CARD.md") if path.exists()]
    console.print(f"done: {', '.join(map(str, made)) or folder}")


def stage_names(names: Sequence[str]) -> tuple[str, ...]:
    """Split `--stage data,fit` and repeated flags into names; an empty one stays, to be refused."""
    return tuple(part.strip() for name in names for part in name.split(","))
