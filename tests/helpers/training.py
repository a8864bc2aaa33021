"""Tiny training runs: a target of the tests, texts that it wrote, and a draft to be trained on them.

As a program, `python -m tests.helpers.training FOLDER` trains the draft of FOLDER and prints a line a step, for tests
that kill it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash_fn import get_port, load_pair
from dflash_fn.train import answers, fitting, texts
from dflash_fn.train.options import DraftOptions, FitOptions, TrainOptions
from dflash_fn.train.texts import Texts
from tests.helpers.tiny import TargetDesign, target_tensors, write_checkpoint

__all__ = ["DESIGN", "FIT", "draft_run", "prepare", "task_of", "train"]

DESIGN = TargetDesign(family="qwen3", layers=2, hidden=32, inner=48, vocab=64, seed=3)
FIT = FitOptions(steps=60, rate=3e-3, warmup=5, checkpoint_every=7, log_every=10)


def draft_run(folder: Path, **changes: object) -> TrainOptions:
    """Return the options of a run on one thread."""
    draft = DraftOptions(
        block_size=8, layers=2, taps=(0, 1), start="random", sequences=8, anchors=6, cache="float32", fit=FIT
    )
    return TrainOptions(source=str(folder / "target"), threads=1, draft=replace(draft, **changes))


def prepare(folder: Path, *, pieces: int = 24, tokens: int = 24) -> Texts:
    """Write a target, texts that it answered, and the cache of its features; return the texts."""
    write_checkpoint(folder / "target", DESIGN.config, target_tensors(DESIGN))
    pair = load_pair(folder / "target")
    prompts = np.random.default_rng(0).integers(0, DESIGN.vocab, (pieces, 6)).tolist()
    made = texts.pack(answers.answer(pair, [answers.Asked(tuple(ids)) for ids in prompts], tokens))
    texts.write(folder / "texts.safetensors", made)
    run = draft_run(folder)
    trainer = get_port("torch").trainer()  # pyright: ignore[reportAttributeAccessIssue]
    out = np.zeros((len(made.tokens), trainer.feature_width(run, folder / "target")), dtype=np.float32)
    trainer.write_features(run, folder / "target", made, out, 0, lambda count: True)
    np.save(folder / "features.npy", out)
    return made


def task_of(folder: Path, run: TrainOptions):
    """Return the draft's task, with features from the cache."""
    trainer = get_port("torch").trainer()  # pyright: ignore[reportAttributeAccessIssue]
    trainer.set_threads(1)
    cache = np.load(folder / "features.npy", mmap_mode="r")
    return trainer.draft_task(run, folder / "target", texts.read(folder / "texts.safetensors"), cache)


def train(folder: Path, name: str, **changes: object) -> fitting.Fitted:
    """Train to the end, and export the draft."""
    run = draft_run(folder, **changes)
    task = task_of(folder, run)

    def report(step: int, point: dict) -> None:
        print(step, flush=True)

    done = fitting.fit(task, run.draft.fit, folder / name, made_with="same", report=report)
    (folder / name / "draft").mkdir(exist_ok=True)
    task.export(folder / name / "draft")
    return done


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
