"""A small target to train from scratch: a model of transformers, its first weights, and how it grows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name that everyone knows)
from torch import Tensor

from dflash_fn.train.options import TargetOptions
from dflash_fn.train.order import normal, numbers

__all__ = ["deepened", "fit_bigrams", "make"]

SILENT = ("o_proj", "down_proj", "out_proj")
"""Matrices that begin at zero, so that a new layer changes nothing yet."""

SMOOTHING = 0.05
"""Share of the token frequencies in the smoothed law of pairs."""

BIGRAM_RATE = 0.01


def make(options: TargetOptions, vocab_size: int, layers: int, seed: int) -> Any:
    """Return a causal language model of transformers with our own first weights, which no global generator draws."""
    model = _new(options, vocab_size, layers).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in SILENT):
                weight.zero_()
            elif name.endswith("A_log"):
                decay = 1.0 + 15.0 * numbers(seed, f"target {name}", 0, weight.numel())
                weight.copy_(torch.from_numpy(np.log(decay)))
            elif weight.dim() >= 2:
                spread = 0.5 if "embed_tokens" in name else weight[0].numel() ** -0.5
                weight.copy_(torch.from_numpy(normal(seed, f"target {name}", *weight.shape) * spread))
    return model


def _new(options: TargetOptions, vocab_size: int, layers: int) -> Any:
    """Return a model whose weights are yet to be set; the global generator that transformers draws from is put back."""
    with torch.random.fork_rng(devices=[]):
        return _made(options, vocab_size, layers)


def _made(options: TargetOptions, vocab_size: int, layers: int) -> Any:
    common = {
        "vocab_size": vocab_size,
        "hidden_size": options.hidden,
        "intermediate_size": options.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "max_position_embeddings": options.max_context,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if options.architecture == "qwen3":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        rope = {"rope_type": "default", "rope_theta": options.rope_theta}
        return Qwen3ForCausalLM(Qwen3Config(**common, rope_parameters=rope))
    return _new_hybrid(options, common, layers)


def _new_hybrid(options: TargetOptions, common: dict[str, Any], layers: int) -> Any:
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    kinds = ["linear_attention" if (i + 1) % options.full_every else "full_attention" for i in range(layers)]
    rope = {"rope_type": "default", "rope_theta": options.rope_theta, "partial_rotary_factor": 0.25}
    config = Qwen3_5TextConfig(
        **common,
        layer_types=kinds,
        rope_parameters=rope,
        linear_num_key_heads=options.linear_heads,
        linear_num_value_heads=options.linear_heads,
        linear_key_head_dim=options.linear_dim,
        linear_value_head_dim=options.linear_dim,
    )
    return Qwen3_5ForCausalLM(config)


@torch.no_grad()
def deepened(small: Any, options: TargetOptions) -> tuple[Any, dict[str, str]]:
    """Return a model of all layers, and which of its weights were copied from which of the small one's.

    Layer i is a copy of layer i % n. Its outputs are divided by the number of copies, so that together they add about
    what one layer added.
    """
    count = small.config.num_hidden_layers
    copies = options.layers / count
    deep, weights = _new(options, small.config.vocab_size, options.layers).train(), dict(small.named_parameters())
    origin = {}
    for name, weight in deep.named_parameters():
        origin[name] = _shallow(name, count)
        share = 1.0 / copies if any(part in name for part in SILENT) else 1.0
        weight.copy_(weights[origin[name]] * share)
    return deep, origin


def _shallow(name: str, count: int) -> str:
    head, found, rest = name.partition("layers.")
    if not found:
        return name
    layer, _, part = rest.partition(".")
    return f"{head}layers.{int(layer) % count}.{part}"


def fit_bigrams(model: Any, stream: np.ndarray, steps: int) -> None:
    """Fit embedding and head to which token follows which, before any layer says anything.

    The start is a factorisation of the smoothed log probabilities; then some full-batch steps of Adam through the
    model's own final norm. It saves the first hundred thousand tokens of training.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    counts = _pair_counts(stream, len(embedding))
    with torch.no_grad():
        for weight, made in zip((embedding, head), _factors(counts, embedding.shape[1]), strict=True):
            weight.copy_(made)
    share = counts / counts.sum()
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in (embedding, head)]
    for step in range(steps):
        logits = F.linear(model.model.norm(embedding), head)
        loss = -(share * torch.log_softmax(logits, dim=-1)).sum()
        grads = torch.autograd.grad(loss, (embedding, head))
        rate = BIGRAM_RATE * (1.0 - step / steps)
        for weight, grad, (first, second) in zip((embedding, head), grads, moments, strict=True):
            _adam(weight, grad, first, second, step, rate)


def _pair_counts(stream: np.ndarray, vocab: int) -> Tensor:
    pairs = stream[:-1].astype(np.int64) * vocab + stream[1:]
    return torch.from_numpy(np.bincount(pairs, minlength=vocab * vocab).astype(np.float32)).view(vocab, vocab)


def _factors(counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return embedding and head whose product is about the log probabilities, rows of the first of unit size."""
    frequent = (counts.sum(dim=0) + 1.0) / (counts.sum() + len(counts))
    law = (counts + SMOOTHING * len(counts) * frequent) / (counts.sum(dim=1, keepdim=True) + SMOOTHING * len(counts))
    logs = law.log()
    left, sizes, right = torch.linalg.svd(logs - logs.mean(dim=1, keepdim=True), full_matrices=False)
    missing = max(0, rank - len(sizes))
    rows, wide = (F.pad(part[:, :rank] * sizes[:rank].sqrt(), (0, missing)) for part in (left, right.T))
    scale = rows.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-3)
    return rows / scale, wide * scale.mean()


@torch.no_grad()
def _adam(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: int, rate: float) -> None:
    first.lerp_(grad, 0.1)
    second.mul_(0.95).addcmul_(grad, grad, value=0.05)
    root = (second / (1.0 - 0.95 ** (step + 1))).sqrt_().add_(1e-10)
    weight.addcdiv_(first, root, value=-rate / (1.0 - 0.9 ** (step + 1)))
