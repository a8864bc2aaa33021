"""Weights from checkpoint folders and from models in memory, laid out for the decoder and checked against the spec.

Folders of transformers and of mlx-lm use the same names, and so do models of mlx-lm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_fn.checkpoint import Reader, centered_norms, read_folder, text_part
from dflash_fn.config import DecoderSpec, DeltaSpec, DraftSpec, LayerKind, TargetSpec
from dflash_fn.sources import Source
from dflash_fn_mlx.decoder import LayerWeights, TargetWeights
from dflash_fn_mlx.draft import DraftWeights
from dflash_fn_mlx.gated_delta import DeltaWeights
from dflash_fn_mlx.ops import Projection
from dflash_fn_mlx.quantized import Matrix, check_bits, join, quantize, take_matrix

__all__ = ["arrays_of", "open_reader", "read_draft", "read_target", "tensors_of"]


@dataclass(slots=True)
class MlxReader(Reader[Any]):
    """A reader that knows how its source stores norms.

    Attributes:
        centered: whether norms lack the 1 that is to be added to them; None where they are as Llama's.
    """

    centered: bool | None

    def exact(self, name: str, *shape: int) -> mx.array:
        """Return a tensor in float32, whatever the model's dtype is."""
        return self.raw(name, *shape).astype(mx.float32)

    def norm(self, name: str, size: int) -> mx.array:
        """Return a norm's weight, in float32 where it is applied in float32."""
        if self.centered is None:
            return self.take(name, size)
        return self.exact(name, size) + (1.0 if self.centered else 0.0)


def open_reader(source: Source, dtype: mx.Dtype, bits: int | None = None, *, hybrid: bool = False) -> MlxReader:
    """Open a source's tensors; a model in memory is used in place.

    Args:
        source: what to read.
        dtype: of what is handed out; words of quantised matrices stay words.
        bits: to round matrices to; None leaves them as they are.
        hybrid: whether only the text part is to be there, in the names of text models.

    Raises:
        CheckpointError: no weight file, or one that mlx cannot read.
        InputError: the matrices cannot be rounded so.
    """
    tensors = tensors_of(source)
    if bits is not None:
        check_bits(source.name, tensors, bits)

    def convert(x: mx.array) -> Matrix:
        x = x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x
        return x if bits is None or x.ndim == 1 else quantize(x, bits)

    centered = centered_norms(tensors) if hybrid else None
    known = text_part(source.name, tensors) if hybrid else tensors
    return MlxReader(source.name, known, convert, joins=source.obj is None, centered=centered)


def tensors_of(source: Source) -> dict[str, mx.array]:
    """Return a source's tensors by name; those of files are read when they are evaluated."""
    if source.obj is not None:
        return dict(tree_flatten(source.obj.parameters()))
    assert source.folder is not None
    return read_folder(source.folder, _read_file, (RuntimeError, OSError))


def _read_file(file: Path) -> dict[str, mx.array]:
    tensors = mx.load(str(file))
    assert isinstance(tensors, dict)
    return tensors


