"""A tokenizer of single characters with a chat template, for the tiny targets."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHARACTERS", "TEMPLATE", "write_tokenizer"]

SPECIAL = ("<end>", "<user>", "<bot>", "<mask>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,:?!0123456789\n="
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}"
    "{{ '<end>' if m['role'] != 'user' }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% if enable_thinking is defined and not enable_thinking %}={% endif %}"
    "{% endif %}"
)
"""Ends answers, and has the switch for thinking."""


def write_tokenizer(folder: Path) -> Path:
    """Write it into a checkpoint folder of a vocabulary of 48, and return the folder. Id 3 is the tiny drafts' mask."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="."))
    words.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    words.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    words.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", chat_template=TEMPLATE)
    made.save_pretrained(folder)
    return folder
