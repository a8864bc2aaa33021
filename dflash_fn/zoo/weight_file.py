"""A safetensors file, written one tensor at a time, so that a model never has to be in memory whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from dflash_fn import errors

__all__ = ["write_float32"]


def write_float32(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, np.ndarray]]) -> str:
    """Write float32 tensors and return the file's SHA-256.

    Args:
        path: of the file.
        shapes: of all tensors, by name, in the order of the file.
        tensors: (name, values) in the same order; each is asked for when its turn comes.

    Raises:
        CheckpointError: a tensor is not the one whose turn it is, or has another shape.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(_header(shapes), shapes, tensors):
            digest.update(part)
            file.write(part)
        # After a loss of power a renamed file must not turn out to be full of zeros.
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _parts(
    header: bytes, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, np.ndarray]]
) -> Iterable[bytes | memoryview]:
    yield header
    for (name, shape), (given, values) in zip(shapes.items(), tensors, strict=True):
        if given != name or values.shape != shape:
            raise errors.CheckpointError(f"got tensor {given} of {values.shape}, expected {name} of {shape}")
        yield np.ascontiguousarray(values, dtype="<f4").reshape(-1).data.cast("B")


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return safetensors' head: its length in 8 bytes, then JSON, padded so that the data is aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
