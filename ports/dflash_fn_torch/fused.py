"""Runs of whole layers as single calls of our own kernels: attention, sliding or not, and a gated MLP."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_fn.config import DecoderSpec
from dflash_fn_torch import native
from dflash_fn_torch.attention import Reach
from dflash_fn_torch.ops import Projection
from dflash_fn_torch.panels import Panels

__all__ = ["Fused", "Run", "fuse", "fuse_context", "fused_layers", "place_context", "runs"]


@dataclass(frozen=True, eq=False, slots=True)
class Fused:
    """A layer's weights as the kernels take them.

    Attributes:
        layer: sizes and pointers.
        held: the tensors that they point to.
    """

    layer: native.Layer
    held: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """What the layers with one reach share in a pass.

    Attributes:
        call: sizes and pointers.
        reach: which keys queries see.
        held: what they point to.
    """

    call: native.Pass
    reach: native.Reach
    held: tuple[object, ...]


def fuse(spec: DecoderSpec, projections: Iterable[Projection], norms: Iterable[Tensor | None]) -> Fused | None:
    """Prepare a layer of attention; None where the kernels lack a part of it, and it runs part by part.

    Args:
        spec: the model's.
        projections: qkv, out, gate_up and down.
        norms: input_norm, qk_norm and post_norm.
    """
    matrices, biases = zip(*((p.weights, p.bias) for p in projections), strict=True)
    whole = [weights[0] for weights in matrices if len(weights) == 1 and isinstance(weights[0], Panels)]
    if spec.output_gate or len(whole) < len(matrices) or any(bias is not None for bias in biases):
        return None
    data = [panels.data for panels in whole]
    scales = [None if norm is None else norm.detach().float().contiguous() for norm in norms]
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (*data, *scales)]
    sizes = spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
    layer = native.Layer(*pointers, *sizes, spec.norm_eps, native.KINDS.index(data[0].dtype))
    return Fused(layer, tuple(tensor for tensor in (*data, *scales) if tensor is not None))


def fuse_context(spec: DecoderSpec, weight: Tensor | Panels, norm: Tensor | None) -> tuple[Fused, ...] | None:
    """Prepare what a draft does with each layer's keys and values of the context; None where that is not for us.

    Args:
        spec: the draft's.
        weight: that makes keys and values of all layers.
        norm: [layers * kv_heads, dim], the key heads' norm weights.
    """
    if not isinstance(weight, Panels):
        return None
    scales = (None,) * spec.num_layers if norm is None else norm.detach().float().contiguous().chunk(spec.num_layers)
    sizes = spec.hidden_size, spec.intermediate_size, 0, spec.num_kv_heads, spec.head_dim
    kind = native.KINDS.index(weight.data.dtype)
    layers = []
    for scale in scales:
        pointers = (None,) * 5 + (None if scale is None else scale.data_ptr(), None)
        layer = native.Layer(*pointers, *sizes, spec.norm_eps, kind)
        layers.append(Fused(layer, () if scale is None else (scale,)))
    return tuple(layers)


def runs(
    weights: Fused,
    claims: Sequence[tuple[Reach, tuple[int, ...], int]],
    positions: tuple[int, ...],
    slots: int,
    cos: Float[Tensor, "positions turned"],
    sin: Float[Tensor, "positions turned"],
) -> tuple[Run, ...]:
    """Prepare a pass; returns one run a claim.

    Args:
        weights: of any of the layers.
        claims: a reach, the slot of each row's first token in the buffer of its layers, and that buffer's capacity.
        positions: of each row's first token.
        slots: tokens a row.
        cos: a table in float32 that all positions are in.
        sin: the same, as `ops.rotate` takes it.
    """
    kind = ctypes.c_int64 * len(positions)
    rows, threads = kind(*positions), torch.get_num_threads()
    made = []
    for reach, starts, capacity in claims:
        firsts = kind(*starts)
        places, angles = ctypes.addressof(firsts), ctypes.addressof(rows)
        call = native.Pass(len(starts), slots, capacity, cos.shape[-1], places, angles, cos.data_ptr(), sin.data_ptr())
        call.threads = threads
        size = native.library().dflash_work(ctypes.byref(weights.layer), ctypes.byref(call))
        work = torch.empty(size, dtype=torch.float32)
        call.work = work.data_ptr()
        made.append(Run(call, native.Reach(reach.causal, reach.window or 0), (firsts, rows, cos, sin, work)))
    return tuple(made)


def fused_layers(
    layers: Sequence[tuple[Fused, Run, Tensor, Tensor, Tensor | None]], x: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, "tokens hidden"]:
    """Run layers one after another over a chunk, and write their K and V into the slots that the chunk claimed.

    Between layers nothing is rounded to x's dtype.

    Args:
        layers: weights; what the layer shares with others of its reach; its keys and values, each
            [rows, kv_heads, capacity, dim]; and where its output goes too, [tokens, hidden] of x's dtype, or None.
        x: hidden states; overwritten where they are in float32.
    """
    y = x.float().contiguous()
    stages = _stages(layers)
    native.library().dflash_layers(stages, len(stages), y.data_ptr())
    return y.to(x.dtype)


def place_context(layers: Sequence[tuple[Fused, Run, Tensor, Tensor]], heads: Float[Tensor, "tokens outputs"]) -> None:
    """Normalise and turn each layer's keys, and write them and the values into the slots that the chunk claimed.

    Args:
        layers: as in `fused_layers`, less the last.
        heads: keys and values of all layers, layer by layer, in float32; the keys are overwritten.
    """
    stages = _stages([(*layer, None) for layer in layers])
    native.library().dflash_place(stages, len(stages), heads.data_ptr(), heads.shape[1])


def _stages(layers: Sequence[tuple[Fused, Run, Tensor, Tensor, Tensor | None]]) -> ctypes.Array[native.Stage]:
    address = ctypes.addressof
    stages = (native.Stage * len(layers))()
    for stage, (weights, run, keys, values, tap) in zip(stages, layers, strict=True):
        stage.layer, stage.call, stage.reach = address(weights.layer), address(run.call), address(run.reach)
        stage.keys, stage.values = keys.data_ptr(), values.data_ptr()
        if tap is not None:
            stage.tap, stage.stride = tap.data_ptr(), tap.stride(0)
    return stages
