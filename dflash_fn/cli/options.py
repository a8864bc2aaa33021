"""What the user asked `generate` or `trace record` for, and the checks that need no weights."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dflash_fn.cli import stdin
from dflash_fn.cli.policy import PolicyOptions
from dflash_fn.container import check_file_place
from dflash_fn.errors import CacheFolderError, InputError
from dflash_fn.proposers import PROPOSERS

__all__ = ["AUTO", "DTYPES", "Options", "PairOptions", "check_load", "check_options", "check_place", "read_prompt"]

AUTO = "auto"
"""The word in place of a block size that lets `pacing.auto` choose."""

DTYPES = ("float32", "bfloat16", "float16")

DEFAULT_PAIR = "tiny-code"


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Which pair to load, and onto what.

    Attributes:
        pair: a zoo name; None takes the default, or `target`.
        target: a folder or hub id, in place of a zoo pair.
        draft: a folder or hub id; with a zoo pair it takes the place of the pair's own. Or one of the words of
            `dflash_fn.proposers`.
        port: as registered.
        dtype: of the weights; None leaves it to the port.
        device: the port's name of it; None leaves it to the port.
        compile: whether to run on kernels compiled for this machine.
        device_map: how a target's layers are spread over devices; None for one device.
        tensor_parallel: processes that share each layer; None for one process.
    """

    pair: str | None = None
    target: str | None = None
    draft: str | None = None
    port: str = "torch"
    dtype: str | None = None
    device: str | None = None
    compile: bool = False
    device_map: str | None = None
    tensor_parallel: int | None = None

    @property
    def zoo_name(self) -> str | None:
        """The zoo pair that is meant, or None where a target is given."""
        return None if self.target else self.pair or DEFAULT_PAIR

    @property
    def word(self) -> str | None:
        """What guesses in place of the draft, or with it, where no place is given but `ngram` or `both`."""
        return self.draft if self.draft in PROPOSERS else None

    @property
    def place(self) -> str | None:
        """The folder or hub id of a draft, where one is given."""
        return None if self.word else self.draft


@dataclass(frozen=True, slots=True)
class Options:
    """What `generate` was asked for; the names are those of its flags, and None is a flag that was not given."""

    load: PairOptions
    prompt: str | None = None
    chat: bool = False
    check: bool = False
    raw: bool = False
    json: bool = False
    block_size: int | Literal["auto"] | None = None
    width: int | None = None
    max_new_tokens: int = 128
    seed: int | None = None
    save_state: str | None = None
    resume: str | None = None
    policy: PolicyOptions = field(default_factory=PolicyOptions)

    @property
    def given_block(self) -> int | None:
        """The block size that was given as a number."""
        return None if self.block_size == AUTO else self.block_size

    @property
    def first_seed(self) -> int:
        """The seed of a new state."""
        return self.seed or 0


def check_options(options: Options) -> None:
    """Raise InputError for what cannot be done, whatever the weights are."""
    check_load(options.load)
    _check_numbers(options)
    _check_modes(options)
    if options.resume is not None:
        _check_resume(options)
    if options.save_state is not None:
        check_place("--save-state", options.save_state)


def check_load(load: PairOptions) -> None:
    """Raise InputError for a pair that cannot be meant."""
    if load.pair is not None and load.target is not None:
        raise InputError("--pair and --target exclude each other; --pair NAME --draft PATH replaces a pair's draft")
    for flag, value in (("--target", load.target), ("--draft", load.draft), ("--pair", load.pair)):
        if value is not None and not value.strip():
            raise InputError(f"{flag}: got an empty name")
    if load.dtype is not None and load.dtype not in DTYPES:
        raise InputError(f"--dtype: got {load.dtype!r}, expected one of: {', '.join(DTYPES)}")
    _check_spread(load)


def _check_spread(load: PairOptions) -> None:
    places = {"--device": load.device, "--device-map": load.device_map, "--tensor-parallel": load.tensor_parallel}
    given = [flag for flag, value in places.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} exclude each other; each says where the weights go")
    if load.tensor_parallel is not None and load.tensor_parallel < 1:
        raise InputError(f"--tensor-parallel: got {load.tensor_parallel}, expected 1 or more")


def _check_numbers(options: Options) -> None:
    bounds = {
        "--max-new-tokens": (options.max_new_tokens, 0),
        "--block-size": (options.given_block, 1),
        "--width": (options.width, 1),
        "--seed": (options.seed, 0),
    }
    for flag, (value, least) in bounds.items():
        if value is not None and value < least:
            raise InputError(f"{flag}: got {value}, expected {least} or more")
    if options.first_seed >= 2**64:
        raise InputError(f"--seed: got {options.seed}, expected less than 2**64")
    if options.width is not None and options.width < (options.given_block or 0):
        raise InputError(f"--width {options.width} is below --block-size {options.block_size}; the block must fit in")


def _check_modes(options: Options) -> None:
    if options.load.tensor_parallel is not None and (options.chat or options.prompt == "-"):
        raise InputError(
            "--tensor-parallel: several processes cannot read one stdin; give the prompt on the command line"
        )
    if options.load.tensor_parallel is not None and options.block_size == AUTO:
        raise InputError("--tensor-parallel: several processes time a step differently; give --block-size a number")
    if options.chat:
        for flag, given in (("--json", options.json), ("--check", options.check)):
            if given:
                raise InputError(f"--chat and {flag} exclude each other")
        if options.prompt == "-":
            raise InputError("--chat reads its turns from stdin, so the prompt cannot be -")
    elif options.prompt is None and options.resume is None:
        raise InputError("no prompt; give one, or - to read it from stdin, or --chat")


def _check_resume(options: Options) -> None:
    given = {"--width": options.width, "--seed": options.seed, "--check": options.check or None}
    for flag, value in given.items():
        if value is not None:
            raise InputError(f"--resume and {flag} exclude each other; a saved state has its own width, seed and past")


def check_place(flag: str, path: str) -> None:
    """Raise InputError where no file can be written at a path."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise InputError(f"{flag}: {path} is a folder; give the name of a file")
    try:
        check_file_place(Path(path))
    except CacheFolderError as error:
        raise InputError(f"{flag}: {error}") from None
    if not folder.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{flag} {path}: the folder {folder} cannot be written to")


def read_prompt(prompt: str) -> str:
    """Return the prompt itself, read from stdin if it is `-` (less one final newline, which `echo` adds).

    Raises:
        InputError: it is empty, or no text.
    """
    text = stdin.read_text().removesuffix("\n") if prompt == "-" else prompt
    text = stdin.checked(text, "the prompt")
    if not text:
        raise InputError("the prompt is empty; give at least one character")
    return text
