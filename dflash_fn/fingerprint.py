"""Digests that say whether two checkpoints are the same, wherever they lie and however they were loaded."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from dflash_fn import errors

__all__ = ["of_folder", "of_tensors"]

CHUNK = 1 << 24


def of_folder(folder: Path) -> str:
    """Return the digest of all tensors in a folder's safetensors files: names, dtypes, shapes and bytes.

    It is kept for as long as the process lives and the files keep their sizes and times.

    Raises:
        CheckpointError: a file that is no safetensors file.
    """
    files = sorted(folder.glob("*.safetensors"))
    return _of_files(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@functools.lru_cache(maxsize=16)
def _of_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    entries = sorted((entry for file, _, _ in files for entry in _entries(file)), key=lambda entry: entry[0])
    return of_tensors((name, dtype, shape, _data(file, *span)) for name, dtype, shape, file, span in entries)


def of_tensors(tensors: Iterable[tuple[str, str, tuple[int, ...], Iterable[bytes]]]) -> str:
    """Return the digest of tensors in the order of their names: (name, dtype as safetensors names it, shape, bytes)."""
    made = hashlib.blake2b(digest_size=16)
    for name, dtype, shape, data in tensors:
        made.update(f"{name} {dtype} {list(shape)} ".encode())
        for part in data:
            made.update(part)
    return made.hexdigest()


def _entries(file: Path) -> Iterator[tuple[str, str, tuple[int, ...], Path, tuple[int, int]]]:
    """Yield what the header of a safetensors file says: 8 bytes of length, JSON, data."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except (OSError, ValueError) as error:
        raise errors.CheckpointError(f"{file}: not a whole safetensors file ({error}); fetch it again") from None
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield name, entry["dtype"], tuple(entry["shape"]), file, (8 + length + first, last - first)


def _data(file: Path, offset: int, size: int) -> Iterator[bytes]:
    with file.open("rb") as opened:
        opened.seek(offset)
        for start in range(0, size, CHUNK):
            yield opened.read(min(CHUNK, size - start))
