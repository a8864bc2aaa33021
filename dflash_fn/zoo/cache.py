"""The folder that built checkpoints are kept in, and the way in which one gets there: whole, or not at all.

A checkpoint is built in a temporary folder beside its place and renamed at the end. One lock file a checkpoint lets
a single process build while others wait for what it makes; who holds it knows that older temporaries are dead.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from dflash_fn import errors
from dflash_fn.zoo import lock

__all__ = ["MARKER", "Build", "Report", "ensure", "present", "problem", "root"]

MARKER = "complete.json"
"""Written last into a checkpoint folder: the size of every file, and digests."""

Report: TypeAlias = Callable[[str], None]
"""Takes one short line on what is going on."""

Build: TypeAlias = Callable[[Path, Path, Report], dict[str, str]]
"""(scratch folder, checkpoint folder, report) -> SHA-256 by file name; both folders are there and empty."""


def root() -> Path:
    """Return `$DFLASH_FN_CACHE`, or `$XDG_CACHE_HOME/dflash_fn`, or `~/.cache/dflash_fn`; it need not exist.

    Raises:
        CacheFolderError: none of them is set, and the user has no home folder.
    """
    own, shared = os.environ.get("DFLASH_FN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "dflash_fn"
        return folder.expanduser().absolute()
    except RuntimeError:
        raise errors.CacheFolderError("no home folder to keep a cache in; set DFLASH_FN_CACHE to a folder") from None


def ensure(name: str, build: Build, *, needed: int, report: Report) -> Path:
    """Return the checkpoint folder called `name`, built first where it is missing or damaged.

    Args:
        name: of the folder, inside `root()`; it must change whenever the content does.
        build: what fills an empty checkpoint folder; if it raises, nothing is left behind.
        needed: bytes of disk that building takes at most.
        report: gets status lines.

    Raises:
        CacheFolderError: the folder cannot be written, or has not the space.
        DownloadError: from `build`.
        BackendMissing: from `build`.
    """
    folder = root() / name
    with _mapped_errors(folder.parent, needed):
        wrong = problem(folder)
        if not wrong:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock.held(
            folder.parent / f".{name}.lock", waiting=lambda: report(f"{name}: another run builds it")
        ) as alone:
            wrong = problem(folder)
            if wrong and folder.exists():
                report(f"{folder} is damaged ({wrong}); it is built again")
            if alone:
                _remove_stale(folder)
            if wrong:
                _build(folder, build, needed, report)
    return folder


def problem(folder: Path) -> str:
    """Say what is wrong with a built checkpoint, or nothing; sizes are compared and no content is read."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes: dict[str, int] = marker["sizes"]
        for name, size in sizes.items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, expected {size}"
    except FileNotFoundError as error:
        return f"no {Path(error.filename).name}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MARKER} is not readable"
    return ""


def present(name: str) -> bool:
    """Whether the folder called `name` is built and whole; False too where the cache cannot be looked at."""
    try:
        return not problem(root() / name)
    except OSError:  # no permission, or no home folder (CacheFolderError)
        return False


def _build(folder: Path, build: Build, needed: int, report: Report) -> None:
    _check_space(folder.parent, needed)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        scratch, fresh = temporary / "scratch", temporary / "checkpoint"
        scratch.mkdir()
        fresh.mkdir()
        digests = build(scratch, fresh, report)
        _seal(fresh, digests)
        _publish(fresh, folder, aside=temporary / "damaged")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Remove what killed runs left; only for who holds the lock, since a live run's folder looks the same."""
    for stale in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)


def _seal(folder: Path, digests: dict[str, str]) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / MARKER).write_text(json.dumps({"sizes": sizes, "sha256": digests}, indent=2), encoding="utf-8")


def _publish(fresh: Path, folder: Path, *, aside: Path) -> None:
    """Move `fresh` to its place; where a lock meant nothing, someone else's whole result is as good."""
    try:
        if folder.exists() and problem(folder):
            folder.rename(aside)
        fresh.rename(folder)
    except OSError:
        if problem(folder):
            raise


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise errors.CacheFolderError(_no_space(folder, free, needed))


def _no_space(folder: Path, free: int, needed: int) -> str:
    return (
        f"cache folder {folder}: no space; {free / 1e6:.0f} MB are free, {needed / 1e6:.0f} MB are needed; "
        "make room, or set DFLASH_FN_CACHE to another folder"
    )


@contextmanager
def _mapped_errors(folder: Path, needed: int) -> Iterator[None]:
    """Turn what the file system says into an error that names the cache folder; our own errors pass."""
    try:
        yield
    except errors.DflashError:
        raise
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise errors.CacheFolderError(_no_space(folder, shutil.disk_usage(folder).free, needed)) from None
        reason = error.strerror or str(error) or type(error).__name__
        raise errors.CacheFolderError(
            f"cache folder {folder}: cannot be used ({reason}; {needed / 1e6:.0f} MB are needed there); "
            "set DFLASH_FN_CACHE to a folder that you can write to"
        ) from None
