"""The byte-level BPE tokenizer of a GGUF file, written out as the files that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_fn import errors

__all__ = ["write_tokenizer"]

CONTROL = 3
"""GGUF's token type of special tokens."""

SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def write_tokenizer(fields: dict[str, Any], folder: Path, *, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template included.

    Digits are split one by one and text by GPT-2's pattern, which is what the pre-tokenizer name `smollm` stands for.

    Args:
        fields: GGUF's metadata.
        folder: where to.
        context: positions that the model has.

    Raises:
        CheckpointError: the file describes another kind of tokenizer.
    """
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise errors.CheckpointError(f"GGUF tokenizer {kind}, expected ('gpt2', 'smollm')")
    make_tokenizer(fields).save(str(folder / "tokenizer.json"))
    text = json.dumps(make_config(fields, context), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def make_tokenizer(fields: dict[str, Any]) -> Any:
    """Return a `tokenizers.Tokenizer`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    left_right = (merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"])
    merges = [(left, right) for left, right in left_right]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def make_config(fields: dict[str, Any], context: int) -> dict[str, Any]:
    """Return tokenizer_config.json."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    ids = {name: fields.get(f"tokenizer.ggml.{key}") for name, key in SPECIAL.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    template = fields.get("tokenizer.chat_template")
    return config if template is None else {**config, "chat_template": template}
