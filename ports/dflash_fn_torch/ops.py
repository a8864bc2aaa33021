"""The few operations that layers are made of. Every one treats the tokens of a chunk alike and apart."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from jaxtyping import Float
from torch import Tensor

from dflash_fn.config import RopeSpec
from dflash_fn.rope import rope_tables
from dflash_fn_torch.panels import Panels, panel_product

__all__ = [
    "Projection",
    "gated_mlp",
    "has_bfloat16_units",
    "normed_product",
    "normed_project",
    "pack",
    "product",
    "project",
    "rms_norm",
    "rope_at",
    "rope_tables_to",
    "rotate",
    "sigmoid",
    "silu",
    "softplus",
]

LINEAR_FROM = 20.0
"""From here on softplus is the identity, as it is in torch."""

TYPICAL_TOKENS = 8
"""What oneDNN is told of the number of tokens when it lays out a weight; any number works."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One or several weight matrices that are applied to the same input, their outputs side by side.

    Attributes:
        weights: [out_i, in] each, as `pack` or `panels.in_panels` returns them; one fused matrix wherever they are
            copied anyway, several where they belong to a model in memory and are used in place.
        bias: [sum of out_i] or None.
        total: makes of a product over a share of the inputs the whole one, before the bias; None where all are here.
    """

    weights: tuple[Tensor | Panels, ...]
    bias: Tensor | None = None
    total: Callable[[Tensor], Tensor] | None = None


def product(
    x: Float[Tensor, "tokens inputs"], weight: Float[Tensor, "outputs inputs"] | Panels, groups: int = 1
) -> Float[Tensor, "tokens outputs"]:
    """Return x @ weight.T.

    Args:
        x: a token a row.
        weight: as `pack` or `panels.in_panels` returned it.
        groups: equal parts of x to multiply apart, so that each has the bits that it has alone.
    """
    if isinstance(weight, Panels):
        return panel_product(x, weight)
    if groups > 1:
        return torch.cat([product(part, weight) for part in x.chunk(groups)])
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] > 1:
        return _turned(x, weight)
    return F.linear(x, weight)


def normed_product(
    x: Float[Tensor, "tokens inputs"],
    norm: Float[Tensor, " inputs"],
    eps: float,
    weight: Float[Tensor, "outputs inputs"] | Panels,
    groups: int = 1,
) -> Float[Tensor, "tokens outputs"]:
    """Return rms_norm(x) @ weight.T; our own kernels do it in one call, and round nothing in between."""
    if isinstance(weight, Panels):
        return panel_product(x, weight, norm, eps)
    return product(rms_norm(x, norm, eps), weight, groups)


def _turned(x: Float[Tensor, "tokens inputs"], weight: Float[Tensor, "outputs inputs"]) -> Tensor:
    """Take the product with the weight on the left.

    The kernel sums what is left over after whole groups of four tokens in another order, and inputs that lie column by
    column too: it gets neither. Nor do later operations, which would treat the last elements of such a layout apart.
    """
    rest = -x.shape[0] % 4 if x.shape[0] > 4 else 0
    return torch.mm(weight, F.pad(x, (0, 0, 0, rest)).contiguous().t()).t()[: x.shape[0]].contiguous()


def pack(weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """Return a weight in the layout in which `product` is fastest.

    On a CPU that is oneDNN's blocked layout where it has one for the dtype: eight tokens then cost little more than
    one (docs/notes/cpu-products.md). Else it is the weight itself, and on a CPU in float32 the product is taken with
    the weight on the left, which many processors walk faster.
    """
    if weight.device.type != "cpu" or not packs(weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_TOKENS)


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), TYPICAL_TOKENS)
    except (AttributeError, RuntimeError):
        return False
    return True


def has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 by instructions of its own; True too where torch does not know."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    known = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(ask is None or ask() for ask in known)


def project(
    x: Float[Tensor, "tokens inputs"], projection: Projection, groups: int = 1
) -> Float[Tensor, "tokens outputs"]:
    """Apply a projection to a token a row."""
    parts = [product(x, weight, groups) for weight in projection.weights]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    if projection.total is not None:
        y = projection.total(y)
    return y if projection.bias is None else y + projection.bias


def normed_project(
    x: Float[Tensor, "tokens inputs"],
    norm: Float[Tensor, " inputs"],
    eps: float,
    projection: Projection,
    groups: int = 1,
) -> Float[Tensor, "tokens outputs"]:
    """Apply a norm and then a projection; in one call where `normed_product` does so."""
    first, *rest = projection.weights
    if rest or not isinstance(first, Panels):
        return project(rms_norm(x, norm, eps), projection, groups)
    y = panel_product(x, first, norm, eps)
    return y if projection.bias is None else y + projection.bias


def rms_norm(
    x: Float[Tensor, "*batch size"], weight: Float[Tensor, "*parts size"], eps: float
) -> Float[Tensor, "*batch size"]:
    """Return x / sqrt(mean(x^2) + eps) * weight, the mean in float32.

    The weight is applied in its own dtype: in x's as Llama does it, or in float32 as Qwen3.5 does.
    """
    if x.dtype == torch.float32 and weight.dim() == 1:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps).to(weight.dtype) * weight).to(x.dtype)


def rotate(
    x: Float[Tensor, "rows slots heads dim"],
    cos: Float[Tensor, "rows slots 1 turned"],
    sin: Float[Tensor, "rows slots 1 turned"],
) -> Float[Tensor, "rows slots heads dim"]:
    """Turn each pair (x[i], x[i + turned / 2]) by its angle; `sin` holds -sin in its first half."""
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rotate(x[..., :turned], cos, sin), x[..., turned:]], dim=-1)
    return x * cos + x.roll(turned // 2, dims=-1) * sin


def sigmoid(x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return 1 / (1 + exp(-x)).

    In float32 torch's own, `F.softplus` and `F.silu` have other bits in the last elements of an array than in those
    before; exp, log1p and sums have the same everywhere.
    """
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return x / (1 + exp(-x))."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return log(1 + exp(x)), which is x where that is large."""
    return torch.where(x > LINEAR_FROM, x, torch.log1p(torch.exp(x.clamp(max=LINEAR_FROM))))


