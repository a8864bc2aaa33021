"""States and traces in files: what `--resume`, `--save-state` and `trace` read and write."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_fn import container, zoo
from dflash_fn.cli import terminal
from dflash_fn.cli.answer import extended
from dflash_fn.cli.options import Options, PairOptions
from dflash_fn.errors import InputError
from dflash_fn.proposers import own_block
from dflash_fn.records import StopReason
from dflash_fn.text import Message, next_turn

if TYPE_CHECKING:
    from dflash_fn.records import DecodeState, Pair

__all__ = ["block_size", "gone_on", "of_file", "pair_of", "past", "resumed", "save", "text_of"]


def of_file(load: PairOptions, header: Mapping[str, Any], path: str) -> PairOptions:
    """Return the pair to load: where flags leave it open, the pair and the dtype that a file was made with.

    Raises:
        InputError: the file's pair has no name in the zoo, and no flag names it.
    """
    load = replace(load, dtype=load.dtype or header["dtype"])
    if load.pair is not None or load.target is not None:
        return load
    if header["pair"] in zoo.names():
        return replace(load, pair=header["pair"])
    raise InputError(f"{path}: was made with {header['pair']!r}, which is no zoo pair; name it by --target and --draft")


def pair_of(options: Options) -> PairOptions:
    """Return the pair to load: that of the flags, or of the file of `--resume`, which is read and checked first.

    Raises:
        StateFileError: no such file, not one of ours, cut or edited.
        InputError: it has several rows, where the command line has one; or a flag asks for what it is not.
    """
    path, load = options.resume, options.load
    if path is None:
        return load
    header, _ = container.read(Path(path), "state")
    if len(header["seed"]) != 1:
        raise InputError(f"--resume {path}: holds {len(header['seed'])} rows; the command line goes on from one")
    if load.dtype not in (None, header["dtype"]):
        raise InputError(f"--resume {path}: was saved in {header['dtype']}, got --dtype {load.dtype}; leave that out")
    if (options.given_block or 0) > header["width"]:
        raise InputError(
            f"--resume {path}: was saved with width {header['width']}, which has no room for "
            f"--block-size {options.block_size}"
        )
    return of_file(load, header, path)


def resumed(options: Options, pair: Pair) -> tuple[DecodeState, float]:
    """Return the state of `--resume`, and the seconds that it took to read.

    Raises:
        StateFileError: it is of another pair.
    """
    from dflash_fn import load_state

    started = time.perf_counter()
    state = load_state(options.resume or "", pair)
    return state, time.perf_counter() - started


def gone_on(
    state: DecodeState, pair: Pair, text: str | None, *, raw: bool, seconds: float
) -> tuple[DecodeState, float]:
    """Return the state to answer from: a saved one, with more text where there is some.

    Raises:
        InputError: nothing is added, and the state has ended.
    """
    if text is None:
        if state.stop[0] in (StopReason.STOP_TOKEN, StopReason.CONTEXT):
            raise InputError(f"the saved state has ended ({state.stop[0].value}); give a prompt to add to it")
        return state, seconds
    if raw:
        ids = pair.tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = next_turn(pair.tokenizer, past(state, pair), text, state.tokens[0])
    state, more = extended(pair, state, ids)
    return state, seconds + more


def past(state: DecodeState, pair: Pair) -> tuple[Message, Message]:
    """Return a conversation that stands for a saved one: who said what is not in the file, and need not be.

    `next_turn` then writes what the chat template writes after an answer.
    """
    text = text_of(state, pair)
    return {"role": "user", "content": text}, {"role": "assistant", "content": text}


def text_of(state: DecodeState, pair: Pair) -> str:
    """Return all the text of a state."""
    return pair.tokenizer.decode(list(state.tokens[0]), skip_special_tokens=True)


def block_size(options: Options, pair: Pair, state: DecodeState) -> int:
    """Return the block size to go on with: the draft's own, unless that is more than the state's width."""
    if options.given_block is not None:
        return options.given_block
    return min(own_block(pair, proposes=options.load.word is not None), state.width)


def save(options: Options, state: DecodeState, pair: Pair) -> None:
    """Do what `--save-state` asks for, if it is there."""
    from dflash_fn import save_state

    if options.save_state is not None:
        save_state(options.save_state, state, pair)
        if not options.json:
            terminal.console().print(f"state saved to {options.save_state}")
