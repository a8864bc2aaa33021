"""What `bench` was asked for, and the checks that need no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_fn.cli.options import PairOptions, check_load
from dflash_fn.errors import InputError

if TYPE_CHECKING:
    from dflash_fn.bench.questions import Question

__all__ = ["HEAD", "SERVER", "BenchOptions", "check_bench", "check_head", "options_of"]

HEAD = 64
"""Tokens of a text that are asked where `--head` says nothing else."""

SERVER = "openai"
"""The backend that is a server and no port."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The flags of `bench`; the names are theirs, and None is a flag that was not given."""

    load: PairOptions
    names: Sequence[str] = ()
    data: Sequence[str] = ()
    source: str = "bundled"
    limit: int | None = None
    shuffle: int | None = None
    ways: str | None = None
    blocks: str | None = None
    max_new_tokens: int = 128
    raw: bool = False
    head: int | None = None
    thinking: bool | None = None
    ignore_eos: bool = False
    parts: bool = False
    url: str | None = None
    model: str | None = None
    concurrency: int | None = None
    timeout: float | None = None
    out: str | None = None
    resume: bool = False
    markdown: bool = False
    json: bool = False

    @property
    def serves(self) -> bool:
        """Whether a server is asked."""
        return self.load.port == SERVER


def check_bench(wanted: BenchOptions) -> None:
    """Raise InputError for what cannot be done, whatever the weights are."""
    from dflash_fn.bench.contenders import check_blocks, parse_blocks, parse_ways

    check_load(wanted.load)
    _check_numbers(wanted)
    _check_modes(wanted)
    ways = parse_ways(wanted.ways) if wanted.ways is not None else None
    blocks = parse_blocks(wanted.blocks) if wanted.blocks is not None else ()
    if ways is not None:
        check_blocks(ways, blocks, wanted.load.word or "")


def _check_numbers(wanted: BenchOptions) -> None:
    bounds = {
        "--limit": (wanted.limit, 1),
        "--max-new-tokens": (wanted.max_new_tokens, 1),
        "--head": (wanted.head, 1),
        "--concurrency": (wanted.concurrency, 1),
    }
    for flag, (value, least) in bounds.items():
        if value is not None and value < least:
            raise InputError(f"{flag}: got {value}, expected {least} or more")
    if wanted.timeout is not None and not wanted.timeout > 0:
        raise InputError(f"--timeout: got {wanted.timeout:g}, expected more than 0 seconds")


def _check_modes(wanted: BenchOptions) -> None:
    if wanted.json and wanted.markdown:
        raise InputError("--json and --markdown exclude each other")
    if wanted.resume and wanted.out is None:
        raise InputError("--resume goes on with the run in a folder; name it by --out DIR")
    if wanted.raw and wanted.thinking is not None:
        raise InputError("--raw and --thinking exclude each other; thinking is a switch of chat templates")
    for_server = {
        "--url": wanted.url, "--model": wanted.model, "--concurrency": wanted.concurrency, "--timeout": wanted.timeout
    }  # fmt: skip
    load = wanted.load
    for_pair = {
        "--pair": load.pair, "--draft": load.draft, "--dtype": load.dtype, "--device": load.device,
        "--compile": load.compile or None,
        "--ways": wanted.ways, "--blocks": wanted.blocks, "--parts": wanted.parts or None,
    }  # fmt: skip
    refused = for_pair if wanted.serves else for_server
    given = [flag for flag, value in refused.items() if value is not None]
    if given and wanted.serves:
        raise InputError(f"{given[0]} is for a pair in this process; --backend {SERVER} asks a server")
    if given:
        raise InputError(f"{given[0]} is for --backend {SERVER}")
    if wanted.serves and wanted.url is None:
        raise InputError(f"--backend {SERVER} asks a server; give its address by --url, such as http://127.0.0.1:8000")


def check_head(wanted: BenchOptions, questions: Sequence[Question]) -> None:
    """Raise InputError for `--head` where no question is a text."""
    if wanted.head is not None and all(question.whole for question in questions):
        raise InputError(
            f"--head {wanted.head}: cuts a text to go on from, and no question is one; give --raw --data FILE, or "
            "leave it out"
        )


def options_of(wanted: BenchOptions, questions: str) -> dict[str, Any]:
    """Return what decides on the replies, for the folder of a run.

    Args:
        wanted: the flags.
        questions: their digest.
    """
    load = wanted.load
    return {
        "format": 1,
        "backend": load.port,
        "pair": load.zoo_name if not wanted.serves else None,
        "target": load.target,
        "draft": load.draft,
        "dtype": load.dtype,
        "device": load.device,
        "compile": load.compile,
        "url": wanted.url,
        "model": wanted.model,
        "concurrency": wanted.concurrency,
        "ways": wanted.ways,
        "blocks": wanted.blocks,
        "questions": questions,
        "max_new_tokens": wanted.max_new_tokens,
        "raw": wanted.raw,
        "head": wanted.head or HEAD,
        "thinking": wanted.thinking,
        "ignore_eos": wanted.ignore_eos,
        "parts": wanted.parts,
    }
