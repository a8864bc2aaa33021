"""A byte-level BPE, made from a corpus, in the file format of `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn import errors
from dflash_fn.train.files import write_json

__all__ = ["END", "MASK", "encode", "make", "write"]

END = "<|endoftext|>"
"""The special token with the id 0, after each text."""

MASK = "<|mask|>"
"""The special token with the id 1, which fills a block's slots."""

SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""What a token never crosses: words with what stands before them, single digits, signs, line ends with the space
before them, indents less their last space."""


def make(texts: Iterable[str], vocab_size: int, *, most_bytes: int) -> Any:
    """Return a `tokenizers.Tokenizer` of `vocab_size` tokens.

    Args:
        texts: to count pairs in.
        vocab_size: with all 256 bytes and the special tokens.
        most_bytes: of text after which no more is read.

    Raises:
        InputError: too little text for that many tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=vocab_size,
        special_tokens=[END, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(_up_to(texts, most_bytes), trainer)
    if made.get_vocab_size() != vocab_size:
        raise errors.InputError(
            f"corpus.vocab_size: got {vocab_size}; the text has pairs for {made.get_vocab_size()} tokens only"
        )
    return made


def _up_to(texts: Iterable[str], most: int) -> Iterator[str]:
    given = 0
    for text in texts:
        if given >= most:
            return
        given += len(text.encode())
        yield text


def write(tokenizer: Any, folder: Path, *, max_context: int) -> None:
    """Write tokenizer.json and the config that transformers reads beside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "mask_token": MASK,
            "model_max_length": max_context,
            "clean_up_tokenization_spaces": False,
        },
    )


def encode(tokenizer: Any, texts: Iterable[str]) -> np.ndarray:
    """Return one stream of tokens: each text, and the end token after it.

    Returns:
        [T] uint16 where the vocabulary allows, else int32.
    """
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32
    end = tokenizer.token_to_id(END)
    rows = (np.array([*found.ids, end], dtype=dtype) for found in tokenizer.encode_batch(list(texts)))
    return np.concatenate([np.zeros(0, dtype=dtype), *rows])
