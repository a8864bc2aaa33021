"""The few operations that layers are made of. Every one treats the tokens of a chunk alike and apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from jaxtyping import Float
from torch import Tensor

__all__ = ["Projection", "gated_mlp", "product", "project", "rms_norm", "rope_tensors", "rotate"]


@dataclass(frozen=True, slots=True)
class Projection:
    """One or several weight matrices that are applied to the same input, their outputs side by side.

    Attributes:
        weights: [out_i, in] each; one fused matrix where the weights were read from files, several where they
            belong to a model in memory (fusing those would double its memory).
        bias: [sum of out_i] or None.
    """

    weights: tuple[Tensor, ...]
    bias: Tensor | None = None


def product(
    x: Float[Tensor, "tokens inputs"], weight: Float[Tensor, "outputs inputs"], groups: int = 1
) -> Float[Tensor, "tokens outputs"]:
    """Return x @ weight.T.

    On a CPU in float32 the product is taken as (weight @ x.T).T: with the weight on the left, the kernels walk it
    once for all tokens, and eight tokens cost little more than one (docs/notes/cpu-products.md).

    Args:
        x: a token a row.
        weight: as checkpoints store it.
        groups: equal parts of x to multiply apart, so that each has the bits that it has alone.
    """
    if groups > 1:
        return torch.cat([product(part, weight) for part in x.chunk(groups)])
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] > 1:
        return torch.mm(weight, x.t()).t()
    return F.linear(x, weight)


def project(
    x: Float[Tensor, "tokens inputs"], projection: Projection, groups: int = 1
) -> Float[Tensor, "tokens outputs"]:
    """Apply a projection to a token a row."""
    parts = [product(x, weight, groups) for weight in projection.weights]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return y if projection.bias is None else y + projection.bias


def rms_norm(
    x: Float[Tensor, "*batch size"], weight: Float[Tensor, "*parts size"], eps: float
) -> Float[Tensor, "*batch size"]:
    """Return x / sqrt(mean(x^2) + eps) * weight, the mean in float32, the weight applied in x's dtype as Llama does."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return h.to(x.dtype) * weight


def rotate(
    x: Float[Tensor, "rows slots heads dim"],
    cos: Float[Tensor, "rows slots 1 dim"],
    sin: Float[Tensor, "rows slots 1 dim"],
) -> Float[Tensor, "rows slots heads dim"]:
    """Turn each pair (x[i], x[i + dim / 2]) by its angle; `sin` holds -sin in its first half."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def gated_mlp(
    x: Float[Tensor, "tokens hidden"], gate_up: Projection, down: Projection, groups: int
) -> Float[Tensor, "tokens hidden"]:
    """Return down(silu(gate(x)) * up(x))."""
    gate, up = project(x, gate_up, groups).chunk(2, dim=-1)
    return project(F.silu(gate) * up, down, groups)


def rope_tensors(
    cos: Float[np.ndarray, "rows slots half"],
    sin: Float[np.ndarray, "rows slots half"],
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, Tensor]:
    """Hand numpy's float32 tables to torch in the form that `rotate` takes: [R, S, 1, dim] each."""
    c = torch.from_numpy(cos)[:, :, None]
    s = torch.from_numpy(sin)[:, :, None]
    return torch.cat([c, c], -1).to(device, dtype), torch.cat([-s, s], -1).to(device, dtype)
