"""Weights from checkpoint folders and from models in memory, laid out for the decoder and checked against the spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_fn import errors
from dflash_fn.checkpoint import Reader, centered_norms, read_folder, text_part
from dflash_fn.config import DecoderSpec, DeltaSpec, DraftSpec, LayerKind, TargetSpec
from dflash_fn.sources import Source
from dflash_fn_torch.decoder import LayerWeights, TargetWeights
from dflash_fn_torch.draft import DraftWeights
from dflash_fn_torch.fused import fuse, fuse_context
from dflash_fn_torch.gated_delta import DeltaWeights
from dflash_fn_torch.ops import Projection, pack
from dflash_fn_torch.panels import Panels, in_panels

__all__ = ["View", "open_reader", "read_draft", "read_target"]

View: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Makes of all tensors of a checkpoint those that are read: shares of them, say (`dflash_fn_torch.sharding`)."""


@dataclass(slots=True)
class TorchReader(Reader[Tensor]):
    """A reader that knows how its source stores norms.

    Attributes:
        device: where tensors go; None for where they are.
        centered: whether norms lack the 1 that is to be added to them; None where they are as Llama's.
        pack: lays a matrix out for products.
    """

    device: str | None
    centered: bool | None
    pack: Callable[[Tensor], Tensor | Panels] = pack

    def exact(self, name: str, *shape: int) -> Tensor:
        """Return a copy in float32, whatever the model's dtype is."""
        return self.raw(name, *shape).detach().to(device=self.device, dtype=torch.float32, copy=True)

    def norm(self, name: str, size: int) -> Tensor:
        """Return a norm's weight, in float32 where it is applied in float32."""
        if self.centered is None:
            return self.take(name, size)
        return self.exact(name, size) + (1.0 if self.centered else 0.0)


def open_reader(
    source: Source,
    dtype: torch.dtype,
    device: str | None,
    *,
    hybrid: bool = False,
    view: View | None = None,
    compiled: bool = False,
) -> TorchReader:
    """Open a source's tensors.

    On a CPU, where products depend on the layout, matrices are copied into our own wherever they come from. A model
    in memory on an accelerator is used in place. Of a hybrid, only the text part is there, in the names of text models.

    Args:
        source: what to read.
        dtype: of what is handed out.
        device: where that goes; None leaves it where `view` has put it.
        hybrid: whether the source's family is one.
        view: makes of the tensors what is to be read in place of them.
        compiled: whether matrices are laid out for our own kernels.

    Raises:
        CheckpointError: no weight file, or one that safetensors cannot read.
    """
    if source.obj is not None:
        tensors = source.obj.state_dict()
    else:
        assert source.folder is not None
        tensors = read_folder(source.folder, _read_file, (SafetensorError, OSError))
    from_files = source.obj is None
    centered = centered_norms(tensors) if hybrid else None
    tensors = text_part(source.name, tensors) if hybrid else tensors
    # Tensors from files are views of mapped memory, which would change with the file: own weights are copies.
    return TorchReader(
        source.name,
        view(tensors) if view else tensors,
        lambda x: x.detach().to(device=device, dtype=dtype, copy=from_files),
        joins=from_files or device == "cpu",
        device=device,
        centered=centered,
        pack=in_panels if compiled else pack,
    )


def _read_file(file: Path) -> dict[str, Tensor]:
    # The tensors are views of the mapped file: nothing is read before it is needed.
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def read_target(
    source: Source,
    spec: TargetSpec,
    dtype: torch.dtype,
    device: str | None,
    *,
    view: View | None = None,
    head_of: Callable[[Tensor], Tensor] | None = None,
    compiled: bool = False,
) -> TargetWeights:
    """Read a target's weight tree, in transformers' names.

    Args:
        source: what to read.
        spec: of what is run, be it a share.
        dtype: of the weights.
        device: where they go; None leaves them where `view` has put them.
        view: as in `open_reader`.
        head_of: makes of the whole head the one to multiply with.
        compiled: as in `open_reader`.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
        UnsupportedModel: heads of a size that attention kernels do not treat alike in every slot.
    """
    if spec.head_dim % 4:
        raise errors.UnsupportedModel(
            f"{source.name}: got head_dim {spec.head_dim}; port torch runs heads whose size is a multiple of 4"
        )
    reader = open_reader(source, dtype, device, hybrid=spec.family == "qwen3_5", view=view, compiled=compiled)
    embedding = reader.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(_read_layer(reader, spec, i, f"model.layers.{i}") for i in range(spec.num_layers))
    norm = reader.norm("model.norm.weight", spec.hidden_size)
    if spec.tied_head:
        reader.skip("lm_head.weight")
        head = embedding
    else:
        head = reader.take("lm_head.weight", spec.vocab_size, spec.hidden_size)
    reader.finish()
    return TargetWeights(embedding, layers, norm, reader.pack(head_of(head) if head_of else head))


