"""Small random models in transformers' and upstream's classes, and what they say: the other side of parity tests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from dflash_fn.records import Model, Pair

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIGS: dict[str, Any] = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
MASK_TOKEN = 3

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""With weights of deviation 0.2 and 32 inputs, a product is about as large as what goes into it."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
BIASES = {"attention_bias": True}
SLIDING = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {**BIASES, "mlp_bias": True},
    "llama-llama3": {"rope_parameters": LLAMA3},
    "llama-linear": {"rope_parameters": LINEAR},
    "llama-yarn": {"rope_parameters": YARN},
    "llama-wide-heads": {"head_dim": 12},
    "llama-groups-of-1": {"num_key_value_heads": 4},
    "llama-groups-of-3": {"hidden_size": 36, "num_attention_heads": 6},
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen3-biases": BIASES,
    "qwen3-llama3": {"rope_parameters": LLAMA3},
    "qwen3-linear": {"rope_parameters": LINEAR},
    "qwen3-yarn": {"rope_parameters": YARN},
    "qwen3-wide-heads": {"head_dim": 20},
    "qwen3-groups-of-1": {"num_key_value_heads": 4},
    "qwen3-groups-of-3": {"num_attention_heads": 6},
    "qwen3-sliding": SLIDING,
}
"""By name; what comes before the first dash is the family."""

MIXED_KINDS = ["full_attention", "sliding_attention", "full_attention"]
MIXED = {"layer_types": MIXED_KINDS, "use_sliding_window": True, "sliding_window": 6}
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_parameters": YARN},
    "sliding": MIXED,
    "sliding-both-ways": {**MIXED, "is_causal": False},
    "causal": {"is_causal": True},
    "biases": BIASES,
    "scaled": {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 6.0},
}
"""By name: options of drafts in upstream's format."""


def tiny_target(name: str, seed: int, **changes: Any) -> Any:
    """Build a variant of `TARGETS` with random weights, biases and norms."""
    options = {**SIZES, **TARGETS[name], **changes}
    return random_model(CONFIGS[name.partition("-")[0]](**options), seed)


def random_model(config: Any, seed: int) -> Any:
    """Build a causal language model whose every weight is random, those of norms and biases too."""
    torch.manual_seed(seed)
    return scattered(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), seed)


def scattered(model: Any, seed: int) -> Any:
    """Move norms away from 1 and biases away from 0, where transformers starts them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return model


def tiny_draft(upstream: ModuleType, name: str, target: Any, seed: int, block_size: int, **changes: Any) -> Any:
    """Build a variant of `DRAFTS` for a target, in upstream's class."""
    depth = target.config.num_hidden_layers
    sizes = {**SIZES, "num_hidden_layers": 3, "hidden_size": target.config.hidden_size}
    block = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 2, depth - 1]}
    options = {"num_target_layers": depth, "block_size": block_size, "dflash_config": block}
    config = transformers.Qwen3Config(**{**sizes, **options, **DRAFTS[name], **changes})
    torch.manual_seed(seed)
    return scattered(upstream.DFlashDraftModel(config).eval(), seed)


@torch.no_grad()
def agreeing_pair(upstream: ModuleType, family: str, seed: int, block_size: int) -> tuple[Any, Any]:
    """Build a target that likes to repeat its last token, and a draft that guesses what its context holds most of.

    The target's head is its embedding and its layers say little, so the token at hand scores highest. The draft's
    first attention averages the last tapped layer over the context, as it came (identities for fc, V and O, heads of
    one group sharing the work), and its other sublayers say little. So blocks are accepted wholly, partly and not at
    all.
    """
    target = tiny_target(f"{family}-tied", seed)
    draft = tiny_draft(upstream, "plain", target, seed + 1000, block_size, head_dim=16)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.5)
        layer.mlp.down_proj.weight.mul_(0.5)
    for layer in draft.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    hidden = draft.config.hidden_size
    attention = draft.layers[0].self_attn
    same = torch.eye(hidden)
    draft.fc.weight.copy_(torch.cat([torch.zeros(hidden, 2 * hidden), same], dim=1))
    attention.v_proj.weight.copy_(same)
    first, second = same.chunk(2, dim=1)
    attention.o_proj.weight.copy_(4.0 * torch.cat([first, first, second, second], dim=1))
    return target, draft


@dataclass(frozen=True)
class Said:
    """What a target computes for each token of a text.

    Attributes:
        hidden: one [T, H] a layer, that of the last after the final norm.
        logits: [T, V].
    """

    hidden: tuple[Tensor, ...]
    logits: Tensor


@torch.inference_mode()
def said_by_transformers(model: Any, ids: Sequence[int]) -> Said:
    """Run a text in one forward pass."""
    out = model(torch.tensor([ids]), output_hidden_states=True)
    return Said(tuple(h[0] for h in out.hidden_states[1:]), out.logits[0])


def said_by_port(pair: Pair, ids: Sequence[int], chunks: Sequence[int]) -> Said:
    """Run a text in chunks of these lengths, each over the cache that the ones before left."""
    port, target = pair.port, pair.target
    cache = port.new_cache(target, len(ids))
    taps = tuple(range(target.spec.num_layers))
    features, logits, first = [], [], 0
    for size in chunks:
        tokens = torch.tensor([ids[first : first + size]])
        made = port.target_pass(target, cache, tokens, taps=taps, head=True, exact_rows=False)
        cache, first = port.select(made.family, (size,)), first + size
        assert made.features is not None
        assert made.logits is not None
        features.append(made.features[0])
        logits.append(made.logits[0])
    assert first == len(ids)
    return Said(torch.cat(features).chunk(len(taps), dim=-1), torch.cat(logits))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two [T, N] tensors, relative to the largest magnitude in its row."""
    mine, other = ours.double(), theirs.double()
    return float(((mine - other).abs() / other.abs().amax(dim=-1, keepdim=True)).max())


def rms_distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the root mean square of the same relative differences."""
    mine, other = ours.double(), theirs.double()
    return float(((mine - other) / other.abs().amax(dim=-1, keepdim=True)).square().mean().sqrt())


def in_dtype(model: Any, dtype: str) -> Any:
    """Copy a model into another dtype."""
    return copy.deepcopy(model).to(getattr(torch, dtype))


def draft_logits_by_port(pair: Pair, features: Tensor, block: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Let the draft read [T, L * H] features in chunks and fill a block: [B - 1, V]."""
    port = pair.port
    draft: Model[Any] | None = pair.draft
    assert draft is not None
    cache, first = port.new_cache(draft, len(features)), 0
    for size in chunks:
        part = features[None, first : first + size]
        cache, first = port.draft_context(draft, cache, part, (size,), exact_rows=False), first + size
    assert first == len(features)
    return port.draft_pass(draft, pair.target, cache, torch.tensor([block]), exact_rows=False)[0]


@torch.inference_mode()
def draft_logits_by_upstream(draft: Any, target: Any, features: Tensor, block: Sequence[int]) -> Tensor:
    """Fill the same block by upstream's forward, without a cache: [B - 1, V]."""
    scale = float(getattr(draft.config, "input_embedding_scale", 1.0))
    embedded = target.get_input_embeddings()(torch.tensor([block])) * scale
    positions = torch.arange(len(features) + len(block))[None]
    hidden = draft(target_hidden=features[None], noise_embedding=embedded, position_ids=positions)
    return draft.compute_logits(hidden[:, 1:], target.lm_head)[0]
