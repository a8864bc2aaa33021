"""What steps of all tasks have in common: gradients, their norm, clipping, and the update."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dflash_fn_torch.train.optimiser import Optimiser

__all__ = ["autocast", "gradients", "moved"]


def autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[object]:
    """Take products in a shorter dtype where that is asked for; weights, sums and losses stay float32."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def gradients(loss: Tensor, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Return gradients by name and the norm of all together; weights that the loss does not depend on have zeros."""
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    grads = {
        name: torch.zeros_like(weight) if grad is None else grad
        for (name, weight), grad in zip(weights.items(), found, strict=True)
    }
    norms = [torch.linalg.vector_norm(grad) for grad in grads.values()]
    return grads, float(torch.linalg.vector_norm(torch.stack(norms)))


def moved(
    optimiser: Optimiser,
    weights: Mapping[str, Tensor],
    grads: dict[str, Tensor],
    norm: float,
    loss: float,
    index: int,
    rate: float,
) -> None:
    """Clip, and move the weights; leave them alone where loss or norm is not finite."""
    if not (math.isfinite(norm) and math.isfinite(loss)):
        return
    if norm > optimiser.options.clip:
        grads = {name: grad * (optimiser.options.clip / norm) for name, grad in grads.items()}
    optimiser.move(weights, grads, index, rate)
