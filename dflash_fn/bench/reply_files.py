"""The folder of a run: its options, and its replies, a line each as soon as it is there, so that it can go on later.

Several processes write a file each, `replies.1.jsonl` for the second; at the end the first writes `replies.jsonl`, with
all of them in order, and each removes its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from dflash_fn import errors
from dflash_fn.bench.asking import Key, Record
from dflash_fn.bench.replies import Reply
from dflash_fn.container import replaced

__all__ = ["REPLIES", "ReplyFolder"]

REPLIES = "replies.jsonl"
"""One object a line: question, turn, way, begun, memory, and what the reply has."""

OPTIONS = "options.json"


class ReplyFolder:
    """A folder that replies are written to.

    Attributes:
        folder: where.
        known: records that were there before.
    """

    def __init__(self, folder: Path, *, rank: int = 0, alone: bool = True) -> None:
        """Read what is there, without changing it; see `begin` for whether it may be gone on with."""
        self.folder = folder
        self.path = folder / (REPLIES if alone else f"replies.{rank}.jsonl")
        self.known: dict[Key, Record] = {}
        self._file: TextIO | None = None

    def begin(self, options: Mapping[str, Any], *, resume: bool) -> None:
        """Make the folder ready for a new run, or for the rest of one.

        Args:
            options: what decides on the replies.
            resume: whether to go on with the run that is there.

        Raises:
            InputError: the folder holds another run, or one that is not to be gone on with, or none to resume. A run
                that ended before its first reply is none.
            CacheFolderError: it cannot be written to.
        """
        place = self.folder / OPTIONS
        if resume:
            self._check_options(options)
            return
        if any(path.stat().st_size for path in self.folder.glob("replies*.jsonl")):
            raise errors.InputError(
                f"--out {self.folder}: holds a run already; go on with it by --resume, or name another folder"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise errors.CacheFolderError(f"--out {self.folder}: cannot be written ({error.strerror})") from None

    def _check_options(self, options: Mapping[str, Any]) -> None:
        place = self.folder / OPTIONS
        try:
            before = json.loads(place.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise errors.InputError(
                f"--resume: there is no run to go on with in {self.folder} ({OPTIONS}: {error}); leave --resume out"
            ) from None
        changed = [name for name in {**before, **options} if before.get(name) != options.get(name)]
        if changed:
            told = "; ".join(f"{name} was {before.get(name)!r}, got {options.get(name)!r}" for name in changed)
            raise errors.InputError(
                f"--resume: the run in {self.folder} was made with other options ({told}); give the same, or another "
                "--out"
            )

    def read(self) -> dict[Key, Record]:
        """Read the records of all processes; a line that was cut while it was written is left out.

        Raises:
            InputError: a line that is no record.
        """
        for path in sorted(self.folder.glob("replies*.jsonl")):
            text = path.read_text(encoding="utf-8")
            for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
                record = _record_of(line, f"{path}, line {number}")
                self.known[record.key] = record
        return self.known

    def add(self, record: Record) -> None:
        """Append a record, unless it was there before."""
        if self.known.get(record.key) is record:
            return
        if self._file is None:
            _drop_cut_line(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(_line_of(record) + "\n")
        self._file.flush()

    def finish(self, records: Iterable[Record]) -> None:
        """Write `replies.jsonl` anew, with these records and their order, in place of all files of replies."""
        self.close()
        with replaced(self.folder / REPLIES) as made:
            made.write_text("".join(_line_of(record) + "\n" for record in records), encoding="utf-8")
        for path in self.folder.glob("replies.*.jsonl"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file that records are appended to."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove_own(self) -> None:
        """Remove the file of one process of several, which may lie on another machine than the first one's."""
        self.close()
        if self.path.name != REPLIES:
            self.path.unlink(missing_ok=True)


def _drop_cut_line(path: Path) -> None:
    if not path.exists():
        return
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        with path.open("r+b") as file:
            file.truncate(end)


def _line_of(record: Record) -> str:
    told = {name: getattr(record, name) for name in ("question", "turn", "way", "begun", "memory")}
    return json.dumps(told | asdict(record.reply))


REPLY_FIELDS = tuple(one.name for one in fields(Reply))


def _record_of(line: str, where: str) -> Record:
    try:
        told = json.loads(line)
        given = {name: told[name] for name in REPLY_FIELDS if name in told}
        for name in ("emitted", "blocks"):  # runs of older versions have no blocks
            given[name] = tuple(given.get(name, ()))
        return Record(told["question"], told["turn"], told["way"], Reply(**given), told["begun"], told["memory"])
    except (ValueError, TypeError, KeyError) as error:
        raise errors.InputError(f"{where}: is no reply ({error!r}); mend or remove the line") from None
