"""A corpus of source code: files, what is held out of it, and what is dropped as repeated or too near a test prompt."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_fn import errors
from dflash_fn.train import packages
from dflash_fn.train.options import CorpusOptions
from dflash_fn.train.overlap import Excluded
from dflash_fn.train.packages import Package, decoded

__all__ = ["Corpus", "collect", "divide", "files"]

LEAST_HELD_OUT = 3000
"""Bytes of a file below which it is not held out: it could not be measured."""

NOT_OURS = {"site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts to train on and texts to measure on.

    Attributes:
        train: (name, text) of files, cleaned.
        held_out: (name, text) of files as they are, none of which is in `train`.
        near: names of files left out for being near a prompt.
        packages: where the files came from, besides the standard library and folders.
    """

    train: tuple[tuple[str, str], ...]
    held_out: tuple[tuple[str, str], ...]
    near: tuple[str, ...]
    packages: tuple[Package, ...]


def collect(options: CorpusOptions, excluded: Excluded, cache: Path) -> Corpus:
    """Read all sources, hold some out, and clean the rest.

    Args:
        options: what to read.
        excluded: prompts that no file may be near.
        cache: folder for wheels.

    Raises:
        InputError: nothing is left to train on, or a licence is not permissive.
        DownloadError: a package cannot be fetched.
    """
    fetched = tuple(packages.fetch(options.packages, cache))
    train, held_out, near = divide(files(options, fetched), options, excluded)
    if not train:
        raise errors.InputError("corpus: no Python file was found; give packages or folders that have some")
    return Corpus(tuple(train), tuple(held_out), tuple(near), fetched)


def files(options: CorpusOptions, fetched: Iterable[Package]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of all files: the standard library, then packages, then folders, each sorted."""
    if options.stdlib:
        version = f"python-{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
        yield from _folder(Path(sysconfig.get_path("stdlib")), version, options.longest)
    for package in fetched:
        yield from packages.sources(package, longest=options.longest)
    for folder in options.folders:
        if not Path(folder).is_dir():
            raise errors.InputError(f"corpus.folders: {folder!r} is no folder")
        yield from _folder(Path(folder), Path(folder).name, options.longest)


def _folder(root: Path, name: str, longest: int) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if NOT_OURS.intersection(parts) or not 0 < path.stat().st_size <= longest:
            continue
        text = decoded(path.read_bytes())
        if text is not None:
            yield f"{name}/{'/'.join(parts)}", text


def divide(
    named: Iterable[tuple[str, str]], options: CorpusOptions, excluded: Excluded
) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Split files into those to train on, those held out, and names of those near a prompt.

    Held out are the files whose names have the smallest digests: a choice that no order and no seed changes. Their
    runs of lines count as seen before the first file that is trained on, so that nothing of them is trained on.
    """
    known = [(name, text) for name, text in named if text.strip() and _digits(text) <= options.most_digits]
    near = {name for name, text in known if excluded.near(text)}
    clean = [entry for entry in known if entry[0] not in near]
    large = [entry for entry in clean if len(entry[1].encode()) >= LEAST_HELD_OUT]
    held_out = sorted(large, key=lambda entry: hashlib.blake2b(entry[0].encode()).digest())[: options.held_out]
    seen: set[int] = set()
    for _, text in held_out:
        _fresh(text, options.run, seen)
    names = {name for name, _ in held_out}
    train = [(name, _fresh(text, options.run, seen)) for name, text in clean if name not in names]
    return [entry for entry in train if entry[1].strip()], sorted(held_out), sorted(near)


def _digits(text: str) -> float:
    """Return the share of digits among what is no white space."""
    return sum(map(text.count, "0123456789")) / (len("".join(text.split())) or 1)


def _fresh(text: str, run: int, seen: set[int]) -> str:
    """Return a text without the lines of runs that were seen before, and remember its own runs."""
    lines = text.split("\n")
    full = [index for index, line in enumerate(lines) if line.strip()]
    repeated: set[int] = set()
    for first in range(len(full) - run + 1):
        places = full[first : first + run]
        key = _key("\n".join(lines[place].strip() for place in places))
        if key in seen:
            repeated.update(places)
        seen.add(key)
    return "\n".join(line for index, line in enumerate(lines) if index not in repeated)


def _key(text: str) -> int:
    # not Python's own hash, which differs from process to process
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
