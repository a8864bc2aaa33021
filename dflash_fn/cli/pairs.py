"""Loading the pair that the flags name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dflash_fn.cli import terminal
from dflash_fn.cli.options import Options, PairOptions
from dflash_fn.errors import InputError

if TYPE_CHECKING:
    from dflash_fn.records import Pair

__all__ = ["block_and_width", "open_pair"]


def open_pair(options: PairOptions, *, needs_draft: str = "", needs_text: bool = True) -> Pair:
    """Load a pair, showing on stderr what goes on.

    Args:
        options: which one.
        needs_draft: the flag that makes no sense without a draft, or nothing.
        needs_text: whether it must have a tokenizer.

    Raises:
        DflashError: of whatever kind `load_pair` and the zoo raise.
    """
    from dflash_fn import load_pair

    name = options.zoo_name
    with terminal.status(f"loading {name or options.target}") as shown:
        target, draft = _folders(name, _reporter(shown)) if name else (options.target, None)
        draft = options.draft or draft
        if needs_draft and draft is None:
            raise InputError(f"{needs_draft} compares with and without a draft; give one by --draft")
        pair = load_pair(
            target,
            draft,
            port=options.port,
            dtype=options.dtype,
            device=options.device,
            name=name if name and not options.draft else _name(options),
        )
    if needs_text and pair.tokenizer is None:
        raise InputError(f"target {options.target}: the folder holds no tokenizer, which text needs")
    return pair


def _folders(name: str, report: Callable[[str], None]) -> tuple[Path, Path | None]:
    from dflash_fn import zoo

    files = zoo.fetch(name, report=report)
    return files.target, files.draft


def _reporter(shown: terminal.Status | None) -> Callable[[str], None]:
    return shown.update if shown is not None else partial(typer.echo, err=True)


def _name(options: PairOptions) -> str:
    target = options.zoo_name or options.target or ""
    return f"{target} + {options.draft}" if options.draft else target


def block_and_width(options: Options, pair: Pair) -> tuple[int, int]:
    """Return the block size and the width to decode with; a width that was not given leaves room for the block.

    Raises:
        InputError: the width has no room for the draft's own block size.
    """
    block = options.block_size if options.block_size is not None else pair.block_size
    width = options.width if options.width is not None else max(block, pair.block_size)
    if width < block:
        raise InputError(
            f"--width {width} is below the draft's block size {block}; "
            f"give --width {block} or more, or --block-size {width} or less"
        )
    return block, width
