"""What a benchmark asks: the five data sets of upstream's benchmark, rows of files, and text to go on from.

Data sets come from the package, as far as it has them, or from the hub: which of the two is said, never found out, so
that the same command asks the same questions everywhere. The wording around a row's text is that of upstream's
benchmark, so that figures can be compared; raw prompts are the row's text alone.

Source:
    `dflash` 0.1.0, its benchmark: data sets, splits, wordings, and the seed 42 with which it shuffles.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_fn import errors, prompts

__all__ = ["SETS", "SOURCES", "DataSet", "Question", "digest", "read_questions", "shortened"]

SOURCES = ("bundled", "hub")
"""Where the rows of a named data set come from."""

STEPWISE = "{text}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PROGRAM = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{text}\n```"
ROWS = (".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation to hold; what comes after the first turn follows an answer.

    Attributes:
        name: for tables, such as `gsm8k/3`.
        turns: what the user says.
        whole: whether all of it is asked; False for a text of which `shortened` takes the head.
    """

    name: str
    turns: tuple[str, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class DataSet:
    """A public data set.

    Attributes:
        hub: its hub id, and the name of its configuration where it has several.
        split: of the rows that are asked.
        wording: what is asked; `{text}` stands for the row's own text.
    """

    hub: tuple[str, ...]
    split: str
    wording: str


SETS = {
    "gsm8k": DataSet(("openai/gsm8k", "main"), "test", STEPWISE),
    "math500": DataSet(("HuggingFaceH4/MATH-500",), "test", STEPWISE),
    "humaneval": DataSet(("openai/openai_humaneval",), "test", PROGRAM),
    "mbpp": DataSet(("google-research-datasets/mbpp", "sanitized"), "test", "{text}"),
    "mt-bench": DataSet(("HuggingFaceH4/mt_bench_prompts",), "train", "{text}"),
}
"""By the names that the command line takes."""


def read_questions(
    names: Iterable[str] = (),
    data: Iterable[str] = (),
    *,
    source: str = "bundled",
    limit: int | None = None,
    shuffle: int | None = None,
    raw: bool = False,
) -> list[Question]:
    """Read what is to be asked, in the order in which it is named.

    Args:
        names: of `SETS`.
        data: `FILE` or `FILE:20-39` for rows of a JSONL file or a bundled name, which are asked as they are;
            `NAME=FILE` for rows that are asked in the wording of a data set; a file of any other kind is a text to go
            on from, and needs `raw`.
        source: `bundled` or `hub`, for the names.
        limit: how many of each name or file; None takes all.
        shuffle: a seed to shuffle each with before that; None leaves the order. 42 gives upstream's order.
        raw: whether rows are text to go on from, without any wording.

    Raises:
        InputError: a name that is none or is not bundled; what `dflash_fn.prompts` cannot read; nothing to ask; the
            same name twice.
        BackendMissing: the hub is meant, and the package `datasets` is not installed.
        DownloadError: the hub cannot be reached.

    Example:
        >>> [question.name for question in read_questions(["gsm8k"], ["humaneval:7"], limit=2)]
        ['gsm8k/0', 'gsm8k/1', 'humaneval/7']
    """
    if source not in SOURCES:
        raise errors.InputError(f"source: got {source!r}, expected one of: {', '.join(SOURCES)}")
    parts = [_named(name, source, raw) for name in names] + [_filed(place, raw) for place in data]
    found = [question for part in parts for question in _chosen(part, limit, shuffle)]
    if not found:
        raise errors.InputError(f"nothing to ask; name a data set ({', '.join(SETS)}), or give --data FILE")
    seen: set[str] = set()
    for question in found:
        if question.name in seen:
            raise errors.InputError(f"two questions are called {question.name}; name each once, or rename a file")
        seen.add(question.name)
    return found


def _chosen(part: list[Question], limit: int | None, shuffle: int | None) -> list[Question]:
    order = list(range(len(part)))
    if shuffle is not None:
        random.Random(shuffle).shuffle(order)
    return [part[index] for index in order[:limit]]


def _named(name: str, source: str, raw: bool) -> list[Question]:
    if name not in SETS:
        raise errors.InputError(f"data set: got {name!r}, expected one of: {', '.join(SETS)}; or give --data FILE")
    if source == "hub":
        rows = [(f"{name}/{row}", prompts.turns_of(dict(record), f"{name}, row {row}"))
                for row, record in enumerate(_from_hub(name))]  # fmt: skip
    elif name in prompts.BUNDLED:
        rows = prompts.read_conversations([name])
    else:
        raise errors.InputError(
            f"{name} is not bundled ({', '.join(prompts.BUNDLED)} are); "
            f"add --source hub, or give its rows by --data {name}=FILE"
        )
    return _worded(name, rows, raw)


def _from_hub(name: str) -> Iterable[Any]:
    known = SETS[name]
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise errors.BackendMissing(
            f"--source hub needs the package datasets, which is not installed; run: {errors.install_line('bench')}"
        ) from None
    try:
        return load_dataset(*known.hub, split=known.split)
    except Exception as error:  # the package raises what its many layers raise
        reason = " ".join(str(error).split())[:200]
        raise errors.DownloadError(
            f"{name}: {known.hub[0]} cannot be had from the hub ({type(error).__name__}: {reason}); give its rows by "
            f"--data {name}=FILE, or ask what is bundled ({', '.join(prompts.BUNDLED)}) by --source bundled"
        ) from error


def _worded(name: str | None, rows: Iterable[tuple[str, Sequence[str]]], raw: bool) -> list[Question]:
    wording = "{text}" if raw or name is None else SETS[name].wording
    return [Question(title, tuple(wording.format(text=turn) for turn in turns)) for title, turns in rows]


def _filed(place: str, raw: bool) -> list[Question]:
    name, found, rest = place.partition("=")
    name, place = (name, rest) if found and name in SETS and not Path(place).exists() else (None, place)
    file, first, last = prompts.span_of(place)
    if file in prompts.BUNDLED or Path(file).suffix.lower() in ROWS:
        return _worded(name, prompts.read_conversations([place]), raw)
    if not raw:
        raise errors.InputError(
            f"--data {place}: is no {' or '.join(ROWS)} file, and so a text to go on from; add --raw"
        )
    if (first, last) != (0, None):
        raise errors.InputError(f"--data {place}: names rows, which only {' and '.join(ROWS)} files have")
    return [_text(file)]


def _text(file: str) -> Question:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise errors.InputError(f"--data {file}: cannot be read as UTF-8 text ({reason})") from None
    if not text.strip():
        raise errors.InputError(f"--data {file}: is empty; expected text to go on from")
    return Question(Path(file).name, (text,), whole=False)


def shortened(question: Question, tokenizer: Any, count: int) -> Question:
    """Return a question with the first `count` tokens of a text; others are returned as they are."""
    if question.whole:
        return question
    ids = tokenizer.encode(question.turns[0], add_special_tokens=False)[:count]
    return replace(question, turns=(tokenizer.decode(ids),), whole=True)


def digest(questions: Iterable[Question]) -> str:
    """Return what tells questions apart from others: a digest of their names and turns."""
    told = json.dumps([[question.name, *question.turns] for question in questions], ensure_ascii=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]
