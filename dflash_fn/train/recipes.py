"""Named recipes: all options of the runs that made the pairs of the zoo, and of one for a real chat model.

Step counts follow from measured speeds and a limit of three hours on two cores; docs/notes/training.md has the sums.
"""

from __future__ import annotations

from dataclasses import replace

from dflash_fn import errors
from dflash_fn.train.options import (
    CorpusOptions,
    DraftOptions,
    EvalOptions,
    FitOptions,
    TargetOptions,
    TextOptions,
    TrainOptions,
)

__all__ = ["PACKAGES", "RECIPES", "recipe"]

PACKAGES = (
    "attrs==25.3.0",
    "black==25.1.0",
    "click==8.2.1",
    "django==5.2.4",
    "fastapi==0.116.1",
    "flask==3.1.1",
    "httpx==0.28.1",
    "ipython==9.4.0",
    "jedi==0.19.2",
    "jinja2==3.1.6",
    "mpmath==1.3.0",
    "networkx==3.5",
    "nltk==3.9.1",
    "pip==25.1.1",
    "pydantic==2.11.7",
    "pytest==8.4.1",
    "requests==2.32.4",
    "rich==14.1.0",
    "setuptools==80.9.0",
    "sqlalchemy==2.0.41",
    "starlette==0.47.2",
    "sympy==1.14.0",
    "twisted==25.5.0",
    "werkzeug==3.1.3",
)
"""What the tiny targets are trained on, besides the standard library."""

PROMPTS = ("humaneval",)
CHAT_PROMPTS = (*PROMPTS, "gsm8k", "mt-bench")

TINY_CODE = TrainOptions(
    name="tiny-code",
    threads=2,
    corpus=CorpusOptions(packages=PACKAGES),
    target=TargetOptions(
        grow_from=3,
        grow_at=0.4,
        fit=FitOptions(
            steps=2400,
            rate=0.02,
            last_rate=0.0,
            warmup=60,
            hold=0.5,
            decay="linear",
            optimiser="muon",
            weight_decay=0.01,
            log_every=20,
            score_every=300,
            checkpoint_every=150,
        ),
    ),
    text=TextOptions(kind="continue", pieces=10240, prompt_tokens=(16, 160), max_new_tokens=64, rows=64),
    draft=DraftOptions(
        taps=(1, 3, 4),
        start="ridge",
        sequences=16,
        anchors=16,
        cache="bfloat16",
        fit=FitOptions(
            steps=5000,
            rate=0.02,
            last_rate=0.0,
            warmup=100,
            optimiser="muon",
            weight_decay=0.01,
            score_every=350,
            checkpoint_every=175,
        ),
    ),
    eval=EvalOptions(prompts=PROMPTS),
    exclude=PROMPTS,
    licence="Apache-2.0",
)

TINY_CODE_HYBRID = replace(
    TINY_CODE,
    name="tiny-code-hybrid",
    target=replace(
        TINY_CODE.target or TargetOptions(),
        architecture="qwen3_5",
        inner=416,
        # Its layers take longer: with fewer steps, here and below, it stays within three hours.
        fit=replace((TINY_CODE.target or TargetOptions()).fit, steps=1200),
    ),
    text=replace(TINY_CODE.text, pieces=12288),
    draft=replace(TINY_CODE.draft, inner=512, fit=replace(TINY_CODE.draft.fit, steps=3000, score_every=300)),
)

SMOLLM2 = TrainOptions(
    name="smollm2-135m",
    threads=2,
    compile=True,
    source="smollm2-135m",
    # What two cores do in two hours, which is far too little for a draft that is worth its memory: see the notes.
    text=TextOptions(
        kind="chat",
        pieces=1024,
        max_new_tokens=96,
        turn_tokens=40,
        rows=32,
        least_distinct=0.5,
        # what the test prompts are like, and what they are not
        openers=(
            "Write a Python function that",
            "def",
            "from typing import List\n\n\ndef",
            "Complete this function:\n\ndef",
            "How many",
            "Tom has",
            "A farmer sells",
            "Solve this step by step:",
            "Explain why",
            "What is the difference between",
            "Write a short story about",
            "Give me a list of",
            "Summarize",
            "Write an email to",
            "Imagine you are",
        ),
    ),
    draft=DraftOptions(
        layers=3,
        taps=(8, 14, 20, 27, 29),
        mask_token_id=5,
        start="ridge",
        sequences=8,
        anchors=24,
        gamma=2.5,
        kl=0.5,
        negatives=512,
        cache="bfloat16",
        fit=FitOptions(
            steps=500,
            rate=0.01,
            last_rate=0.0,
            warmup=50,
            optimiser="muon",
            weight_decay=0.01,
            score_every=50,
            checkpoint_every=25,
        ),
    ),
    eval=EvalOptions(prompts=CHAT_PROMPTS, raw=False),
    exclude=CHAT_PROMPTS,
    licence="Apache-2.0",
)

RECIPES = {known.name: known for known in (TINY_CODE, TINY_CODE_HYBRID, SMOLLM2)}
"""By name."""


def recipe(name: str) -> TrainOptions:
    """Return a recipe's options.

    Raises:
        InputError: no recipe of that name.
    """
    if name not in RECIPES:
        raise errors.InputError(f"unknown recipe {name!r}; known recipes: {', '.join(RECIPES)}")
    return RECIPES[name]
