"""The pairs that have a name, and what it takes to have one on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_fn import errors
from dflash_fn.zoo import embedded, smollm2
from dflash_fn.zoo.cache import Report

__all__ = ["Files", "ZooEntry", "entry", "fetch", "names"]


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """What is known of a named pair before it is fetched.

    Attributes:
        name: what it is asked for by.
        description: one line.
        licence: an SPDX identifier, of the weights.
        size: what it takes, for people.
    """

    name: str
    description: str
    licence: str
    size: str


@dataclass(frozen=True, slots=True)
class Files:
    """Checkpoint folders, ready to load.

    Attributes:
        target: of the target.
        draft: of the draft, or None where the pair has none.
    """

    target: Path
    draft: Path | None


def _tiny_code(report: Report) -> Files:
    del report
    return Files(*embedded.folders("tiny-code"))


def _smollm2(report: Report) -> Files:
    return Files(smollm2.fetch(report), None)


ENTRIES: dict[str, tuple[ZooEntry, Callable[[Report], Files]]] = {
    "tiny-code": (
        ZooEntry(
            "tiny-code", "4.6 M parameter model of Python source, with its draft", "Apache-2.0", "13 MB, embedded"
        ),
        _tiny_code,
    ),
    "smollm2-135m": (
        ZooEntry(
            "smollm2-135m",
            "SmolLM2-135M-Instruct, a small English chat model; no draft",
            "Apache-2.0",
            "93 MB to download, 540 MB in the cache",
        ),
        _smollm2,
    ),
}


def names() -> tuple[str, ...]:
    """Return all names; the first is the default."""
    return tuple(ENTRIES)


def entry(name: str) -> ZooEntry:
    """Return what is known of a pair.

    Raises:
        InputError: no pair has that name.
    """
    return _find(name)[0]


def fetch(name: str, *, report: Report | None = None) -> Files:
    """Return a pair's checkpoint folders, downloaded and converted the first time.

    Args:
        name: one of `names()`.
        report: gets short status lines; without it nothing is said.

    Raises:
        InputError: no pair has that name.
        DownloadError: it cannot be fetched, or is not what was expected.
        CacheFolderError: the cache folder cannot be written.
        BackendMissing: a package that the conversion needs is not installed.
    """
    return _find(name)[1](report or _silent)


def _find(name: str) -> tuple[ZooEntry, Callable[[Report], Files]]:
    if name not in ENTRIES:
        raise errors.InputError(f"unknown pair {name!r}; known pairs: {', '.join(ENTRIES)}")
    return ENTRIES[name]


def _silent(line: str) -> None:
    del line