def read_draft(
    source: Source,
    spec: DraftSpec,
    dtype: torch.dtype,
    device: str,
    *,
    view: View | None = None,
    compiled: bool = False,
) -> DraftWeights:
    """Read a draft's weight tree, in upstream's names; `view` and `compiled` as in `open_reader`.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    hidden, taps = spec.hidden_size, len(spec.target_layer_ids)
    reader = open_reader(source, dtype, device, hybrid=spec.family == "qwen3_5", view=view, compiled=compiled)
    fc = Projection((reader.pack(reader.take("fc.weight", hidden, taps * hidden)),))
    context_norm = reader.take("hidden_norm.weight", hidden)
    layers = tuple(_read_layer(reader, spec, i, f"layers.{i}") for i in range(spec.num_layers))
    norm = reader.take("norm.weight", hidden)
    reader.finish()
    context_kv = _packed(reader, _context_kv(reader, spec))
    k_norm = _context_k_norm(spec, layers)
    placed = fuse_context(spec, context_kv.weights[0], k_norm) if len(context_kv.weights) == 1 else None
    return DraftWeights(fc, context_norm, context_kv, k_norm, layers, norm, placed)


def _read_layer(reader: TorchReader, spec: DecoderSpec, layer: int, prefix: str) -> LayerWeights:
    hidden, inner, mlp = spec.hidden_size, spec.intermediate_size, f"{prefix}.mlp"
    if spec.layer_kinds[layer] is LayerKind.DELTA:
        assert spec.delta is not None
        qkv, qk_norm, out, delta = _read_delta_net(reader, spec.delta, hidden, f"{prefix}.linear_attn")
    else:
        qkv, qk_norm, out, delta = _read_attention(reader, spec, f"{prefix}.self_attn")
    gate_up = _projection(reader, mlp, {"gate_proj": inner, "up_proj": inner}, hidden, bias=spec.mlp_bias)
    down = _projection(reader, mlp, {"down_proj": hidden}, inner, bias=spec.mlp_bias)
    qkv, out, gate_up, down = (_packed(reader, part) for part in (qkv, out, gate_up, down))
    input_norm = reader.norm(f"{prefix}.input_layernorm.weight", hidden)
    post_norm = reader.norm(f"{prefix}.post_attention_layernorm.weight", hidden)
    fused = None if delta else fuse(spec, (qkv, out, gate_up, down), (input_norm, qk_norm, post_norm))
    return LayerWeights(input_norm, qkv, qk_norm, out, post_norm, gate_up, down, delta, fused)


Mixer = tuple[Projection, Tensor | None, Projection, DeltaWeights | None]
"""Input projection, norms of queries and keys, output projection, and the rest of a gated delta net."""


def _read_attention(reader: TorchReader, spec: DecoderSpec, prefix: str) -> Mixer:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    outputs = {"q_proj": queries * (2 if spec.output_gate else 1), "k_proj": keys, "v_proj": keys}
    qkv = _projection(reader, prefix, outputs, spec.hidden_size, bias=spec.attention_bias)
    out = _projection(reader, prefix, {"o_proj": spec.hidden_size}, queries, bias=spec.attention_bias)
    return qkv, _qk_norm(reader, spec, prefix) if spec.qk_norm else None, out, None


def _read_delta_net(reader: TorchReader, spec: DeltaSpec, hidden: int, prefix: str) -> Mixer:
    heads = spec.value_heads
    outputs = {"in_proj_qkv": spec.channels, "in_proj_z": spec.values, "in_proj_b": heads, "in_proj_a": heads}
    qkv = _projection(reader, prefix, outputs, hidden, bias=False)
    shape = (1, spec.kernel) if reader.centered else (spec.kernel, 1)
    conv = reader.exact(f"{prefix}.conv1d.weight", spec.channels, *shape)
    delta = DeltaWeights(
        conv=conv.reshape(spec.channels, spec.kernel).t().contiguous(),
        rate=-torch.exp(reader.exact(f"{prefix}.A_log", heads)),
        dt_bias=reader.exact(f"{prefix}.dt_bias", heads),
        norm=reader.take(f"{prefix}.norm.weight", spec.value_dim),
    )
    return qkv, None, _projection(reader, prefix, {"out_proj": hidden}, spec.values, bias=False), delta


def _projection(reader: Reader[Tensor], prefix: str, outputs: dict[str, int], inputs: int, *, bias: bool) -> Projection:
    """Return matrices with one input as one projection: joined where they are copied anyway."""
    parts = [reader.linear(f"{prefix}.{name}", size, inputs, bias=bias) for name, size in outputs.items()]
    weights = tuple(weight for weight, _ in parts)
    joined = (torch.cat(weights),) if reader.joins and len(weights) > 1 else weights
    biases = [bias for _, bias in parts if bias is not None]
    return Projection(joined, torch.cat(biases) if biases else None)


def _packed(reader: TorchReader, projection: Projection) -> Projection:
    weights = (weight if isinstance(weight, Panels) else reader.pack(weight) for weight in projection.weights)
    return Projection(tuple(weights), projection.bias)


def _context_kv(reader: Reader[Tensor], spec: DraftSpec) -> Projection:
    """Return the keys' and values' matrices of all layers once more, as one projection of the context."""
    size = spec.num_kv_heads * spec.head_dim
    outputs = {f"{i}.self_attn.{name}": size for i in range(spec.num_layers) for name in ("k_proj", "v_proj")}
    return _projection(reader, "layers", outputs, spec.hidden_size, bias=spec.attention_bias)


def _context_k_norm(spec: DraftSpec, layers: tuple[LayerWeights, ...]) -> Tensor | None:
    norms = [layer.qk_norm[spec.num_heads :] for layer in layers if layer.qk_norm is not None]
    return torch.cat(norms) if norms else None


def _qk_norm(reader: TorchReader, spec: DecoderSpec, attention: str) -> Tensor:
    q = reader.norm(f"{attention}.q_norm.weight", spec.head_dim)
    k = reader.norm(f"{attention}.k_norm.weight", spec.head_dim)
    return torch.cat([q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)])
