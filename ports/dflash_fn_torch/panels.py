"""Weights in the layout of our own kernels, and their product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from jaxtyping import Float
from torch import Tensor

from dflash_fn_torch.native import KINDS, library

__all__ = ["Panels", "in_panels", "panel_product"]


@dataclass(frozen=True, eq=False, slots=True)
class Panels:
    """A matrix cut into panels of outputs, each laid out input by input, as the kernels walk it.

    Attributes:
        data: [panels, inputs, outputs of a panel]; zeros where the last panel is not full.
        outputs: rows of the matrix.
    """

    data: Float[Tensor, "panels inputs lanes"]
    outputs: int


def in_panels(weight: Float[Tensor, "outputs inputs"]) -> Panels:
    """Lay a matrix out in panels."""
    outputs, inputs = weight.shape
    lanes: int = library().dflash_panel()
    padded = F.pad(weight.detach(), (0, 0, 0, -outputs % lanes))
    return Panels(padded.view(-1, lanes, inputs).transpose(1, 2).contiguous(), outputs)


def panel_product(
    x: Float[Tensor, "tokens inputs"],
    weight: Panels,
    norm: Float[Tensor, " inputs"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "tokens outputs"]:
    """Return x @ weight.T, summed in float32, in x's dtype.

    Args:
        x: a token a row.
        weight: the matrix.
        norm: weight of an RMS norm that tokens go through first, in float32; None without one.
        eps: of the norm.

    Guarantees:
        A token has the same bits in every slot, and beside any number of others (P01).
    """
    given = x.float().contiguous()
    made = torch.empty((len(x), weight.outputs), dtype=torch.float32)
    scale, normed = (None, None) if norm is None else (norm.float().contiguous(), torch.empty_like(given))
    library().dflash_product(
        weight.data.data_ptr(),
        KINDS.index(weight.data.dtype),
        weight.outputs,
        x.shape[1],
        given.data_ptr(),
        len(x),
        made.data_ptr(),
        None if scale is None else scale.data_ptr(),
        eps,
        None if normed is None else normed.data_ptr(),
        torch.get_num_threads(),
    )
    return made.to(x.dtype)
