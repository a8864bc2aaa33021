"""Whole layers as single calls of our own kernels: attention, sliding or not, and a gated MLP."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_fn.config import DecoderSpec
from dflash_fn_torch import native
from dflash_fn_torch.attention import Reach
from dflash_fn_torch.ops import Projection
from dflash_fn_torch.panels import Panels

__all__ = ["Fused", "Run", "fuse", "fuse_context", "fused_layer", "place_context", "runs"]


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
    weights: Fused, reaches: dict[Reach, tuple[tuple[int, ...], int]], slots: int, cos: Tensor, sin: Tensor
) -> dict[Reach, Run]:
    """Prepare a pass.

    Args:
        weights: of any of the layers.
        reaches: by reach, the slot of each row's first token in the buffer, and the buffer's capacity.
        slots: tokens a row.
        cos: [R, S, 1, turned] of the tokens' positions, in float32.
        sin: the same, as `ops.rotate` takes it.
    """
    return {reach: _run(weights, reach, starts, end, slots, cos, sin) for reach, (starts, end) in reaches.items()}


def _run(
    weights: Fused, reach: Reach, starts: tuple[int, ...], capacity: int, slots: int, cos: Tensor, sin: Tensor
) -> Run:
    firsts = (ctypes.c_int64 * len(starts))(*starts)
    cos, sin = cos.contiguous(), sin.contiguous()
    call = native.Pass(
        len(starts),
        slots,
        capacity,
        cos.shape[-1],
        ctypes.addressof(firsts),
        cos.data_ptr(),
        sin.data_ptr(),
        None,
        torch.get_num_threads(),
    )
    size = native.library().dflash_work(ctypes.byref(weights.layer), ctypes.byref(call))
    work = torch.empty(size, dtype=torch.float32)
    call.work = work.data_ptr()
    return Run(call, native.Reach(reach.causal, reach.window or 0), (firsts, cos, sin, work))


def fused_layer(
    weights: Fused,
    run: Run,
    x: Float[Tensor, "tokens hidden"],
    keys: Float[Tensor, "rows kv_heads capacity dim"],
    values: Float[Tensor, "rows kv_heads capacity dim"],
) -> Float[Tensor, "tokens hidden"]:
    """Run a layer over a chunk, and write its K and V into the slots that the chunk claimed."""
    y = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    native.library().dflash_layer(
        ctypes.byref(weights.layer),
        ctypes.byref(run.call),
        ctypes.byref(run.reach),
        y.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
    )
    return y.to(x.dtype)


def place_context(
    weights: Fused,
    run: Run,
    heads: Float[Tensor, "tokens outputs"],
    layer: int,
    keys: Float[Tensor, "rows kv_heads capacity dim"],
    values: Float[Tensor, "rows kv_heads capacity dim"],
) -> None:
    """Normalise and turn a layer's keys, and write them and the values into the slots that the chunk claimed.

    Args:
        weights: of the layer.
        run: of the pass.
        heads: keys and values of all layers in float32; the keys of this one are overwritten.
        layer: which.
        keys: the layer's.
        values: the same.
    """
    stride = heads.shape[1]
    first = layer * 2 * weights.layer.kv_heads * weights.layer.dim
    native.library().dflash_place(
        ctypes.byref(weights.layer),
        ctypes.byref(run.call),
        heads.data_ptr() + first * heads.element_size(),
        stride,
        keys.data_ptr(),
        values.data_ptr(),
    )
