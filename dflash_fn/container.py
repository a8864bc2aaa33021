"""Files of records: safetensors with a versioned JSON header and a digest, written whole or not at all.

Arrays are handed over as numpy arrays; bfloat16, which numpy does not have, as its bits in uint16 with the dtype named
in the header. The digest covers header and arrays, so that a file that was cut or edited is told from a good one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_fn import errors

__all__ = ["Bits", "check_file_place", "read", "replaced", "write"]

VERSION = 1


class Bits(NamedTuple):
    """An array as a file holds it.

    Attributes:
        dtype: `float32`, `bfloat16`, `float16`, `float64`, `int64` ...
        values: the array; of bfloat16, its bits as uint16.
    """

    dtype: str
    values: np.ndarray


def write(path: Path, kind: str, header: Mapping[str, Any], arrays: Mapping[str, Bits]) -> None:
    """Write a file beside its place and move it there.

    Args:
        path: of the file; an existing one is replaced in one go, and what a link leads to in place of the link.
        kind: what the file holds, such as `state`; `read` asks for it.
        header: anything that JSON can say.
        arrays: by name.

    Raises:
        CacheFolderError: the folder is missing, full or read only, or there is something else than a file, such as a
            device; nothing half-written stays.
    """
    from safetensors.numpy import save

    dtypes = {name: bits.dtype for name, bits in arrays.items()}
    text = json.dumps({"kind": kind, "version": VERSION, "dtypes": dtypes, **header}, sort_keys=True)
    values = {name: np.ascontiguousarray(bits.values) for name, bits in arrays.items()}
    content = save(values, {"dflash_fn": text, "digest": _digest(text, values)})
    try:
        place = path.resolve()
        check_file_place(place)
        with replaced(place) as beside, beside.open("xb") as made:
            made.write(content)
    except OSError as error:
        raise errors.CacheFolderError(f"{path}: cannot be written ({error.strerror or error})") from None


def check_file_place(path: Path) -> None:
    """Raise CacheFolderError where something stands that is no file: a move would put a file in a device's place."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise errors.CacheFolderError(
            f"{path}: is a device or a pipe, which cannot be replaced; give the name of a file"
        )


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Hand out a place beside a file, to write to; it moves there when the block ends without an error.

    The mode is what the umask leaves, as for any file of the user's.

    Raises:
        OSError: it cannot be written, flushed or moved; nothing half-written stays.
    """
    beside = path.parent / f".{path.name}.{secrets.token_hex(6)}"
    try:
        yield beside
        with beside.open("r+b") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Bits]]:
    """Read a file that `write` wrote.

    Raises:
        StateFileError: no such file, not one of ours, another kind, a newer version, cut or edited.
    """
    metadata, values = _contents(path)
    try:
        text = metadata["dflash_fn"]
        header = json.loads(text)
        found, version = header["kind"], int(header["version"])
    except (KeyError, TypeError, ValueError):
        raise errors.StateFileError(f"{path}: a safetensors file, but not one that dflash_fn wrote") from None
    if found != kind:
        raise errors.StateFileError(f"{path}: holds a {found}, expected a {kind}")
    if version > VERSION:
        raise errors.StateFileError(
            f"{path}: was written in format {version}; this version of dflash_fn reads up to {VERSION}"
        )
    if metadata.get("digest") != _digest(text, values):
        raise errors.StateFileError(f"{path}: was changed after it was written; its digest does not match")
    return header, {name: Bits(header["dtypes"][name], array) for name, array in values.items()}


def _contents(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            return opened.metadata() or {}, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise errors.StateFileError(f"{path}: no such file") from None
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        raise errors.StateFileError(f"{path}: not a whole file that dflash_fn wrote ({error})") from None


def _digest(text: str, values: Mapping[str, np.ndarray]) -> str:
    made = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(values):
        made.update(f"{name} {values[name].dtype} {list(values[name].shape)} ".encode())
        made.update(np.ascontiguousarray(values[name]).tobytes())
    return made.hexdigest()
