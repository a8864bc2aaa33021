"""The few operations that layers are made of. Every one treats the tokens of a chunk alike and apart."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from jaxtyping import Float, Integer

from dflash_fn.config import RopeSpec
from dflash_fn.records import Model
from dflash_fn.rope import rope_tables
from dflash_fn_mlx.quantized import Matrix, Quantized

__all__ = [
    "Projection",
    "dtype_of",
    "embed",
    "gated_mlp",
    "product",
    "project",
    "rms_norm",
    "rope_at",
    "rotate",
    "silu",
]


@dataclass(frozen=True, slots=True)
class Projection:
    """One or several weight matrices that are applied to the same input, their outputs side by side.

    Attributes:
        weights: [out_i, in] each; one fused matrix where the weights were read from files in one format, else several
            (a model in memory keeps its own: fusing those would double its memory).
        bias: [sum of out_i] or None.
    """

    weights: tuple[Matrix, ...]
    bias: mx.array | None = None


def product(x: Float[mx.array, "tokens inputs"], weight: Matrix, groups: int = 1) -> Float[mx.array, "tokens outputs"]:
    """Return x @ weight.T.

    On a CPU in float32 the product is taken as (weight @ x.T).T, with x.T laid out anew: what the Linux build comes
    with walks that twice as fast (docs/notes/mlx-bits.md).

    Args:
        x: a token a row.
        weight: as checkpoints store it.
        groups: equal parts of x to multiply apart, so that each has the bits that it has alone.
    """
    if groups > 1:
        return mx.concatenate([product(part, weight) for part in mx.split(x, groups)])
    if isinstance(weight, Quantized):
        return mx.quantized_matmul(
            x, weight.packed, weight.scales, weight.biases,
            transpose=True, group_size=weight.group_size, bits=weight.bits, mode=weight.mode,
        )  # fmt: skip
    if x.dtype == mx.float32 and x.shape[0] > 1 and mx.default_device() == mx.cpu:
        return (weight @ mx.contiguous(x.T)).T
    return x @ weight.T


def dtype_of(model: Model[Any]) -> mx.Dtype:
    """Return the dtype that a model runs in, whatever its matrices are stored as."""
    return getattr(mx, model.dtype)


def embed(
    tokens: Integer[mx.array, "rows slots"], table: Matrix, dtype: mx.Dtype
) -> Float[mx.array, "rows*slots hidden"]:
    """Look tokens up; only their rows of a quantised table are dequantised."""
    ids = tokens.reshape(-1)
    if not isinstance(table, Quantized):
        return table[ids]
    biases = None if table.biases is None else table.biases[ids]
    rows = mx.dequantize(
        table.packed[ids], table.scales[ids], biases,
        group_size=table.group_size, bits=table.bits, mode=table.mode,
    )  # fmt: skip
    return rows.astype(dtype)


def project(
    x: Float[mx.array, "tokens inputs"], projection: Projection, groups: int = 1
) -> Float[mx.array, "tokens outputs"]:
    """Apply a projection to a token a row."""
    parts = [product(x, weight, groups) for weight in projection.weights]
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
    return y if projection.bias is None else y + projection.bias


def rms_norm(
    x: Float[mx.array, "*batch size"], weight: Float[mx.array, "*parts size"], eps: float
) -> Float[mx.array, "*batch size"]:
    """Return x / sqrt(mean(x^2) + eps) * weight, the mean in float32.

    The weight is applied in its own dtype: in x's as Llama does it, or in float32 as Qwen3.5 does.
    """
    return (mx.fast.rms_norm(x.astype(weight.dtype), None, eps) * weight).astype(x.dtype)


def rotate(
    x: Float[mx.array, "rows slots heads dim"],
    cos: Float[mx.array, "rows slots 1 turned"],
    sin: Float[mx.array, "rows slots 1 turned"],
) -> Float[mx.array, "rows slots heads dim"]:
    """Turn each pair (x[i], x[i + turned / 2]) by its angle; `sin` holds -sin in its first half."""
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return mx.concatenate([rotate(x[..., :turned], cos, sin), x[..., turned:]], axis=-1)
    return x * cos + mx.roll(x, turned // 2, -1) * sin


def silu(x: Float[mx.array, "*batch"]) -> Float[mx.array, "*batch"]:
    """Return x / (1 + exp(-x))."""
    return x * mx.sigmoid(x)


def gated_mlp(
    x: Float[mx.array, "tokens hidden"], gate_up: Projection, down: Projection, groups: int
) -> Float[mx.array, "tokens hidden"]:
    """Return down(silu(gate(x)) * up(x))."""
    gate, up = mx.split(project(x, gate_up, groups), 2, axis=-1)
    return project(gate * mx.sigmoid(gate) * up, down, groups)


def rope_at(
    rope: RopeSpec, starts: tuple[int, ...], slots: int, dtype: mx.Dtype
) -> tuple[Float[mx.array, "rows slots 1 dim"], Float[mx.array, "rows slots 1 dim"]]:
    """Return cos and sin of the positions from `starts[r]` on, [R, S, 1, dim] each, in the form that `rotate` takes."""
    cos, sin = _rope_table(rope, 1 << max(10, (max(starts) + slots - 1).bit_length()), dtype)
    if len(starts) == 1:
        (first,) = starts
        return cos[None, first : first + slots, None], sin[None, first : first + slots, None]
    rows = [slice(first, first + slots) for first in starts]
    return mx.stack([cos[row] for row in rows])[:, :, None], mx.stack([sin[row] for row in rows])[:, :, None]


@functools.lru_cache(maxsize=16)
def _rope_table(rope: RopeSpec, positions: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Hand the host's float32 tables to mlx, [positions, dim] each; a memo of a function of the arguments."""
    cos, sin = rope_tables(rope, np.arange(positions))
    both, signed = np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)
    tables = mx.array(both).astype(dtype), mx.array(signed).astype(dtype)
    mx.eval(tables)  # now, so that every thread may use them
    return tables
