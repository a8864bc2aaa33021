"""The records that say how to run a checkpoint: everything a decoder needs to know and nothing else."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["DecoderSpec", "DeltaSpec", "DraftSpec", "LayerKind", "RopeSpec", "TargetSpec"]


class LayerKind(enum.Enum):
    """What mixes tokens in a layer; the value is the word that config.json uses."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    DELTA = "linear_attention"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: what `dflash_fn.rope` needs for its tables.

    Attributes:
        kind: `default`, `linear`, `llama3` or `yarn`.
        theta: the base.
        dim: how many of a head's dimensions rotate (even).
        factor: how much longer the context became; 1 for `default`.
        original_max_position: context that the model was first trained with (`llama3`, `yarn`).
        low_freq_factor: `llama3` only.
        high_freq_factor: `llama3` only.
        beta_fast: `yarn` only.
        beta_slow: `yarn` only.
        attention_factor: what cos and sin are multiplied with (`yarn`); 1 elsewhere.
        truncate: `yarn` only: whether the correction range is rounded to whole dimensions.
    """

    kind: str
    theta: float
    dim: int
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Sizes of the gated delta nets of a hybrid, the same in all of its layers of that kind.

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values, a multiple of `key_heads`: that many follow each other with one query and key.
        key_dim: dimensions of a query or key.
        value_dim: dimensions of a value.
        kernel: tokens that the convolution sees, the current one included; at least 2.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Numbers in all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers in all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What goes through the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What targets and drafts have in common: a stack of pre-norm layers, each a token mixer and a gated MLP.

    Attributes:
        family: `llama`, `qwen3` or `qwen3_5`.
        hidden_size: H.
        intermediate_size: width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: dimensions of a head.
        vocab_size: V, rows of the embedding.
        max_context: positions that the model was made for.
        norm_eps: of every RMS norm.
        rope: the rotary embedding.
        layer_kinds: one a layer.
        sliding_window: tokens that a sliding layer sees, itself included; None where no layer slides.
        qk_norm: whether queries and keys are normalised a head (qwen3).
        attention_bias: whether the attention's projections have biases.
        mlp_bias: whether the MLP's projections have biases.
        dtype: the checkpoint's own, as config.json names it; `float32` where it does not.
        quantization: how the matrices are stored: `mlx`, or the method that config.json names; None for plain floats.
        delta: sizes of the gated delta nets; None where there are none.
        output_gate: whether attention multiplies its output with sigmoid of a second half of the query projection.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: RopeSpec
    layer_kinds: tuple[LayerKind, ...]
    sliding_window: int | None
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    quantization: str | None = field(default=None, kw_only=True)
    delta: DeltaSpec | None = field(default=None, kw_only=True)
    output_gate: bool = field(default=False, kw_only=True)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layer_kinds)

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """List the layers of a kind."""
        return tuple(layer for layer, other in enumerate(self.layer_kinds) if other is kind)


@dataclass(frozen=True, slots=True)
class TargetSpec(DecoderSpec):
    """A target's config.json, understood.

    Attributes:
        tied_head: whether the head is the embedding.
        eos_token_ids: ids that end an answer, from config and generation config; may be empty.
    """

    tied_head: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftSpec(DecoderSpec):
    """A DFlash draft's config.json, understood.

    Attributes:
        block_size: B that it was trained for, the anchor included.
        mask_token_id: id whose embedding fills the slots to be drafted.
        target_layer_ids: layers of the target that it reads, in the order in which they are concatenated.
        num_target_layers: depth of the target that it was trained for.
        causal: one a layer, whether slots of the block see only earlier ones.
        input_embedding_scale: what the block's embeddings are multiplied with.
        output_multiplier: what its logits are multiplied with.
        logit_softcap: its logits x become cap * tanh(x / cap); None for no cap.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    causal: tuple[bool, ...]
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
