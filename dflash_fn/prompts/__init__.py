"""Prompts that come with the package, and the reading of any file of prompts.

Rows of public test sets, so that figures can be measured, and kept out of training data, without a network. NOTICE
says where they come from, and their licences.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dflash_fn import errors

__all__ = ["BUNDLED", "FIELDS", "find", "read", "read_conversations", "read_rows", "records", "span_of", "turns_of"]

FOLDER = Path(__file__).parent

BUNDLED = ("humaneval", "gsm8k", "mt-bench")
"""Names that stand for files of this package: 64, 50 and 40 rows."""

FIELDS = ("prompt", "question", "problem", "turns")
"""Where the public data sets keep a row's prompt; a list holds the turns of a conversation."""


def find(name: str | Path) -> Path:
    """Return the file of a bundled name, or the file itself; whether it is there is not looked at.

    Example:
        >>> find("humaneval").name
        'humaneval.jsonl'
    """
    return FOLDER / f"{name}.jsonl" if str(name) in BUNDLED else Path(name)


def read(name: str | Path) -> list[list[str]]:
    """Return the prompts of a bundled name or a JSONL file, each as its turns.

    Raises:
        InputError: a file that is not there or cannot be read, or a row without a prompt.

    Example:
        >>> [len(read(name)) for name in BUNDLED]
        [64, 50, 40]
    """
    return [turns for _, turns in _rows_of(str(name), 0, None)]


def read_rows(places: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name, first turn) of the rows that `FILE`, `FILE:3` or `FILE:20-39` name; FILE may be a bundled name.

    Raises:
        InputError: a file that is not there or cannot be read, rows that it does not have, or a row without a prompt.
    """
    return [(name, turns[0]) for name, turns in read_conversations(places)]


def read_conversations(places: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return (name, all turns) of rows, named as for `read_rows`, and with its errors."""
    return [row for place in places for row in _rows_of(*span_of(place))]


def turns_of(record: Any, where: str) -> list[str]:
    """Return the turns of a row's prompt.

    Args:
        record: a JSON object with one of the known fields.
        where: names it in messages.

    Raises:
        InputError: it is no object, has none of the known fields, or no text there, which an empty one and one
            with half a character (a lone surrogate, no UTF-8) are not either.
    """
    if not isinstance(record, dict):
        raise errors.InputError(f"{where}: got JSON of type {type(record).__name__}, expected an object")
    field = next((field for field in FIELDS if field in record), None)
    if field is None:
        raise errors.InputError(f"{where}: has none of the fields {', '.join(FIELDS)}")
    value = record[field]
    turns = [value] if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise errors.InputError(
            f"{where}: field {field!r}: got {reprlib.repr(value)}, expected text, or a list of texts"
        )
    for turn in turns:
        _check_text(turn, f"{where}: field {field!r}")
    return turns


def _check_text(text: str, where: str) -> None:
    if not text:
        raise errors.InputError(f"{where}: is empty; expected text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.InputError(
            f"{where}: is no UTF-8 text (half a character, {text[error.start]!r}, at offset {error.start}); expected a "
            "whole one"
        ) from None


def span_of(place: str) -> tuple[str, int, int | None]:
    """Return the file of `FILE`, `FILE:3` or `FILE:20-39`, its first row and its last; None where no last is named.

    Raises:
        InputError: rows that are written otherwise.

    Example:
        >>> span_of("rows.jsonl:20-39"), span_of("rows.jsonl")
        (('rows.jsonl', 20, 39), ('rows.jsonl', 0, None))
    """
    if Path(place).exists() or ":" not in place:
        return place, 0, None
    file, _, span = place.rpartition(":")
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", span, re.ASCII)
    if found is None:
        raise errors.InputError(f"{place}: got rows {span!r}, expected FILE, FILE:3 or FILE:20-39")
    first, last = found.groups()
    return file, int(first), int(last or first)


def _rows_of(file: str, first: int, last: int | None) -> Iterator[tuple[str, list[str]]]:
    for row, (where, record) in enumerate(records(file, first, last), first):
        yield f"{Path(file).stem}/{row}", turns_of(record, where)


def records(file: str, first: int = 0, last: int | None = None) -> Iterator[tuple[str, Any]]:
    """Yield rows `first` to `last` of a bundled name or a JSONL file: what names each in messages, and its JSON.

    Raises:
        InputError: a file that is not there, cannot be read or is empty, rows that it does not have, or no JSON.
    """
    lines = _lines_of(file)
    last = len(lines) - 1 if last is None else last
    if last >= len(lines) or first > last:
        raise errors.InputError(
            f"{file}: got rows {first} to {last}, expected rows from 0 to {len(lines) - 1}: the file has {len(lines)}"
        )
    for row in range(first, last + 1):
        where = f"{file}, row {row} (line {row + 1})"  # rows are counted from 0 where they are named, lines from 1
        yield where, _json(lines[row], where)


def _lines_of(file: str) -> list[str]:
    """Return a file's lines; splitting at line feeds alone, since JSON strings may hold other separators."""
    try:
        lines = find(file).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise errors.InputError(
            f"{file}: cannot be read as a JSONL file ({reason}); give a file of UTF-8 text, or one of the names "
            f"{', '.join(BUNDLED)}"
        ) from None
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise errors.InputError(f"{file}: is empty; expected a JSON object a line")
    return lines


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise errors.InputError(f"{where}: is no JSON ({error}); expected a JSON object a line") from None
