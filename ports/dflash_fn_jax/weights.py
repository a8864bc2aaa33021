"""Weights from checkpoint folders, checked against the spec."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes  # noqa: F401 (numpy knows bfloat16 from then on)
import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError, safe_open

from dflash_fn.checkpoint import Reader, read_folder
from dflash_fn.config import DecoderSpec, DraftSpec, TargetSpec
from dflash_fn.sources import Source
from dflash_fn_jax.decoder import LayerWeights, TargetWeights
from dflash_fn_jax.draft import DraftWeights
from dflash_fn_jax.ops import Projection, own, scope

__all__ = ["open_reader", "read_draft", "read_target"]


def open_reader(source: Source, dtype: str) -> Reader[Array]:
    """Open a folder's tensors.

    Raises:
        CheckpointError: no weight file, or one that safetensors cannot read.
    """
    assert source.folder is not None
    tensors = read_folder(source.folder, _read_file, (SafetensorError, OSError))
    return Reader(source.name, tensors, lambda x: own(x, dtype), joins=True)


def _read_file(file: Path) -> dict[str, np.ndarray]:
    # The tensors are views of the mapped file: nothing is read before it is needed.
    with safe_open(file, framework="np") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def read_target(source: Source, spec: TargetSpec, dtype: str) -> TargetWeights:
    """Read a target's weight tree, in transformers' names.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    with scope(dtype):
        reader = open_reader(source, dtype)
        embedding = reader.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        layers = tuple(_read_layer(reader, spec, f"model.layers.{i}") for i in range(spec.num_layers))
        norm = reader.take("model.norm.weight", spec.hidden_size)
        if spec.tied_head:
            reader.skip("lm_head.weight")
            head = embedding
        else:
            head = reader.take("lm_head.weight", spec.vocab_size, spec.hidden_size)
        reader.finish()
    return TargetWeights(embedding, layers, norm, head)


def read_draft(source: Source, spec: DraftSpec, dtype: str) -> DraftWeights:
    """Read a draft's weight tree, in upstream's names.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    hidden, taps = spec.hidden_size, len(spec.target_layer_ids)
    with scope(dtype):
        reader = open_reader(source, dtype)
        fuse = Projection(reader.take("fc.weight", hidden, taps * hidden))
        context_norm = reader.take("hidden_norm.weight", hidden)
        layers = tuple(_read_layer(reader, spec, f"layers.{i}") for i in range(spec.num_layers))
        norm = reader.take("norm.weight", hidden)
        reader.finish()
    return DraftWeights(fuse, context_norm, layers, norm)


def _read_layer(reader: Reader[Array], spec: DecoderSpec, prefix: str) -> LayerWeights:
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_heads * dim, spec.num_kv_heads * dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> Projection:
        return Projection(*reader.linear(name, outputs, inputs, bias=bias))

    return LayerWeights(
        input_norm=reader.take(f"{prefix}.input_layernorm.weight", hidden),
        q=linear(f"{attention}.q_proj", queries, hidden, spec.attention_bias),
        k=linear(f"{attention}.k_proj", keys, hidden, spec.attention_bias),
        v=linear(f"{attention}.v_proj", keys, hidden, spec.attention_bias),
        q_norm=reader.take(f"{attention}.q_norm.weight", dim) if spec.qk_norm else None,
        k_norm=reader.take(f"{attention}.k_norm.weight", dim) if spec.qk_norm else None,
        out=linear(f"{attention}.o_proj", hidden, queries, spec.attention_bias),
        post_norm=reader.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate=linear(f"{mlp}.gate_proj", inner, hidden, spec.mlp_bias),
        up=linear(f"{mlp}.up_proj", inner, hidden, spec.mlp_bias),
        down=linear(f"{mlp}.down_proj", hidden, inner, spec.mlp_bias),
    )
