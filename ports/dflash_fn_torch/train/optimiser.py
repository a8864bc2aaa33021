"""AdamW, and Muon for matrices, as plain functions over named tensors: what a checkpoint holds is what there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_fn.train.options import FitOptions

__all__ = ["Optimiser", "new", "orthogonal"]

EPS = 1e-8
ADAM_SHARE = 0.1
"""AdamW's rate where Muon has the matrices, as a share of Muon's."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x -> a x + b x^3 + c x^5, which takes singular values of 0 to 1 near 1 in five rounds."""


@dataclass(frozen=True, slots=True)
class Optimiser:
    """Moments of the gradients, changed in place by `move`.

    Attributes:
        options: of the fit.
        first: first moments by name.
        second: second moments by name; none for matrices that Muon moves.
    """

    options: FitOptions
    first: dict[str, Tensor]
    second: dict[str, Tensor]

    @torch.no_grad()
    def move(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], index: int, rate: float) -> None:
        """Move weights by one step."""
        share = ADAM_SHARE if self.options.optimiser == "muon" else 1.0
        for name, weight in weights.items():
            if name in self.second:
                self._adam(weight, grads[name], self.first[name], self.second[name], index, rate * share)
            else:
                self._muon(weight, grads[name], self.first[name], rate)

    def _adam(self, weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, index: int, rate: float) -> None:
        low, high = self.options.betas
        first.lerp_(grad, 1.0 - low)
        second.mul_(high).addcmul_(grad, grad, value=1.0 - high)
        root = second.sqrt().div_((1.0 - high ** (index + 1)) ** 0.5).add_(EPS)
        if self.options.weight_decay and weight.dim() > 1:
            weight.mul_(1.0 - rate * self.options.weight_decay)
        weight.addcdiv_(first, root, value=-rate / (1.0 - low ** (index + 1)))

    def _muon(self, weight: Tensor, grad: Tensor, momentum: Tensor, rate: float) -> None:
        beta = self.options.betas[0]
        momentum.lerp_(grad, 1.0 - beta)
        update = orthogonal(grad.lerp(momentum, beta))
        weight.mul_(1.0 - rate * self.options.weight_decay)
        weight.add_(update, alpha=-rate * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)


def new(options: FitOptions, weights: Mapping[str, Tensor]) -> Optimiser:
    """Return moments of zero. Muon takes the matrices inside layers; all else is AdamW's."""
    muon = {
        name
        for name, weight in weights.items()
        if options.optimiser == "muon" and weight.dim() == 2 and "layers." in name
    }
    first = {name: torch.zeros_like(weight, requires_grad=False) for name, weight in weights.items()}
    second = {name: torch.zeros_like(first[name]) for name in weights if name not in muon}
    return Optimiser(options, first, second)


def orthogonal(matrix: Tensor, rounds: int = 5) -> Tensor:
    """Return roughly U V^T of a matrix U S V^T.

    Source:
        Jordan 2024, "Muon: an optimizer for hidden layers in neural networks": its coefficients and its five rounds.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = a * x + torch.addmm(square, square, square, beta=b, alpha=c) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
