"""Weights from checkpoint folders, checked against the spec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes  # noqa: F401 (numpy knows bfloat16 from then on)
import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError, safe_open

from dflash_fn.checkpoint import Reader, centered_norms, read_folder, text_part
from dflash_fn.config import DecoderSpec, DraftSpec, LayerKind, TargetSpec
from dflash_fn.sources import Source
from dflash_fn_jax.decoder import LayerWeights, TargetWeights
from dflash_fn_jax.draft import DraftWeights
from dflash_fn_jax.gated_delta import DeltaNet
from dflash_fn_jax.ops import Norm, Projection, own, scope

__all__ = ["open_reader", "read_draft", "read_target"]


@dataclass(slots=True)
class JaxReader(Reader[Array]):
    """A reader that knows how its source stores norms.

    Attributes:
        wide: float32, or float64 for a model in float64.
        centered: whether norms lack the 1 that is to be added to them; None where they are as Llama's.
        eps: of the norms.
    """

    wide: str
    centered: bool | None
    eps: float

    def exact(self, name: str, *shape: int) -> Array:
        """Return a tensor in `wide`, whatever the model's dtype is."""
        return own(self.raw(name, *shape), self.wide)

    def norm(self, name: str, size: int) -> Norm:
        """Return a norm, its weight in `wide` where it is applied there."""
        if self.centered is None:
            return Norm(self.take(name, size), self.eps)
        return Norm(self.exact(name, size) + (1.0 if self.centered else 0.0), self.eps)


def open_reader(source: Source, dtype: str, *, eps: float, hybrid: bool = False) -> JaxReader:
    """Open a folder's tensors; of a hybrid, those of its text part, in the names of text models.

    Raises:
        CheckpointError: no weight file, or one that safetensors cannot read.
    """
    assert source.folder is not None
    tensors = read_folder(source.folder, _read_file, (SafetensorError, OSError))
    wide = "float64" if dtype == "float64" else "float32"
    centered = centered_norms(tensors) if hybrid else None
    known = text_part(source.name, tensors) if hybrid else tensors
    return JaxReader(source.name, known, lambda x: own(x, dtype), True, wide=wide, centered=centered, eps=eps)


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
        reader = open_reader(source, dtype, eps=spec.norm_eps, hybrid=spec.family == "qwen3_5")
        embedding = reader.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        layers = tuple(
            _read_delta_net(reader, spec, f"model.layers.{i}")
            if kind is LayerKind.DELTA
            else _read_layer(reader, spec, f"model.layers.{i}")
            for i, kind in enumerate(spec.layer_kinds)
        )
        norm = reader.norm("model.norm.weight", spec.hidden_size)
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
        reader = open_reader(source, dtype, eps=spec.norm_eps)
        fuse = Projection(reader.take("fc.weight", hidden, taps * hidden))
        context_norm = Norm(reader.take("hidden_norm.weight", hidden), spec.norm_eps)
        layers = tuple(_read_layer(reader, spec, f"layers.{i}") for i in range(spec.num_layers))
        norm = Norm(reader.take("norm.weight", hidden), spec.norm_eps)
        reader.finish()
    return DraftWeights(fuse, context_norm, layers, norm)


def _read_layer(reader: JaxReader, spec: DecoderSpec, prefix: str) -> LayerWeights:
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_heads * dim, spec.num_kv_heads * dim

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> Projection:
        return Projection(*reader.linear(f"{prefix}.{name}", outputs, inputs, bias=bias))

    def norm(name: str, size: int) -> Norm:
        return reader.norm(f"{prefix}.{name}.weight", size)

    return LayerWeights(
        dim=dim,
        gated=spec.output_gate,
        q=linear("self_attn.q_proj", queries * (2 if spec.output_gate else 1), hidden, spec.attention_bias),
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


def _read_delta_net(reader: JaxReader, spec: DecoderSpec, prefix: str) -> DeltaNet:
    sizes, hidden, inner = spec.delta, spec.hidden_size, spec.intermediate_size
    assert sizes is not None
    heads, part = sizes.value_heads, f"{prefix}.linear_attn"

    def linear(name: str, outputs: int, inputs: int = hidden, bias: bool = False) -> Projection:
        return Projection(*reader.linear(name, outputs, inputs, bias=bias))

    shape = (1, sizes.kernel) if reader.centered else (sizes.kernel, 1)
    conv = reader.exact(f"{part}.conv1d.weight", sizes.channels, *shape)
    return DeltaNet(
        spec=sizes,
        input_norm=reader.norm(f"{prefix}.input_layernorm.weight", hidden),
        qkv=linear(f"{part}.in_proj_qkv", sizes.channels),
        gate=linear(f"{part}.in_proj_z", sizes.values),
        rates=linear(f"{part}.in_proj_b", heads),
        steps=linear(f"{part}.in_proj_a", heads),
        conv=conv.reshape(sizes.channels, sizes.kernel).T,
        rate=-jnp.exp(reader.exact(f"{part}.A_log", heads)),
        dt_bias=reader.exact(f"{part}.dt_bias", heads),
        norm=Norm(reader.take(f"{part}.norm.weight", sizes.value_dim), spec.norm_eps),
        out=linear(f"{part}.out_proj", hidden, sizes.values),
        post_norm=reader.norm(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=(
            linear(f"{prefix}.mlp.gate_proj", inner, hidden, spec.mlp_bias),
            linear(f"{prefix}.mlp.up_proj", inner, hidden, spec.mlp_bias),
            linear(f"{prefix}.mlp.down_proj", hidden, inner, spec.mlp_bias),
        ),
    )