def gated_mlp(
    x: Float[Tensor, "tokens hidden"], gate_up: Projection, down: Projection, groups: int
) -> Float[Tensor, "tokens hidden"]:
    """Return down(silu(gate(x)) * up(x))."""
    gate, up = project(x, gate_up, groups).chunk(2, dim=-1)
    return project(F.silu(gate) * up, down, groups)


def rope_at(
    rope: RopeSpec, starts: tuple[int, ...], slots: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the positions from `starts[r]` on, [R, S, 1, dim] each, in the form that `rotate` takes."""
    cos, sin = rope_tables_to(rope, max(starts) + slots, dtype, device)
    if len(starts) == 1:
        (first,) = starts
        return cos[None, first : first + slots, None], sin[None, first : first + slots, None]
    rows = [slice(first, first + slots) for first in starts]
    return torch.stack([cos[row] for row in rows])[:, :, None], torch.stack([sin[row] for row in rows])[:, :, None]


def rope_tables_to(rope: RopeSpec, end: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return tables of cos and sin, [positions, dim] each, for all positions below `end` and more."""
    return _rope_table(rope, 1 << max(10, (end - 1).bit_length()), dtype, device)


@functools.lru_cache(maxsize=16)
def _rope_table(rope: RopeSpec, positions: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Hand the host's float32 tables to torch, [positions, dim] each; a memo of a function of the arguments."""
    cos, sin = (torch.from_numpy(table) for table in rope_tables(rope, np.arange(positions)))
    return torch.cat([cos, cos], -1).to(device, dtype), torch.cat([-sin, sin], -1).to(device, dtype)
