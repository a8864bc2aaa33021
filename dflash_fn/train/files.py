"""Small files of a run, each written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn import container, errors

__all__ = ["array_digest", "fresh_folder", "read_json", "replaced", "write_array", "write_json", "write_text"]


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Hand out a place to write a file to; it moves to `path` when the block ends without an error.

    Raises:
        CacheFolderError: the folder is missing, full or read only; nothing half-written stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with container.replaced(path) as beside:
            yield beside
    except OSError as error:
        raise errors.CacheFolderError(f"{path}: cannot be written ({error.strerror or error})") from None


@contextlib.contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Hand out an empty folder to fill; it takes the place of `path` when the block ends without an error.

    A run that is killed leaves either the old folder, or none, or the new one: never half of one.
    """
    beside = path.parent / f".{path.name}.{secrets.token_hex(6)}"
    try:
        beside.mkdir(parents=True)
        yield beside
        if path.exists():
            shutil.rmtree(path)
        beside.replace(path)
    except OSError as error:
        raise errors.CacheFolderError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    with replaced(path) as place:
        place.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write what JSON can say, for people to read too."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of a run.

    Raises:
        InputError: it is not there, or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise errors.InputError(f"{path}: cannot be read ({error}); run the stage that makes it again") from None


def write_array(path: Path, values: np.ndarray) -> None:
    """Write one array in numpy's own format, which can be mapped into memory."""
    with replaced(path) as place, place.open("wb") as opened:
        np.save(opened, values)


def array_digest(*arrays: np.ndarray) -> str:
    """Return a digest of arrays: dtypes, shapes and values."""
    made = hashlib.blake2b(digest_size=16)
    for array in arrays:
        made.update(f"{array.dtype} {list(array.shape)} ".encode())
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()
