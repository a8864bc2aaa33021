"""Prompts, pairs and tables that the benchmarks share."""

from __future__ import annotations

import argparse
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_fn import errors, text, zoo
from dflash_fn.load import load_pair
from dflash_fn.records import Pair

__all__ = ["add_pair_options", "encoded", "folders", "load", "markdown", "prompt_ids", "read_rows", "track"]

FIELDS = ("prompt", "question", "problem", "turns")
"""Where the public data sets keep a row's prompt."""


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what to load and which prompts to use."""
    parser.add_argument("--pair", default="tiny-code", help="a zoo name")
    parser.add_argument("--draft", help="a draft's folder or hub id, in place of the pair's own")
    parser.add_argument("--port", default="torch")
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE[:FIRST[-LAST]]", help="JSONL files and rows")
    parser.add_argument("--raw", action="store_true", help="no chat template")


def load(options: argparse.Namespace, dtype: str) -> Pair:
    """Load the pair that the options name."""
    target, draft = folders(options)
    return load_pair(target, draft, port=options.port, dtype=dtype, name=options.pair)


def folders(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the folders of the target and the draft that the options name.

    Raises:
        InputError: the pair has no draft, and none is given.
    """
    files = zoo.fetch(options.pair)
    draft = options.draft or files.draft
    if draft is None:
        raise errors.InputError(f"{options.pair} has no draft of its own; give one by --draft FOLDER")
    return files.target, Path(draft)


def read_rows(places: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name, prompt) of the rows that `FILE`, `FILE:3` or `FILE:20-39` name.

    Raises:
        InputError: a file that is not there or cannot be read, rows that it does not have, or a row without a prompt.
    """
    return [row for place in places for row in _rows_of(place)]


def _rows_of(place: str) -> Iterator[tuple[str, str]]:
    file, first, last = _span_of(place)
    lines = _lines_of(file)
    last = len(lines) - 1 if last is None else last
    if last >= len(lines) or first > last:
        raise errors.InputError(
            f"{place}: got rows {first} to {last}, expected rows from 0 to {len(lines) - 1}: the file has {len(lines)}"
        )
    for row in range(first, last + 1):
        yield f"{Path(file).stem}/{row}", _prompt_of(lines[row], f"{file}, row {row}")


def _span_of(place: str) -> tuple[str, int, int | None]:
    """Return the file, its first row and its last; None where no last row is named."""
    if Path(place).exists() or ":" not in place:
        return place, 0, None
    file, _, span = place.rpartition(":")
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", span, re.ASCII)
    if found is None:
        raise errors.InputError(f"{place}: got rows {span!r}, expected FILE, FILE:3 or FILE:20-39")
    first, last = found.groups()
    return file, int(first), int(last or first)


def _lines_of(file: str) -> list[str]:
    """Return a file's lines; splitting at line feeds alone, since JSON strings may hold other separators."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise errors.InputError(
            f"{file}: cannot be read as a JSONL file ({reason}); give a file of UTF-8 text"
        ) from None
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise errors.InputError(f"{file}: is empty; expected a JSON object a line")
    return lines


def _prompt_of(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise errors.InputError(f"{where}: is no JSON ({error}); expected a JSON object a line") from None
    if not isinstance(record, dict):
        raise errors.InputError(f"{where}: got JSON of type {type(record).__name__}, expected an object")
    field = next((field for field in FIELDS if field in record), None)
    if field is None:
        raise errors.InputError(f"{where}: has none of the fields {', '.join(FIELDS)}")
    value = record[field]
    value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, str):
        raise errors.InputError(
            f"{where}: field {field!r}: got {reprlib.repr(value)}, expected text, or a list that begins with text"
        )
    return value


def prompt_ids(pair: Pair, prompt: str, *, raw: bool) -> list[int]:
    """Return a prompt's token ids, in the chat template if the tokenizer has one and `raw` is False."""
    return encoded(pair.tokenizer, prompt, raw=raw)


def encoded(tokenizer: Any, prompt: str, *, raw: bool) -> list[int]:
    """Return a prompt's token ids, in the chat template if there is one and `raw` is False."""
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(prompt))
    return text.chat_prompt(tokenizer, [{"role": "user", "content": prompt}])


def track(items: Sequence[Any], what: str) -> Iterator[Any]:
    """Go over items with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import track as bar

    yield from bar(items, description=what, console=Console(stderr=True))


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
