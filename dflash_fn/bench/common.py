"""Pairs, prompts as tokens and tables that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_fn import errors, zoo
from dflash_fn.load import load_pair
from dflash_fn.records import Pair
from dflash_fn.text import encoded

__all__ = ["add_pair_options", "folders", "load", "markdown", "prompt_ids", "track"]


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


def track(items: Sequence[Any], what: str) -> Iterator[Any]:
    """Go over items with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import track as bar

    yield from bar(items, description=what, console=Console(stderr=True))


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
