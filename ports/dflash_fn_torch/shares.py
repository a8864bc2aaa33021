"""Shares of models and of caches: read from whole checkpoints, and gathered into and cut out of whole files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from dflash_fn.config import DraftSpec, TargetSpec
from dflash_fn.records import Model
from dflash_fn.sources import Source
from dflash_fn_torch.sharding import Share
from dflash_fn_torch.weights import read_draft, read_target

__all__ = ["load_draft", "load_target", "own", "whole"]


def load_target(share: Share, source: Source, spec: TargetSpec, dtype: str, kind: torch.dtype) -> Model[TargetSpec]:
    """Read this process's share of a target; the embedding is whole, and the head where it cannot be shared equally."""
    weights = read_target(
        source,
        share.spec(spec),
        kind,
        share.device,
        view=functools.partial(share.tensors, delta=spec.delta),
        head_of=functools.partial(share.head, size=spec.vocab_size),
    )
    weights = replace(weights, layers=share.summing(weights.layers))
    return Model(spec, weights, dtype, share.device, source, share.layout, share.count)


def load_draft(
    share: Share, source: Source, spec: DraftSpec, target: Model[TargetSpec], kind: torch.dtype
) -> Model[DraftSpec]:
    """Read this process's share of a draft; what fuses the context features is whole."""
    view = functools.partial(share.tensors, delta=spec.delta)
    weights = read_draft(source, share.spec(spec), kind, share.device, view=view)
    weights = replace(weights, layers=share.summing(weights.layers))
    return Model(spec, weights, target.dtype, share.device, source, share.layout, share.count)


def whole(share: Share, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arrays of `moves.export` with the heads of all processes; every process must call this."""
    made = {}
    for name, tensor in tensors.items():
        parts = share.gathered(tensor)
        if name.endswith("conv"):
            sections = zip(*(_sections(part, _state_of(tensors, name)) for part in parts), strict=True)
            made[name] = torch.cat([torch.cat(section, dim=-1) for section in sections], dim=-1)
        else:
            made[name] = torch.cat(parts, dim=_heads(name))
    return made


def own(share: Share, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what of such arrays this process holds."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("conv"):
            sections = _sections(tensor, _state_of(tensors, name))
            made[name] = torch.cat([share.part(section, Shard(1)) for section in sections], dim=-1)
        else:
            made[name] = share.part(tensor, Shard(_heads(name)))
    return made


def _heads(name: str) -> int:
    """Return which dimension counts heads: [length, heads, dim] of keys and values, [heads, ...] of states."""
    return 0 if name.endswith("recurrent") else 1


def _state_of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return tensors[name.removesuffix("conv") + "recurrent"]


def _sections(conv: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    """Split a convolution's channels into those of queries, keys and values, each of which has its own heads."""
    values = state.shape[0] * state.shape[2]
    keys = (conv.shape[-1] - values) // 2
    return conv.split([keys, keys, values], dim=-1)
