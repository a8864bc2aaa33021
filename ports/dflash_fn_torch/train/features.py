"""What a draft reads of its target: hidden states of tapped layers, and the final one, computed by transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from dflash_fn.sources import read_config
from dflash_fn.train.texts import Texts
from dflash_fn_torch.train.checkpoint import read_named

__all__ = ["Ends", "hidden_states", "load_model", "padded", "read_ends", "text_config", "unpacked", "write"]

TOGETHER = 4096
"""Tokens that the target reads at once."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends of a target, which its draft uses: [V, H] each; `head` is `embedding` where they are tied."""

    embedding: Tensor
    head: Tensor


def text_config(folder: Path) -> dict[str, Any]:
    """Return a target's config, or the part that describes its language model."""
    config = read_config(folder)
    return config.get("text_config") or config


def read_ends(folder: Path, device: str) -> Ends:
    """Read embedding and head."""
    found = read_named(folder, "embed_tokens.weight", "lm_head.weight")
    embedding = found["embed_tokens.weight"].to(device)
    head = found.get("lm_head.weight")
    return Ends(embedding, embedding if head is None else head.to(device))


def load_model(folder: Path, device: str) -> Any:
    """Load a target by transformers, in float32, to be read only."""
    from transformers import AutoModelForCausalLM

    with _no_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.to(device).eval().requires_grad_(False)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers from drawing bars of its own between ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@torch.no_grad()
def hidden_states(
    model: Any, ids: Integer[Tensor, "texts length"], taps: tuple[int, ...]
) -> Float[Tensor, "texts length states"]:
    """Return the tapped layers' outputs, then the final hidden state, side by side.

    Texts are padded at their ends: a causal target's states there concern nobody.
    """
    out = model.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    return torch.cat([*(out.hidden_states[tap + 1] for tap in taps), out.last_hidden_state], dim=-1)


def padded(texts: Texts, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return some texts side by side, [n, longest] int64 filled up with zeros, and their lengths, [n]."""
    rows = [texts[int(index)] for index in indices]
    lengths = np.array([len(row) for row in rows])
    made = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
    for row, ids in zip(made, rows, strict=True):
        row[: len(ids)] = ids
    return made, lengths


def write(
    model: Any, texts: Texts, taps: tuple[int, ...], out: np.ndarray, first: int, advance: Callable[[int], bool]
) -> None:
    """Fill `out`; see `dflash_fn.train.trainer.Trainer.write_features`."""
    device = next(model.parameters()).device
    for group in _groups(texts, first):
        ids, lengths = padded(texts, group)
        states = hidden_states(model, torch.from_numpy(ids).to(device), taps).cpu()
        for row, index, length in zip(states, group, lengths, strict=True):
            place = slice(int(texts.offsets[index]), int(texts.offsets[index + 1]))
            out[place] = _packed(row[: int(length)], out.dtype)
        if not advance(int(group[-1]) + 1):
            return


def _groups(texts: Texts, first: int) -> Iterator[np.ndarray]:
    """Yield indices of texts that are read together: as many as fit, padding included."""
    begin, longest = first, 0
    for index in range(first, len(texts)):
        longest = max(longest, int(texts.lengths[index]))
        if index > begin and longest * (index - begin + 1) > TOGETHER:
            yield np.arange(begin, index)
            begin, longest = index, int(texts.lengths[index])
    if begin < len(texts):
        yield np.arange(begin, len(texts))


def _packed(states: Tensor, dtype: np.dtype) -> np.ndarray:
    return states.to(torch.bfloat16).view(torch.uint16).numpy() if dtype == np.uint16 else states.numpy()


def unpacked(features: np.ndarray, texts: Texts, indices: np.ndarray, length: int) -> Tensor:
    """Read some texts' states from a cache, filled up with zeros to `length`: [n, length, states] float32."""
    made = torch.zeros(len(indices), length, features.shape[1])
    for row, index in zip(made, indices, strict=True):
        values = torch.from_numpy(np.array(features[texts.offsets[index] : texts.offsets[index + 1]]))
        row[: len(values)] = values.view(torch.bfloat16) if values.dtype == torch.uint16 else values
    return made
