"""Loading the pair that the flags name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dflash_fn.cli import signals, terminal
from dflash_fn.cli.options import Options, PairOptions
from dflash_fn.errors import InputError
from dflash_fn.proposers import PROPOSERS, own_block

if TYPE_CHECKING:
    from dflash_fn.records import Pair, Proposer

__all__ = ["asks_for_draft", "block_and_width", "open_pair", "proposer_of"]


def open_pair(options: PairOptions, *, needs_draft: str = "", needs_text: bool = True, proposers: bool = False) -> Pair:
    """Load a pair, showing on stderr what goes on.

    Args:
        options: which one.
        needs_draft: what asks for a draft, such as "--check compares with and without a draft", or nothing.
        needs_text: whether it must have a tokenizer.
        proposers: whether `--draft ngram` and `--draft both` make sense; with `ngram` no draft is loaded.

    Raises:
        DflashError: of whatever kind `load_pair` and the zoo raise.
    """
    from dflash_fn import load_pair

    if options.word and not proposers:
        raise InputError(f"--draft {options.word}: expected a folder or hub id; that word is for generate and bench")
    name = options.zoo_name
    with terminal.status(f"loading {name or options.target}") as shown:
        target, draft = _folders(name, _reporter(shown)) if name else (options.target, None)
        draft = None if options.word == "ngram" else options.place or draft
        if options.word == "both" and draft is None:
            raise InputError("--draft both asks a draft where n-grams know nothing; there is none, use --draft ngram")
        if needs_draft and draft is None:
            raise InputError(f"{needs_draft}; there is none, give one by --draft")
        with signals.at_once():
            pair = load_pair(
                target,
                draft,
                port=options.port,
                dtype=options.dtype,
                device=options.device,
                compile=options.compile,
                device_map=options.device_map,
                mesh=options.tensor_parallel,
                name=name if name and not options.place else _name(options),
            )
    _quieten()
    if needs_text and pair.tokenizer is None:
        raise InputError(f"target {options.target}: the folder holds no tokenizer, which text needs")
    return pair


def _quieten() -> None:
    """Silence what transformers says of a long prompt: whether it fits is checked, and told in an error."""
    logging.getLogger("transformers.tokenization_utils_base").addFilter(_is_no_length_warning)


def _is_no_length_warning(record: logging.LogRecord) -> bool:
    return "sequence length is longer than" not in record.getMessage()


def _folders(name: str, report: Callable[[str], None]) -> tuple[Path, Path | None]:
    from dflash_fn import zoo

    files = zoo.fetch(name, report=report)
    return files.target, files.draft


def _reporter(shown: terminal.Status | None) -> Callable[[str], None]:
    return shown.update if shown is not None else partial(typer.echo, err=True)


def _name(options: PairOptions) -> str:
    target = options.zoo_name or options.target or ""
    return f"{target} + {options.place}" if options.place else target


def proposer_of(options: PairOptions) -> Proposer | None:
    """Return what `--draft ngram` or `--draft both` names; None where the pair's draft guesses."""
    return PROPOSERS[options.word]() if options.word else None


def asks_for_draft(options: Options) -> str:
    """Return which of the flags of a run makes no sense without a draft, and why; "" if none does."""
    if options.load.word:
        return ""
    if options.check:
        return "--check compares with and without a draft"
    if options.block_size not in (None, 1):
        return f"--block-size {options.block_size} needs a draft to fill the block"
    return ""


def block_and_width(options: Options, pair: Pair) -> tuple[int, int]:
    """Return the block size and the width to decode with; a width that was not given leaves room for the block.

    Raises:
        InputError: the port does not verify that many, or the width has no room for the draft's own block size.
    """
    given = options.given_block
    block = given if given is not None else own_block(pair, proposes=options.load.word is not None)
    name = "--block-size" if given is not None else "the draft's block size"
    _check_most(pair, name, block, flag="--block-size")
    width = options.width if options.width is not None else min(max(block, pair.block_size), pair.port.max_width)
    _check_most(pair, "--width", width, flag="--width")
    if width < block:
        raise InputError(
            f"--width {width} is below the draft's block size {block}; "
            f"give --width {block} or more, or --block-size {width} or less"
        )
    return block, width


def _check_most(pair: Pair, name: str, value: int, *, flag: str) -> None:
    most = pair.port.max_width
    if value > most:
        raise InputError(
            f"{name} is {value}; port {pair.port.name} verifies {most} tokens at most, give {flag} {most} or less"
        )