def read_target(source: Source, spec: TargetSpec, dtype: mx.Dtype) -> TargetWeights:
    """Read a target's weight tree, in transformers' names.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    reader = open_reader(source, dtype, hybrid=spec.family == "qwen3_5")
    embedding = take_matrix(reader, "model.embed_tokens", spec.vocab_size, spec.hidden_size)
    layers = tuple(_read_layer(reader, spec, i, f"model.layers.{i}") for i in range(spec.num_layers))
    norm = reader.norm("model.norm.weight", spec.hidden_size)
    if spec.tied_head:
        for part in ("weight", "scales", "biases"):
            reader.skip(f"lm_head.{part}")
        head = embedding
    else:
        head = take_matrix(reader, "lm_head", spec.vocab_size, spec.hidden_size)
    reader.finish()
    return _read(TargetWeights(embedding, layers, norm, head))


def read_draft(source: Source, spec: DraftSpec, dtype: mx.Dtype, bits: int | None) -> DraftWeights:
    """Read a draft's weight tree, in upstream's names, its matrices rounded to `bits` where that is not None.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
        InputError: the matrices cannot be rounded so.
    """
    hidden, taps = spec.hidden_size, len(spec.target_layer_ids)
    reader = open_reader(source, dtype, bits)
    fuse = Projection((take_matrix(reader, "fc", hidden, taps * hidden),))
    context_norm = reader.take("hidden_norm.weight", hidden)
    layers = tuple(_read_layer(reader, spec, i, f"layers.{i}") for i in range(spec.num_layers))
    norm = reader.take("norm.weight", hidden)
    reader.finish()
    context = _context_kv(reader, spec), _context_k_norm(spec, layers)
    return _read(DraftWeights(fuse, context_norm, *context, layers, norm))


def _read_layer(reader: MlxReader, spec: DecoderSpec, layer: int, prefix: str) -> LayerWeights:
    hidden, inner, mlp = spec.hidden_size, spec.intermediate_size, f"{prefix}.mlp"
    if spec.layer_kinds[layer] is LayerKind.DELTA:
        assert spec.delta is not None
        qkv, qk_norm, out, delta = _read_delta_net(reader, spec.delta, hidden, f"{prefix}.linear_attn")
    else:
        qkv, qk_norm, out, delta = _read_attention(reader, spec, f"{prefix}.self_attn")
    return LayerWeights(
        input_norm=reader.norm(f"{prefix}.input_layernorm.weight", hidden),
        qkv=qkv,
        qk_norm=qk_norm,
        out=out,
        delta=delta,
        post_norm=reader.norm(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=_projection(reader, mlp, {"gate_proj": inner, "up_proj": inner}, hidden, bias=spec.mlp_bias),
        down=_projection(reader, mlp, {"down_proj": hidden}, inner, bias=spec.mlp_bias),
    )


Mixer = tuple[Projection, mx.array | None, Projection, DeltaWeights | None]
"""Input projection, norms of queries and keys, output projection, and the rest of a gated delta net."""


def _read_attention(reader: MlxReader, spec: DecoderSpec, prefix: str) -> Mixer:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    outputs = {"q_proj": queries * (2 if spec.output_gate else 1), "k_proj": keys, "v_proj": keys}
    qkv = _projection(reader, prefix, outputs, spec.hidden_size, bias=spec.attention_bias)
    out = _projection(reader, prefix, {"o_proj": spec.hidden_size}, queries, bias=spec.attention_bias)
    return qkv, _qk_norm(reader, spec, prefix) if spec.qk_norm else None, out, None


def _read_delta_net(reader: MlxReader, spec: DeltaSpec, hidden: int, prefix: str) -> Mixer:
    heads = spec.value_heads
    outputs = {"in_proj_qkv": spec.channels, "in_proj_z": spec.values, "in_proj_b": heads, "in_proj_a": heads}
    qkv = _projection(reader, prefix, outputs, hidden, bias=False)
    shape = (1, spec.kernel) if reader.centered else (spec.kernel, 1)
    conv = reader.exact(f"{prefix}.conv1d.weight", spec.channels, *shape)
    delta = DeltaWeights(
        conv=conv.reshape(spec.channels, spec.kernel).T,
        rate=-mx.exp(reader.exact(f"{prefix}.A_log", heads)),
        dt_bias=reader.exact(f"{prefix}.dt_bias", heads),
        norm=reader.take(f"{prefix}.norm.weight", spec.value_dim),
    )
    return qkv, None, _projection(reader, prefix, {"out_proj": hidden}, spec.values, bias=False), delta


def _projection(reader: Reader[Any], prefix: str, outputs: dict[str, int], inputs: int, *, bias: bool) -> Projection:
    """Return matrices with one input as one projection: joined where they are copied anyway."""
    weights = tuple(take_matrix(reader, f"{prefix}.{name}", size, inputs) for name, size in outputs.items())
    biases = [reader.take(f"{prefix}.{name}.bias", size) for name, size in outputs.items()] if bias else None
    return Projection(join(weights) if reader.joins else weights, mx.concatenate(biases) if biases else None)


def _context_kv(reader: Reader[Any], spec: DraftSpec) -> Projection:
    """Return the keys' and values' matrices of all layers once more, as one projection of the context."""
    size = spec.num_kv_heads * spec.head_dim
    outputs = {f"{i}.self_attn.{name}": size for i in range(spec.num_layers) for name in ("k_proj", "v_proj")}
    return _projection(reader, "layers", outputs, spec.hidden_size, bias=spec.attention_bias)


def _context_k_norm(spec: DraftSpec, layers: tuple[LayerWeights, ...]) -> mx.array | None:
    norms = [layer.qk_norm[spec.num_heads :] for layer in layers if layer.qk_norm is not None]
    return mx.concatenate(norms) if norms else None


def _qk_norm(reader: MlxReader, spec: DecoderSpec, attention: str) -> mx.array:
    q = reader.norm(f"{attention}.q_norm.weight", spec.head_dim)
    k = reader.norm(f"{attention}.k_norm.weight", spec.head_dim)
    return mx.concatenate([mx.repeat(q[None], spec.num_heads, 0), mx.repeat(k[None], spec.num_kv_heads, 0)])


def _read(tree: Any) -> Any:
    """Read from the files now, so that they may change afterwards, and other threads may use the arrays."""
    mx.eval(list(arrays_of(tree)))
    return tree


def arrays_of(tree: Any) -> Iterator[mx.array]:
    """Go over the arrays of a weight tree."""
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, tuple):
        for part in tree:
            yield from arrays_of(part)
    elif is_dataclass(tree):
        for item in fields(tree):
            yield from arrays_of(getattr(tree, item.name))
