"""Attention of a chunk over a cache that already holds the chunk's own K and V."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from jaxtyping import Float, Integer
from torch import Tensor

from dflash_fn.config import LayerKind

__all__ = ["Reach", "Sights", "attend", "mask", "sights"]

MAX_WIDTH = 32
"""Torch's CPU kernel walks short chunks in blocks of 32 queries: up to here, all slots are treated alike."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys a layer's queries see.

    Attributes:
        causal: only keys at or before the query's position.
        window: only keys less than this many positions away; None for no limit.
    """

    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class Sights:
    """What the layers of a model see.

    Attributes:
        reaches: one a layer.
        kinds: of each reach, the kind of its layers, those that do not attend left out.
        numbers: of each layer, the number of its reach in `kinds`; None where it does not attend.
    """

    reaches: tuple[Reach, ...]
    kinds: tuple[tuple[Reach, LayerKind], ...]
    numbers: tuple[int | None, ...]


@functools.lru_cache(maxsize=64)
def sights(kinds: tuple[LayerKind, ...], causal: tuple[bool, ...], window: int | None) -> Sights:
    """Return what layers of these kinds see; the window is that of the layers that slide."""
    reaches = tuple(
        Reach(past, window if kind is LayerKind.SLIDING else None) for kind, past in zip(kinds, causal, strict=True)
    )
    pairs = list(zip(reaches, kinds, strict=True))
    known = tuple(dict.fromkeys(pair for pair in pairs if pair[1] is not LayerKind.DELTA))
    return Sights(reaches, known, tuple(known.index(pair) if pair in known else None for pair in pairs))


def mask(
    reach: Reach,
    starts: Integer[Tensor, " rows"],
    slots: int,
    firsts: Integer[Tensor, " rows"],
    keys: int,
    dtype: torch.dtype,
) -> Float[Tensor, "rows slots keys"]:
    """Return the additive mask (0 or -inf) of a reach, shared by all layers that have it.

    Args:
        reach: what the layers let queries see.
        starts: position of each row's first query.
        slots: queries a row; a layer that is not causal sees the keys of all of them, and of all before.
        firsts: position of each row's first attended key.
        keys: attended slots, at positions that follow each other.
        dtype: of the mask, the model's.
    """
    key = firsts[:, None, None] + torch.arange(keys, device=starts.device)
    query = starts[:, None] + torch.arange(slots, device=starts.device)
    last = query if reach.causal else query[:, -1:]
    seen = (key <= last[:, :, None]).expand(-1, slots, -1)
    if reach.window is not None:
        seen = seen & ((query[:, :, None] - key).abs() < reach.window)
    return torch.where(seen, 0.0, -torch.inf).to(dtype)


def attend(
    q: Float[Tensor, "rows slots heads dim"],
    keys: Float[Tensor, "rows kv_heads capacity dim"],
    values: Float[Tensor, "rows kv_heads capacity dim"],
    firsts: tuple[int, ...],
    mask: Float[Tensor, "rows slots keys"],
) -> Float[Tensor, "rows slots heads*dim"]:
    """Return softmax(q k / sqrt(dim) + mask) v over the slots that the mask is about, from `firsts[r]` on in row r.

    The query heads that share a K/V head become the batch of one kernel call, over K and V expanded without a copy;
    rows are taken one by one, so that a row's bits do not depend on its neighbours. The CPU kernel shares heads out
    among threads, each with products of its own. A single head it does not share out, and then the products themselves
    may be, in another way for each width; so a single head is computed twice.
    """
    rows, slots, heads, dim = q.shape
    kv_heads, length = keys.shape[1], mask.shape[-1]
    group = heads // kv_heads
    copies = 2 if heads == 1 and q.device.type == "cpu" else 1
    out = []
    for row, first in enumerate(firsts):
        part = slice(first, first + length)
        query = q[row].view(slots, kv_heads, group, dim).permute(2, 1, 0, 3).expand(group * copies, -1, -1, -1)
        k = keys[row, :, part].expand(group * copies, kv_heads, length, dim)
        v = values[row, :, part].expand(group * copies, kv_heads, length, dim)
        y = F.scaled_dot_product_attention(query, k, v, attn_mask=mask[row])[:group]
        out.append(y.permute(2, 1, 0, 3).reshape(1, slots, heads * dim))
    return out[0] if rows == 1 else torch.cat(out)
