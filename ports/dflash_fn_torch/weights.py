"""Weights from checkpoint folders and from models in memory, laid out for the decoder and checked against the spec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_fn import errors
from dflash_fn.config import DecoderSpec, DraftSpec, TargetSpec
from dflash_fn.sources import Source
from dflash_fn_torch.decoder import LayerWeights, TargetWeights
from dflash_fn_torch.draft import DraftWeights
from dflash_fn_torch.ops import Projection

__all__ = ["Reader", "open_reader", "read_draft", "read_target"]

IGNORED = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints carry and that follow from the config."""


@dataclass(slots=True)
class Reader:
    """Tensors by name, each checked as it is taken, so that what is left over can be named.

    Attributes:
        name: of the source, for messages.
        tensors: what is there.
        dtype: to hand out.
        device: to hand out on.
        from_files: whether the tensors are read from files; if so they are copied, and matrices with one input are
            joined. A model's own tensors are used as they are.
        left: names not taken yet.
    """

    name: str
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    device: str
    from_files: bool
    left: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.left = {name for name in self.tensors if not name.endswith(IGNORED)}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of exactly this shape, or raise CheckpointError."""
        if name not in self.tensors:
            raise errors.CheckpointError(f"{self.name}: no tensor {name!r}; the checkpoint does not fit its config")
        self.left.discard(name)
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise errors.CheckpointError(
                f"{self.name}: tensor {name!r} has shape {list(tensor.shape)}; its config asks for {list(shape)}"
            )
        # Tensors from files are views of mapped memory, which would change with the file: own weights are copies.
        return tensor.detach().to(device=self.device, dtype=self.dtype, copy=self.from_files)

    def projection(self, prefix: str, outputs: dict[str, int], inputs: int, *, bias: bool) -> Projection:
        """Return the matrices `prefix.name.weight` [outputs[name], inputs] as one projection."""
        weights = [self.take(f"{prefix}.{name}.weight", size, inputs) for name, size in outputs.items()]
        biases = [self.take(f"{prefix}.{name}.bias", size) for name, size in outputs.items()] if bias else None
        joined = (torch.cat(weights),) if self.from_files and len(weights) > 1 else tuple(weights)
        return Projection(joined, torch.cat(biases) if biases else None)

    def finish(self) -> None:
        """Raise CheckpointError if there are tensors that nobody asked for."""
        if self.left:
            some = ", ".join(sorted(self.left)[:3])
            raise errors.CheckpointError(
                f"{self.name}: {len(self.left)} tensors that its config gives no use for, such as {some}"
            )


@contextmanager
def open_reader(source: Source, dtype: torch.dtype, device: str) -> Iterator[Reader]:
    """Open a source's tensors.

    Raises:
        CheckpointError: no weight file, or one that safetensors cannot read.
    """
    if source.obj is not None:
        yield Reader(source.name, source.obj.state_dict(), dtype, device, from_files=False)
        return
    assert source.folder is not None
    yield Reader(source.name, _read_files(_weight_files(source.folder)), dtype, device, from_files=True)


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise errors.CheckpointError(f"{folder}: no *.safetensors file; expected a checkpoint in that format")
    return files


def _read_files(files: Iterable[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            # The tensors are views of the mapped file: nothing is read before it is needed.
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise errors.CheckpointError(f"{file}: not a whole safetensors file ({error}); fetch it again") from None
    return tensors


def read_target(source: Source, spec: TargetSpec, dtype: torch.dtype, device: str) -> TargetWeights:
    """Read a target's weight tree, in transformers' names.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    with open_reader(source, dtype, device) as reader:
        embedding = reader.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        layers = tuple(_read_layer(reader, spec, f"model.layers.{i}") for i in range(spec.num_layers))
        norm = reader.take("model.norm.weight", spec.hidden_size)
        if spec.tied_head:
            reader.left.discard("lm_head.weight")
            head = embedding
        else:
            head = reader.take("lm_head.weight", spec.vocab_size, spec.hidden_size)
        reader.finish()
    return TargetWeights(embedding, layers, norm, head)


def read_draft(source: Source, spec: DraftSpec, dtype: torch.dtype, device: str) -> DraftWeights:
    """Read a draft's weight tree, in upstream's names.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    hidden, taps = spec.hidden_size, len(spec.target_layer_ids)
    with open_reader(source, dtype, device) as reader:
        fuse = Projection((reader.take("fc.weight", hidden, taps * hidden),))
        context_norm = reader.take("hidden_norm.weight", hidden)
        layers = tuple(_read_layer(reader, spec, f"layers.{i}") for i in range(spec.num_layers))
        norm = reader.take("norm.weight", hidden)
        reader.finish()
    return DraftWeights(fuse, context_norm, layers, norm)


def _read_layer(reader: Reader, spec: DecoderSpec, prefix: str) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = reader.projection(
        attention, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, bias=spec.attention_bias
    )
    return LayerWeights(
        input_norm=reader.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=qkv,
        kv=_without_queries(qkv, queries),
        qk_norm=_qk_norm(reader, spec, attention) if spec.qk_norm else None,
        out=reader.projection(attention, {"o_proj": hidden}, queries, bias=spec.attention_bias),
        post_norm=reader.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.projection(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, bias=spec.mlp_bias),
        down=reader.projection(mlp, {"down_proj": hidden}, inner, bias=spec.mlp_bias),
    )


def _without_queries(qkv: Projection, queries: int) -> Projection:
    weights = (qkv.weights[0][queries:],) if len(qkv.weights) == 1 else qkv.weights[1:]
    return Projection(weights, None if qkv.bias is None else qkv.bias[queries:])


def _qk_norm(reader: Reader, spec: DecoderSpec, attention: str) -> Tensor:
    q = reader.take(f"{attention}.q_norm.weight", spec.head_dim)
    k = reader.take(f"{attention}.k_norm.weight", spec.head_dim)
    return torch.cat([q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)])
