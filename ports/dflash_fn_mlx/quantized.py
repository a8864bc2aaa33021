"""Matrices in mlx's quantised formats: how they are read, made, joined and cut; `ops` multiplies with them.

A matrix of a checkpoint is quantised where `scales` lie beside it, and the shapes tell its format. What config.json
says of formats, for all matrices or for one, adds nothing to that and is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import mlx.core as mx

from dflash_fn import errors
from dflash_fn.checkpoint import Reader

__all__ = ["Matrix", "Quantized", "check_bits", "join", "quantize", "take_matrix"]

BITS = (2, 3, 4, 5, 6, 8)
"""Of an element, in the format with scales and biases."""

GROUP_SIZES = (64, 32)
"""That `quantize` chooses from: the first that divides a matrix's inputs."""

FLOAT_FORMATS = {(32, 4): "mxfp4", (16, 4): "nvfp4", (32, 8): "mxfp8"}
"""By (group size, bits): the formats that have scales and no biases."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised matrix.

    Attributes:
        packed: [out, in * bits / 32], 32-bit words.
        scales: [out, in / group_size].
        biases: the same, or None in formats that have none.
        group_size: inputs that share a scale.
        bits: of an element.
        mode: `affine`, or one of `FLOAT_FORMATS`.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str


Matrix: TypeAlias = mx.array | Quantized
"""A weight [out, in], plain or quantised."""


def take_matrix(reader: Reader[Any], name: str, outputs: int, inputs: int) -> Matrix:
    """Take a matrix, with its scales and biases where it is quantised.

    Raises:
        CheckpointError: a tensor is missing or of another shape, or the shapes are those of no format.
    """
    if f"{name}.scales" not in reader.tensors or f"{name}.weight" not in reader.tensors:
        return reader.take(f"{name}.weight", outputs, inputs)
    words, groups = (reader.tensors[f"{name}.{part}"].shape[-1] for part in ("weight", "scales"))
    bits, group_size = 32 * words // inputs, inputs // groups
    affine = f"{name}.biases" in reader.tensors
    if (bits not in BITS) if affine else (group_size, bits) not in FLOAT_FORMATS:
        raise errors.CheckpointError(
            f"{reader.name}: {name!r} has {bits} bits in groups of {group_size}, by its shapes; mlx has no such format"
        )
    return Quantized(
        packed=reader.take(f"{name}.weight", outputs, inputs * bits // 32),
        scales=reader.take(f"{name}.scales", outputs, inputs // group_size),
        biases=reader.take(f"{name}.biases", outputs, inputs // group_size) if affine else None,
        group_size=group_size,
        bits=bits,
        mode="affine" if affine else FLOAT_FORMATS[group_size, bits],
    )


def check_bits(name: str, tensors: Mapping[str, mx.array], bits: int) -> None:
    """Raise InputError unless all matrices of a checkpoint can be quantised to `bits`."""
    if bits not in BITS:
        raise errors.InputError(f"{name}: cannot be quantised to {bits!r} bits; mlx has {', '.join(map(str, BITS))}")
    if any(key.endswith(".scales") for key in tensors):
        raise errors.InputError(f"{name}: is quantised already; load it without asking for {bits} bits")
    for key, tensor in sorted(tensors.items()):
        if tensor.ndim > 1 and tensor.shape[-1] % min(GROUP_SIZES):
            raise errors.InputError(
                f"{name}: tensor {key!r} has {tensor.shape[-1]} inputs; "
                f"quantised, they come in groups of {min(GROUP_SIZES)} or more"
            )


def quantize(weight: mx.array, bits: int) -> Quantized:
    """Round a matrix to `bits` an element."""
    size = next(size for size in GROUP_SIZES if weight.shape[-1] % size == 0)
    packed, scales, biases = mx.quantize(weight, group_size=size, bits=bits)
    return Quantized(packed, scales, biases, size, bits, "affine")


def join(weights: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Return one matrix with the outputs of all, if they have one format; else the same ones."""
    plain = [weight for weight in weights if not isinstance(weight, Quantized)]
    if len(plain) == len(weights):
        return (mx.concatenate(plain),)
    same = [weight for weight in weights if isinstance(weight, Quantized)]
    if len({(weight.group_size, weight.bits, weight.mode) for weight in same}) > 1 or plain:
        return weights
    biases = [weight.biases for weight in same if weight.biases is not None]
    packed, scales = mx.concatenate([x.packed for x in same]), mx.concatenate([x.scales for x in same])
    return (replace(same[0], packed=packed, scales=scales, biases=mx.concatenate(biases) if biases else None),)
