"""Tensor parallel: each process of a mesh holds an equal share of every layer, and all of them hold the same states.

A share is a smaller model of the same kind: a part of the heads and of the MLP's columns, run by the same decoder under
a spec of its own (`Share.spec`). What the processes say to each other is two sums a layer, after the projections that
bring a share back to the hidden size, and one list of logits. Hidden states, features and logits are whole everywhere,
and so are tokens and verdicts; caches hold a share's own heads alone.

A sum must not depend on where in a message a number stands, or a token's bits would depend on its slot and the contract
(P01) would be lost. A ring's all-reduce adds each part of a message in another order, from three processes on. So each
process fetches all the terms and adds them in the order of the ranks (docs/explanation/several-devices.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from dflash_fn import errors
from dflash_fn.config import DecoderSpec, DeltaSpec
from dflash_fn.records import Model
from dflash_fn_torch.decoder import LayerWeights

__all__ = ["Share", "check_shares", "placement_of"]

COLUMNS = ("o_proj", "down_proj", "out_proj")
"""Projections back to the hidden size: a share has columns of them, and what comes out is summed."""

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias")
"""What a share has rows of: those of its heads, or of its part of the MLP."""

CHANNELS = ("in_proj_qkv", "conv1d")
"""The same, but queries, keys and values lie one after the other, and a share has rows of each."""

Spec = TypeVar("Spec", bound=DecoderSpec)


def placement_of(name: str) -> Placement:
    """Return how DTensor would call what becomes of a tensor: rows or columns for each process, or all for everyone.

    Example:
        >>> placement_of("model.layers.3.mlp.down_proj.weight"), placement_of("model.norm.weight")
        (Shard(dim=1), Replicate())
    """
    *path, kind = name.split(".")
    leaf = path[-1] if kind in ("weight", "bias") else kind
    if leaf in (*ROWS, *CHANNELS):
        return Shard(0)
    return Shard(1) if leaf in COLUMNS and kind == "weight" else Replicate()


def check_shares(role: str, spec: DecoderSpec, count: int) -> None:
    """Raise InputError unless heads and MLP can be shared out equally among `count` processes."""
    sizes = {"key and value heads": spec.num_kv_heads, "MLP columns": spec.intermediate_size}
    if spec.delta is not None:
        sizes |= {"key heads of its gated delta nets": spec.delta.key_heads}
    for what, size in sizes.items():
        if size % count:
            most = math.gcd(*sizes.values())
            fit = [str(number) for number in range(1, most + 1) if most % number == 0]
            raise errors.InputError(
                f"{role}: {count} processes cannot share its {size} {what} equally; "
                f"numbers of processes that can share all of it: {', '.join(fit)}"
            )


@dataclass(frozen=True, slots=True)
class Share:
    """What one process of a mesh holds of its models.

    Attributes:
        mesh: of one dimension, all processes of the world in the order of their ranks.
    """

    mesh: DeviceMesh

    @property
    def count(self) -> int:
        """Processes, and so shares."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """The place of this process among them."""
        return self.mesh.get_local_rank()

    @property
    def device(self) -> str:
        """Where this process computes."""
        kind = self.mesh.device_type
        return kind if kind == "cpu" else f"{kind}:{torch.get_device_module(kind).current_device()}"

    @property
    def layout(self) -> str:
        """The share in words, for `dflash_fn.records.Model`."""
        return f"share {self.rank + 1} of {self.count}"

    def spec(self, spec: Spec) -> Spec:
        """Return the spec of this share; its vocabulary and hidden size are the whole's."""
        return _shared(spec, self.count)

    def model(self, model: Model[Any]) -> Model[Any]:
        """Return a model as its share is run."""
        return replace(model, spec=self.spec(model.spec))

    def vocabulary(self, size: int) -> int:
        """Return how many rows of the head a share has: all of them where they cannot be shared out equally."""
        return size if size % self.count else size // self.count

    def tensors(self, tensors: Mapping[str, Tensor], delta: DeltaSpec | None) -> Mapping[str, Tensor]:
        """Return a view of a checkpoint that shows this share of each tensor, and reads no more than that."""
        return Cut(tensors, functools.partial(self._cut, delta))

    def _cut(self, delta: DeltaSpec | None, name: str, tensor: Tensor) -> Tensor:
        placement = placement_of(name)
        if placement.is_replicate():
            return tensor
        if delta is not None and name.split(".")[-2] in CHANNELS:
            parts = tensor.split([delta.keys, delta.keys, delta.values])
            return torch.cat([self.part(part, placement) for part in parts])
        return self.part(tensor, placement)

    @torch.no_grad()
    def part(self, tensor: Tensor, placement: Placement) -> Tensor:
        """Return this share of a tensor that every process has; nothing is sent."""
        return distribute_tensor(tensor.detach(), self.mesh, [placement], src_data_rank=None).to_local()

    def head(self, head: Tensor, size: int) -> Tensor:
        """Return the rows of a whole head, or of the embedding that is one, that this share has, as a copy."""
        return head if len(head) == self.vocabulary(size) else self.part(head, Shard(0)).clone()

    def summing(self, layers: tuple[LayerWeights, ...]) -> tuple[LayerWeights, ...]:
        """Return layers whose projections back to the hidden size add up what all shares have."""
        return tuple(
            replace(layer, out=replace(layer.out, total=self.total), down=replace(layer.down, total=self.total))
            for layer in layers
        )

    @torch.inference_mode()
    def gathered(self, part: Tensor) -> list[Tensor]:
        """Return what each process has, in the order of ranks; every process must call this."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.count)]
        dist.all_gather(parts, part, group=self.mesh.get_group())
        return parts

    def total(self, term: Tensor) -> Tensor:
        """Return the sum over all processes, added in float32 in the order of ranks and rounded once.

        So it has equal bits in all of them, and equal terms have equal sums in every slot.
        """
        terms = [part.float() for part in self.gathered(term)]
        return functools.reduce(torch.add, terms).to(term.dtype)

    @torch.inference_mode()
    def joined(self, part: Tensor, dim: int) -> Tensor:
        """Return the parts of all processes side by side."""
        return torch.cat(self.gathered(part), dim=dim)

    def logits(self, part: Tensor, size: int) -> Tensor:
        """Return logits over the whole vocabulary, with the same bits in all processes, whatever they run on.

        Where the head is whole in each, they are the first one's: one other bit at a near tie, and the processes would
        go on from different tokens.
        """
        return self.joined(part, -1) if part.shape[-1] < size else self.of_first(part)

    @torch.inference_mode()
    def of_first(self, whole: Tensor) -> Tensor:
        """Return what the process of rank 0 has."""
        sent = whole.contiguous()
        dist.broadcast(sent, group=self.mesh.get_group(), group_src=0)
        return sent


@dataclass(frozen=True, slots=True)
class Cut(Mapping[str, Tensor]):
    """Tensors by name, each cut as it is taken."""

    tensors: Mapping[str, Tensor]
    cut: Callable[[str, Tensor], Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.cut(name, self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@functools.lru_cache(maxsize=64)
def _shared(spec: Spec, count: int) -> Spec:
    delta = spec.delta
    if delta is not None:
        delta = replace(delta, key_heads=delta.key_heads // count, value_heads=delta.value_heads // count)
    return replace(
        spec,
        num_heads=spec.num_heads // count,
        num_kv_heads=spec.num_kv_heads // count,
        intermediate_size=spec.intermediate_size // count,
        delta=delta,
    )
