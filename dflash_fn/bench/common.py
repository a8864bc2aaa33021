"""Pairs, prompts as tokens and tables that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_fn import errors, text, zoo
from dflash_fn.load import load_pair
from dflash_fn.records import Pair

__all__ = ["add_pair_options", "conversation_ids", "encoded", "folders", "load", "markdown", "prompt_ids", "track"]


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what to load and which prompts to use."""
    parser.add_argument("--pair", default="tiny-code", help="a zoo name")
    parser.add_argument("--draft", help="a draft's folder or hub id, in place of the pair's own")
    parser.add_argument("--port", default="torch")
    parser.add_argument("--compile", action="store_true", help="run on kernels compiled for this machine")
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE[:FIRST[-LAST]]", help="JSONL files and rows")
    parser.add_argument("--raw", action="store_true", help="no chat template")


def load(options: argparse.Namespace, dtype: str) -> Pair:
    """Load the pair that the options name."""
    target, draft = folders(options)
    return load_pair(target, draft, port=options.port, dtype=dtype, compile=options.compile, name=options.pair)


def folders(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the folders of the target and the draft that the options name.

    Raises:
        InputError: the pair has no draft, and none is given.
    """
    files = zoo.fetch(options.pair)
    draft = options.draft or files.draft
    if draft is None:
        raise errors.InputError(f"{options.pair} has no draft of its own; give one by --draft FOLDER")
    return files.target, Path(draft)


def prompt_ids(pair: Pair, prompt: str, *, raw: bool) -> list[int]:
    """Return a prompt's token ids, in the chat template if the tokenizer has one and `raw` is False."""
    return encoded(pair.tokenizer, prompt, raw=raw)


def encoded(tokenizer: Any, prompt: str, *, raw: bool) -> list[int]:
    """Return a prompt's token ids, in the chat template if there is one and `raw` is False."""
    return conversation_ids(tokenizer, [{"role": "user", "content": prompt}], raw=raw)


def conversation_ids(
    tokenizer: Any, messages: Sequence[text.Message], *, raw: bool = False, thinking: bool | None = None
) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    Args:
        tokenizer: a transformers tokenizer.
        messages: the conversation, last message by the user.
        raw: whether the messages are lines of one text that is to go on, as they are for a tokenizer without a
            template.
        thinking: see `dflash_fn.text.chat_prompt`.

    Raises:
        InputError: the template refuses the messages, or thinking is asked of a template without a switch for it, or
            of a tokenizer without a template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if thinking is not None and not raw and not has_template:
        raise errors.InputError(
            "thinking: is a switch of chat templates, and the tokenizer has none; leave --thinking and --no-thinking "
            "out"
        )
    if raw or not has_template:
        return list(tokenizer.encode("\n".join(message["content"] for message in messages)))
    return text.chat_prompt(tokenizer, messages, thinking=thinking)


def track(items: Sequence[Any], what: str) -> Iterator[Any]:
    """Go over items with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import track as bar

    yield from bar(items, description=what, console=Console(stderr=True))


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
