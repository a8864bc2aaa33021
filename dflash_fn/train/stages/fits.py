"""The stages `target` and `fit`: one loop, two tasks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn import errors, fingerprint
from dflash_fn.train import curve, files, texts
from dflash_fn.train.fitting import Fitted, fit
from dflash_fn.train.options import FitOptions, digest
from dflash_fn.train.run import OPTIONS, Paused, Run
from dflash_fn.train.stages.features import cached
from dflash_fn.train.trainer import Task

__all__ = ["fit_stage", "target_stage"]


def target_stage(run: Run) -> None:
    """Train the target."""
    options, folder = run.options.target, run.folder / "target"
    if options is None:
        raise errors.InputError("the stage `target` needs options of a target to train; this run has none")
    known = run.need("corpus")
    made_with = f"{digest(options)}-{known['digest']}-{run.options.seed}-{run.threads}-{run.options.autocast}"
    if run.done("target", made_with):
        return
    streams = [np.load(run.folder / "corpus" / f"{name}.npy", mmap_mode="r") for name in ("train", "held_out")]
    task = run.trainer.target_task(options, run.options, streams[0], streams[1])
    fitted = _fitted(run, "target", task, options.fit, folder, made_with)
    with files.fresh_folder(folder / "model") as place:
        task.export(place)
        for file in sorted((run.folder / "corpus" / "tokenizer").iterdir()):
            shutil.copy(file, place / file.name)
    run.finish("target", made_with, _fit_facts(run, fitted, folder / "model"), (folder / "model").iterdir())


def _fitted(run: Run, stage: str, task: Task, options: FitOptions, folder: Path, made_with: str) -> Fitted:
    fitted = fit(
        task, options, folder / "checkpoints", made_with=made_with, budget=run.budget,
        report=lambda step, point: run.watch(stage, step, options.steps, point),
    )  # fmt: skip
    if not fitted.done:
        raise Paused
    return fitted


def _fit_facts(run: Run, fitted: Fitted, folder: Path) -> dict[str, Any]:
    last = fitted.curve[-1]
    return {
        "steps": fitted.steps,
        "loss": last["loss"],
        "last": last,
        "digest": fingerprint.of_folder(folder),
        "threads": run.threads,
        "backend": run.port.info().backend,
        "bytes": (folder / "model.safetensors").stat().st_size,
        "parameters": (folder / "model.safetensors").stat().st_size // 2,
    }


def fit_stage(run: Run) -> None:
    """Train the draft."""
    options, folder = run.options.draft, run.folder / "fit"
    made = texts.read(run.folder / "data" / "texts.safetensors")
    source = fingerprint.of_folder(run.target)
    made_with = f"{digest(options)}-{made.digest}-{source}-{run.options.seed}-{run.threads}-{run.options.autocast}"
    if run.done("fit", made_with):
        return
    features = cached(run, made)
    task = run.trainer.draft_task(run.options, run.target, made, features)
    fitted = _fitted(run, "fit", task, options.fit, folder, made_with)
    with files.fresh_folder(run.folder / "draft") as place:
        task.export(place)
        shutil.copy(run.folder / OPTIONS, place / "training.json")
    run.finish("fit", made_with, _fit_facts(run, fitted, run.folder / "draft"), (run.folder / "draft").iterdir())
    curve.write(folder / "curve.jsonl", fitted.curve)
