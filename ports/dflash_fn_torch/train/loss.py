"""The draft's loss: slots weigh less the further they are from the anchor, as fewer of them are ever reached."""

from __future__ import annotations

import torch
from jaxtyping import Float, Integer
from torch import Tensor

__all__ = ["block_loss", "leading_matches", "slot_weights"]


def slot_weights(drafted: int, gamma: float) -> Float[Tensor, " drafted"]:
    """Return exp(-(k - 1) / gamma) for the slots k = 1 and on.

    Source:
        arXiv 2602.06036, section 4: gamma 4, 5 and 7 for blocks of 8, 10 and 16.
    """
    return torch.exp(-torch.arange(drafted) / gamma)


def block_loss(
    logits: Float[Tensor, "slots candidates"],
    labels: Integer[Tensor, " slots"],
    weights: Float[Tensor, " slots"],
    *,
    teacher: Float[Tensor, "slots candidates"] | None,
    kl: float,
) -> tuple[Tensor, float]:
    """Return the weighted mean of (1 - kl) * cross-entropy + kl * KL(target || draft).

    Args:
        logits: of the draft, a row a slot.
        labels: which candidate the text has there.
        weights: of the slots; 0 where the text has no token.
        teacher: the target's logits there; None where `kl` is 0.
        kl: share of the distillation.

    Returns:
        The loss, and the share of the weight whose most probable candidate is the label.
    """
    total = weights.sum().clamp_min(1e-9)
    log_q = torch.log_softmax(logits.float(), dim=-1)
    loss = -(1.0 - kl) * log_q.gather(1, labels[:, None])[:, 0]
    if teacher is not None and kl:
        log_p = torch.log_softmax(teacher.float(), dim=-1)
        loss = loss + kl * (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    right = (logits.detach().argmax(dim=-1) == labels).float()
    return (loss * weights).sum() / total, float((right * weights).sum() / total)


def leading_matches(
    guess: Integer[Tensor, "blocks drafted"], labels: Integer[Tensor, "blocks drafted"]
) -> Integer[Tensor, " blocks"]:
    """Return how many drafted tokens of each block are right before the first that is not."""
    return (guess == labels).long().cumprod(dim=1).sum(dim=1)
