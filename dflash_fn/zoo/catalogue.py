"""The pairs that have a name, and what it takes to have one on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_fn import errors
from dflash_fn.zoo import embedded, smollm2
from dflash_fn.zoo.cache import Report

__all__ = ["Files", "ZooEntry", "entry", "fetch", "names", "present"]


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


def _smollm2(report: Report) -> Files:
    return Files(smollm2.fetch(report), None)


@dataclass(frozen=True, slots=True)
class Known:
    """All that the catalogue holds of a pair.

    Attributes:
        entry: what is told of it.
        fetch: returns its folders, fetched first where they are missing.
        present: whether they are there and whole.
    """

    entry: ZooEntry
    fetch: Callable[[Report], Files]
    present: Callable[[], bool]


def _embedded(name: str, description: str) -> Known:
    def fetched(report: Report) -> Files:
        del report
        return Files(*embedded.folders(name))

    return Known(
        ZooEntry(name, description, "Apache-2.0", "under 14 MB, embedded"), fetched, lambda: embedded.present(name)
    )


ENTRIES: dict[str, Known] = {
    "tiny-code": _embedded("tiny-code", "4.6 M parameter model of Python source, with its draft"),
    "tiny-code-hybrid": _embedded(
        "tiny-code-hybrid", "the same with gated delta nets: four of its six layers are recurrent"
    ),
    "smollm2-135m": Known(
        ZooEntry(
            "smollm2-135m",
            "SmolLM2-135M-Instruct, a small English chat model; no draft",
            "Apache-2.0",
            "93 MB to download, 540 MB in the cache",
        ),
        _smollm2,
        smollm2.present,
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
    return _find(name).entry


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
    return _find(name).fetch(report or _silent)


def present(name: str) -> bool:
    """Whether a pair can be loaded without a download.

    Sizes of files are compared and no content is read. A cache folder that cannot be looked at holds nothing.

    Raises:
        InputError: no pair has that name.

    Example:
        >>> present("tiny-code")
        True
    """
    return _find(name).present()


def _find(name: str) -> Known:
    if name not in ENTRIES:
        raise errors.InputError(f"unknown pair {name!r}; known pairs: {', '.join(ENTRIES)}")
    return ENTRIES[name]


def _silent(line: str) -> None:
    del line
