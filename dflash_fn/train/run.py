"""A run: options, a folder, a port; what its stages have written down, and how it begins and resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_fn import errors, prompts
from dflash_fn.port import Port
from dflash_fn.sources import resolve
from dflash_fn.train import files
from dflash_fn.train.budget import Budget
from dflash_fn.train.checks import check_run
from dflash_fn.train.options import TrainOptions, from_dict, to_dict
from dflash_fn.train.overlap import Excluded, exclude
from dflash_fn.train.trainer import Trainer, Trains

__all__ = ["OPTIONS", "Paused", "Run", "Watch", "open_run", "source_folder"]

OPTIONS = "options.json"
"""Where a run keeps its options."""

DONE = "done.json"

Watch = Callable[[str, int, int, dict[str, Any]], None]
"""Is told (stage, done, of how many, figures)."""


class Paused(Exception):
    """The budget was spent, or Ctrl-C asked to stop; everything is saved."""


def _unwatched(stage: str, done: int, total: int, figures: dict[str, Any]) -> None:
    del stage, done, total, figures


@dataclass(frozen=True, slots=True)
class Run:
    """A run: options, a folder, and the port that computes.

    Attributes:
        options: all of them.
        folder: where everything lies.
        port: that runs the models, and trains them.
        trainer: the port's side of training.
        threads: that it uses.
        budget: when to pause.
        watch: is told how it goes.
    """

    options: TrainOptions
    folder: Path
    port: Port
    trainer: Trainer
    threads: int
    budget: Budget = field(default_factory=Budget)
    watch: Watch = _unwatched

    def fact(self, stage: str) -> dict[str, Any] | None:
        """Return what a stage wrote down; None where it is not done."""
        path = self.folder / stage / DONE
        found = files.read_json(path) if path.is_file() else None
        if found is not None and not isinstance(found, dict):
            raise errors.InputError(f"{path}: got JSON of type {type(found).__name__}, expected an object; delete it")
        return found

    def need(self, stage: str) -> dict[str, Any]:
        """Return what a stage wrote down.

        Raises:
            InputError: it is not done.
        """
        found = self.fact(stage)
        if found is None:
            raise errors.InputError(f"{self.folder}: the stage `{stage}` is not done yet; run it first")
        return found

    def done(self, stage: str, made_with: str) -> bool:
        """Whether a stage is done, from the same inputs, and what it made is still there in its full length."""
        found = self.fact(stage)
        if found is None or found.get("made_with") != made_with:
            return False
        return all(_size(self.folder / name) == size for name, size in found.get("made", {}).items())

    def finish(self, stage: str, made_with: str, facts: dict[str, Any], made: Iterable[Path] = ()) -> None:
        """Write down that a stage is done, and which files it made."""
        sizes = {str(path.relative_to(self.folder)): _size(path) for path in made}
        files.write_json(self.folder / stage / DONE, {"made_with": made_with, **facts, "made": sizes})

    def pause(self) -> None:
        """Leave if it is time to; whoever calls has saved everything."""
        if self.budget.spent:
            raise Paused

    @property
    def target(self) -> Path:
        """The target's folder."""
        if self.options.target is not None:
            self.need("target")
            return self.folder / "target" / "model"
        return source_folder(self.options.source or "")

    @property
    def kernels(self) -> str:
        """What the names of results that hang on the kernels end with."""
        return "-compiled" if self.options.compile else ""

    @property
    def read(self) -> str:
        """A digest of the files that the options name: what the data depends on besides the options."""
        made = hashlib.blake2b(str(self.options.shared_words).encode(), digest_size=8)
        for name in (*self.options.exclude, *self.options.text.files):
            made.update(hashlib.blake2b(prompts.find(name).read_bytes()).digest())
        return made.hexdigest()

    def excluded(self) -> Excluded:
        """Return what may not be in the data."""
        known = [turn for file in self.options.exclude for turns in prompts.read(file) for turn in turns]
        return exclude(known, self.options.shared_words)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def source_folder(source: str) -> Path:
    """Return the folder of a target that is named by folder, hub id or zoo name."""
    folder = resolve(source, role="target").folder
    assert folder is not None
    return folder


def open_run(
    options: TrainOptions | None,
    folder: Path,
    port: Port,
    *,
    resume: bool = False,
    budget: Budget | None = None,
    watch: Watch | None = None,
) -> Run:
    """Begin a run in a folder, or go on with the one there.

    Args:
        options: of a new run; None takes those of the folder.
        folder: for everything that the run makes.
        port: to train on.
        resume: whether the folder may hold a run already.
        budget: when to pause.
        watch: is told how it goes.

    Raises:
        InputError: the folder holds a run and `resume` is False, or holds none and there are no options; or its options
            are others; or they do not fit the target or the files that they name.
        PortError: the port cannot train.
        CacheFolderError: the folder cannot be written.
    """
    if not isinstance(port, Trains):
        raise errors.PortError(f"port {port.name} cannot train; use --port torch")
    known = _known_options(folder)
    if known is not None and not resume:
        raise errors.InputError(f"{folder}: holds a run already; go on with it by --resume, or give another folder")
    if options is None and known is None:
        raise errors.InputError(f"{folder}: holds no run to resume; give --recipe or --target")
    if options is not None and known is not None:
        _check_same(options, known, folder)
    chosen = options or known
    assert chosen is not None
    check_run(chosen, port)
    trainer: Trainer = port.trainer()
    threads = trainer.set_threads(chosen.threads)
    if known is None:
        files.write_json(folder / OPTIONS, to_dict(chosen))
    return Run(chosen, folder, port, trainer, threads, budget or Budget(), watch or _unwatched)


def _known_options(folder: Path) -> TrainOptions | None:
    path = folder / OPTIONS
    return from_dict(TrainOptions, files.read_json(path), name=str(path)) if path.is_file() else None


def _check_same(options: TrainOptions, known: TrainOptions, folder: Path) -> None:
    old, new = to_dict(known), to_dict(options)
    other = [key for key in new if new[key] != old[key]]
    if other:
        raise errors.InputError(
            f"{folder}: its run has other options ({', '.join(other)}); leave them out, or give another folder"
        )
