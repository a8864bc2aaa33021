"""A closed form to start a draft from, where weights of the target cannot be copied or lead nowhere.

From random weights the loss stays for thousands of blocks near what token frequencies alone explain. Here the first
layer's attention is set to look at the nearest tokens before a slot, and its values and outputs to the linear map, of
the rank that a head allows, that best predicts the target's final hidden state from what this attention sees. All other
layers begin silent. See docs/notes/training.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dflash_fn.config import DraftSpec
from dflash_fn_torch.ops import rms_norm
from dflash_fn_torch.train.forward import context_of, first_attention

__all__ = ["Sample", "ridge_start"]

SHARPNESS = 1.5
"""Weight of the query norm: how much nearer tokens are preferred."""

RIDGE = 1e-2
"""Share of the mean variance that is added to every direction."""

MASKS = 100.0
"""How many tokens the mask token counts for where keys are fitted."""

FIRST = "layers.0.self_attn"


@dataclass(frozen=True, slots=True)
class Sample:
    """Blocks of texts, with what the target makes of them.

    Attributes:
        features: [S, T, L * H].
        block: [S, N, B, H] embeddings.
        anchors: [S, N].
        final: [S, N, B - 1, H] final hidden states of the target at the positions that predict each slot.
        counts: [S, N, B - 1] whether the text has a token there.
    """

    features: Float[Tensor, "texts length tapped"]
    block: Float[Tensor, "texts blocks slots hidden"]
    anchors: Integer[Tensor, "texts blocks"]
    final: Float[Tensor, "texts blocks drafted hidden"]
    counts: Bool[Tensor, "texts blocks drafted"]


@torch.no_grad()
def ridge_start(spec: DraftSpec, weights: dict[str, Tensor], sample: Sample) -> dict[str, Tensor]:
    """Return weights whose first layer is the closed form, fitted to a sample."""
    hidden, made = spec.hidden_size, dict(weights)
    latest = max(range(len(spec.target_layer_ids)), key=lambda i: spec.target_layer_ids[i])
    made["fc.weight"] = torch.zeros_like(weights["fc.weight"])
    made["fc.weight"][:, latest * hidden : (latest + 1) * hidden] = torch.eye(hidden)
    made |= _keys_and_queries(spec, made, sample)
    seen = _seen(spec, made, sample)[sample.counts]
    wanted = sample.final[sample.counts]
    made |= _values_and_outputs(spec, weights, seen, wanted - sample.block[0, 0, 1])
    made["norm.weight"] = torch.full_like(weights["norm.weight"], float(wanted.square().mean().sqrt()))
    return made


def _keys_and_queries(spec: DraftSpec, weights: dict[str, Tensor], sample: Sample) -> dict[str, Tensor]:
    """Let every token's key point one way and the mask token's the other: what is left to score is the distance."""
    mask = _normed(spec, sample.block[0, 0, 1])
    anchors = _normed(spec, sample.block[:, :, 0].flatten(0, 1))
    past = context_of(spec, weights, sample.features).flatten(0, 1)
    tokens = torch.cat([anchors, past[past.abs().sum(dim=1) > 0]])
    rows, signs = torch.cat([tokens, mask[None] * MASKS]), torch.ones(len(tokens) + 1)
    signs[-1] = -MASKS
    direction = _solve(rows, signs[:, None])[:, 0]
    made = {f"{FIRST}.q_norm.weight": torch.full((spec.head_dim,), SHARPNESS)}
    made[f"{FIRST}.k_proj.weight"] = direction.expand(spec.num_kv_heads * spec.head_dim, -1).clone()
    q = weights[f"{FIRST}.q_proj.weight"].clone()
    # the first query head of each group carries the closed form; the others are free to become something else
    for head in range(0, spec.num_heads, spec.num_heads // spec.num_kv_heads):
        q[head * spec.head_dim : (head + 1) * spec.head_dim] = mask / mask.square().sum()
    return made | {f"{FIRST}.q_proj.weight": q}


def _normed(spec: DraftSpec, x: Tensor) -> Tensor:
    return rms_norm(x, torch.ones(x.shape[-1]), spec.norm_eps)


def _seen(spec: DraftSpec, weights: dict[str, Tensor], sample: Sample) -> Tensor:
    """Return what the attention of the first layer mixes, of all H inputs: as many at a time as heads have room for."""
    size, dim = spec.num_kv_heads * spec.head_dim, spec.head_dim
    out = torch.zeros(spec.hidden_size, spec.num_heads * dim)
    groups = spec.num_heads // spec.num_kv_heads
    places = [head * groups * dim + i for head in range(spec.num_kv_heads) for i in range(dim)]
    parts = []
    for first in range(0, spec.hidden_size, size):
        some = torch.zeros(size, spec.hidden_size)
        count = min(size, spec.hidden_size - first)
        some[:count, first : first + count] = torch.eye(count)
        pick = torch.zeros_like(out)
        pick[torch.arange(count), torch.tensor(places[:count])] = 1.0
        parts.append(
            first_attention(spec, weights | _named(some, pick), sample.features, sample.block, sample.anchors)[
                ..., :count
            ]
        )
    return torch.cat(parts, dim=-1)[:, :, 1:]


def _named(values: Tensor, outputs: Tensor) -> dict[str, Tensor]:
    return {f"{FIRST}.v_proj.weight": values, f"{FIRST}.o_proj.weight": outputs}


def _values_and_outputs(spec: DraftSpec, weights: dict[str, Tensor], seen: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    """Fit wanted = W seen, and split W, cut to the rank that there is room for, into values and outputs."""
    full = _solve(seen, wanted)
    made = seen @ full
    _, vectors = torch.linalg.eigh(made.T @ made)
    size, dim = spec.num_kv_heads * spec.head_dim, spec.head_dim
    rank = min(size, spec.hidden_size)
    best = vectors[:, -rank:]
    values, outputs = torch.zeros(size, spec.hidden_size), torch.zeros_like(weights[f"{FIRST}.o_proj.weight"])
    values[:rank] = (full @ best).T
    for head in range(spec.num_kv_heads):
        place, own = head * (spec.num_heads // spec.num_kv_heads) * dim, best[:, head * dim : (head + 1) * dim]
        outputs[:, place : place + own.shape[1]] = own
    return _named(values, outputs)


def _solve(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return the ridge solution X of inputs X = outputs, in float64 inside."""
    a, b = inputs.double(), outputs.double()
    square = a.T @ a
    square.diagonal().add_(RIDGE * float(square.diagonal().mean()))
    return torch.linalg.solve(square, a.T @ b).float()
