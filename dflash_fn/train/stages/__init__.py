"""The stages of a run, each of which can run alone, is skipped where its result is there, and resumes where it was cut.

    corpus -> target -> data -> features -> fit -> eval

`corpus` and `target` are for recipes that train the target too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_fn import errors
from dflash_fn.train.options import TrainOptions
from dflash_fn.train.run import Run
from dflash_fn.train.stages.corpus import corpus_stage
from dflash_fn.train.stages.data import data_stage
from dflash_fn.train.stages.features import features_stage
from dflash_fn.train.stages.fits import fit_stage, target_stage
from dflash_fn.train.stages.measure import eval_stage

__all__ = ["STAGES", "check_stages", "run_stages"]

STAGES: dict[str, Callable[[Run], None]] = {
    "corpus": corpus_stage,
    "target": target_stage,
    "data": data_stage,
    "features": features_stage,
    "fit": fit_stage,
    "eval": eval_stage,
}
"""All stages, in order."""


def run_stages(run: Run, stages: Sequence[str] | None = None) -> dict[str, Any]:
    """Run stages in their order, and return what the last one wrote down.

    Args:
        run: from `open_run`.
        stages: their names; None takes all that the options ask for.

    Raises:
        InputError: an unknown stage, or one whose input is missing.
        Paused: the budget is spent or Ctrl-C asked to stop; everything is saved.
    """
    check_stages(stages or ())
    wanted = tuple(stages) if stages else _all(run.options)
    for name in [name for name in STAGES if name in wanted]:
        run.pause()
        STAGES[name](run)
    return run.fact(wanted[-1]) or {}


def check_stages(stages: Sequence[str]) -> None:
    """Look at names of stages, which can be done before a run is opened.

    Raises:
        InputError: an unknown stage.
    """
    for name in stages:
        if name not in STAGES:
            raise errors.InputError(f"unknown stage {name!r}; the stages are: {', '.join(STAGES)}")


def _all(options: TrainOptions) -> tuple[str, ...]:
    own = () if options.target is None else ("target",)
    corpus = () if options.corpus is None else ("corpus",)
    cache = () if options.draft.cache == "none" else ("features",)
    return (*corpus, *own, "data", *cache, "fit", "eval")
