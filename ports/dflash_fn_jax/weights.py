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
from dflash_fn_jax.ops import Norm, Projection, own, scope

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
        norm = Norm(reader.take("model.norm.weight", spec.hidden_size), spec.norm_eps)
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
        context_norm = Norm(reader.take("hidden_norm.weight", hidden), spec.norm_eps)
        layers = tuple(_read_layer(reader, spec, f"layers.{i}") for i in range(spec.num_layers))
        norm = Norm(reader.take("norm.weight", hidden), spec.norm_eps)
        reader.finish()
    return DraftWeights(fuse, context_norm, layers, norm)


def _read_layer(reader: Reader[Array], spec: DecoderSpec, prefix: str) -> LayerWeights:
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_heads * dim, spec.num_kv_heads * dim

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> Projection:
        return Projection(*reader.linear(f"{prefix}.{name}", outputs, inputs, bias=bias))

    def norm(name: str, size: int) -> Norm:
        return Norm(reader.take(f"{prefix}.{name}.weight", size), spec.norm_eps)

    return LayerWeights(
        q=linear("self_attn.q_proj", queries, hidden, spec.attention_bias),
        k=linear("self_attn.k_proj", keys, hidden, spec.attention_bias),
        v=linear("self_attn.v_proj", keys, hidden, spec.attention_bias),
        input_norm=norm("input_layernorm", hidden),
        q_norm=norm("self_attn.q_norm", dim) if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm", dim) if spec.qk_norm else None,
        out=linear("self_attn.o_proj", hidden, queries, spec.attention_bias),
        post_norm=norm("post_attention_layernorm", hidden),
        gate=linear("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        up=linear("mlp.up_proj", inner, hidden, spec.mlp_bias),
        down=linear("mlp.down_proj", hidden, inner, spec.mlp_bias),
    )
