"""Weights from checkpoint folders and from models in memory, laid out for the decoder and checked against the spec."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_fn import errors
from dflash_fn.checkpoint import Reader, read_folder
from dflash_fn.config import DecoderSpec, DraftSpec, TargetSpec
from dflash_fn.sources import Source
from dflash_fn_torch.decoder import LayerWeights, TargetWeights
from dflash_fn_torch.draft import DraftWeights
from dflash_fn_torch.ops import Projection, pack

__all__ = ["open_reader", "read_draft", "read_target"]


def open_reader(source: Source, dtype: torch.dtype, device: str) -> Reader[Tensor]:
    """Open a source's tensors.

    On a CPU, where products depend on the layout, matrices are copied into our own wherever they come from. A model
    in memory on an accelerator is used in place.

    Raises:
        CheckpointError: no weight file, or one that safetensors cannot read.
    """
    if source.obj is not None:
        tensors = source.obj.state_dict()
    else:
        assert source.folder is not None
        tensors = read_folder(source.folder, _read_file, (SafetensorError, OSError))
    from_files = source.obj is None
    # Tensors from files are views of mapped memory, which would change with the file: own weights are copies.
    return Reader(
        source.name,
        tensors,
        lambda x: x.detach().to(device=device, dtype=dtype, copy=from_files),
        joins=from_files or device == "cpu",
    )


def _read_file(file: Path) -> dict[str, Tensor]:
    # The tensors are views of the mapped file: nothing is read before it is needed.
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def read_target(source: Source, spec: TargetSpec, dtype: torch.dtype, device: str) -> TargetWeights:
    """Read a target's weight tree, in transformers' names.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
        UnsupportedModel: heads of a size that attention kernels do not treat alike in every slot.
    """
    if spec.head_dim % 4:
        raise errors.UnsupportedModel(
            f"{source.name}: got head_dim {spec.head_dim}; port torch runs heads whose size is a multiple of 4"
        )
    reader = open_reader(source, dtype, device)
    embedding = reader.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(_read_layer(reader, spec, f"model.layers.{i}") for i in range(spec.num_layers))
    norm = reader.take("model.norm.weight", spec.hidden_size)
    if spec.tied_head:
        reader.skip("lm_head.weight")
        head = embedding
    else:
        head = reader.take("lm_head.weight", spec.vocab_size, spec.hidden_size)
    reader.finish()
    return TargetWeights(embedding, layers, norm, pack(head))


def read_draft(source: Source, spec: DraftSpec, dtype: torch.dtype, device: str) -> DraftWeights:
    """Read a draft's weight tree, in upstream's names.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    hidden, taps = spec.hidden_size, len(spec.target_layer_ids)
    reader = open_reader(source, dtype, device)
    fuse = Projection((pack(reader.take("fc.weight", hidden, taps * hidden)),))
    context_norm = reader.take("hidden_norm.weight", hidden)
    layers = tuple(_read_layer(reader, spec, f"layers.{i}") for i in range(spec.num_layers))
    norm = reader.take("norm.weight", hidden)
    reader.finish()
    return DraftWeights(
        fuse, context_norm, _packed(_context_kv(reader, spec)), _context_k_norm(spec, layers), layers, norm
    )


def _read_layer(reader: Reader[Tensor], spec: DecoderSpec, prefix: str) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = _projection(
        reader, attention, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, bias=spec.attention_bias
    )
    return LayerWeights(
        input_norm=reader.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=_packed(qkv),
        qk_norm=_qk_norm(reader, spec, attention) if spec.qk_norm else None,
        out=_packed(_projection(reader, attention, {"o_proj": hidden}, queries, bias=spec.attention_bias)),
        post_norm=reader.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=_packed(_projection(reader, mlp, {"gate_proj": inner, "up_proj": inner}, hidden, bias=spec.mlp_bias)),
        down=_packed(_projection(reader, mlp, {"down_proj": hidden}, inner, bias=spec.mlp_bias)),
    )


def _projection(reader: Reader[Tensor], prefix: str, outputs: dict[str, int], inputs: int, *, bias: bool) -> Projection:
    """Return matrices with one input as one projection: joined where they are copied anyway."""
    parts = [reader.linear(f"{prefix}.{name}", size, inputs, bias=bias) for name, size in outputs.items()]
    weights = tuple(weight for weight, _ in parts)
    joined = (torch.cat(weights),) if reader.joins and len(weights) > 1 else weights
    biases = [bias for _, bias in parts if bias is not None]
    return Projection(joined, torch.cat(biases) if biases else None)


def _packed(projection: Projection) -> Projection:
    return Projection(tuple(pack(weight) for weight in projection.weights), projection.bias)


def _context_kv(reader: Reader[Tensor], spec: DraftSpec) -> Projection:
    """Return the keys' and values' matrices of all layers once more, as one projection of the context."""
    size = spec.num_kv_heads * spec.head_dim
    outputs = {f"{i}.self_attn.{name}": size for i in range(spec.num_layers) for name in ("k_proj", "v_proj")}
    return _projection(reader, "layers", outputs, spec.hidden_size, bias=spec.attention_bias)


def _context_k_norm(spec: DraftSpec, layers: tuple[LayerWeights, ...]) -> Tensor | None:
    norms = [layer.qk_norm[spec.num_heads :] for layer in layers if layer.qk_norm is not None]
    return torch.cat(norms) if norms else None


def _qk_norm(reader: Reader[Tensor], spec: DecoderSpec, attention: str) -> Tensor:
    q = reader.take(f"{attention}.q_norm.weight", spec.head_dim)
    k = reader.take(f"{attention}.k_norm.weight", spec.head_dim)
    return torch.cat([q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)])
