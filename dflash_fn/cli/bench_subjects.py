"""What `bench` asks: a pair in this process in several ways, or a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import typer

from dflash_fn.cli import signals, terminal
from dflash_fn.cli.bench_options import HEAD, BenchOptions
from dflash_fn.cli.pairs import open_pair
from dflash_fn.errors import BackendMissing, InputError

if TYPE_CHECKING:
    from dflash_fn.bench.contenders import Contender
    from dflash_fn.bench.questions import Question
    from dflash_fn.bench.replies import Subject
    from dflash_fn.records import Pair

__all__ = ["Opened", "open_all"]

API_KEY = "OPENAI_API_KEY"
"""The variable of the environment that holds the key of a server that wants one."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What is ready to be asked.

    Attributes:
        subjects: the rows of the table.
        tokenizer: that cuts texts; None where there is none.
        head: tokens of a text that are asked.
        peak: tells the most memory held; None for a server.
        setting: what ran, for reports.
        blocks: block sizes, of the subjects that have one.
    """

    subjects: list[Subject]
    tokenizer: Any
    head: int
    peak: Callable[[], float] | None
    setting: dict[str, Any]
    blocks: dict[str, int] = field(default_factory=dict)

    def prepared(self, questions: Sequence[Question]) -> list[Question]:
        """Cut the texts among the questions.

        Raises:
            InputError: there is no tokenizer to do it with.
        """
        from dflash_fn.bench.questions import shortened

        text = next((question for question in questions if not question.whole), None)
        if text is not None and self.tokenizer is None:
            raise InputError(f"{text.name}: is cut by tokens, which takes a tokenizer; name its folder by --target")
        return [shortened(question, self.tokenizer, self.head) for question in questions]


def open_all(wanted: BenchOptions, device: str | None) -> Opened:
    """Load the pair and what the ways need beside it, or reach the server.

    Raises:
        DflashError: of any kind.
    """
    return _server(wanted) if wanted.serves else _pair(wanted, device)


def _pair(wanted: BenchOptions, device: str | None) -> Opened:
    from dflash_fn.bench.contenders import LEAD, contenders, parse_blocks, parse_ways
    from dflash_fn.bench.subjects import Manner

    pair = open_pair(replace(wanted.load, device=device), proposers=True)
    ways = parse_ways(wanted.ways) if wanted.ways is not None else None
    blocks = parse_blocks(wanted.blocks) if wanted.blocks is not None else ()
    rows = contenders(pair, ways, blocks, word=wanted.load.word or "")
    manner = Manner(wanted.raw, wanted.thinking, wanted.ignore_eos, wanted.parts)
    with terminal.status("loading the other ways"), signals.at_once():
        subjects = _subjects(pair, rows, manner, asked_for=wanted.ways is not None)
    blocks = {row.name: row.block for row in rows if row.kind != LEAD}
    raw = wanted.raw or not getattr(pair.tokenizer, "chat_template", None)
    setting = {
        "pair": pair.name, "backend": pair.port.name, "dtype": pair.target.dtype, "device": pair.target.device,
        "compile": wanted.load.compile, "raw": raw,
    }  # fmt: skip
    return Opened(subjects, pair.tokenizer, wanted.head or HEAD, pair.port.peak_memory, setting, blocks)


def _subjects(pair: Pair, rows: Sequence[Contender], manner: Any, *, asked_for: bool) -> list[Subject]:
    """Open the rows; upstream's loop is left out, and told, where nobody asked for it and it is not installed."""
    from dflash_fn.bench.subjects import open_subject

    found = []
    for row in rows:
        try:
            found.append(open_subject(pair, row, manner))
        except BackendMissing as missing:
            if asked_for or row.kind != "upstream":
                raise
            typer.echo(f"left out: {missing}", err=True)
    return found


def _server(wanted: BenchOptions) -> Opened:
    from dflash_fn.bench.server import open_server

    tokenizer = _tokenizer(wanted.load.target) if wanted.load.target else None
    options: dict[str, Any] = {"ignore_eos": True} if wanted.ignore_eos else {}
    if wanted.thinking is not None:
        options["chat_template_kwargs"] = {"enable_thinking": wanted.thinking}
    limits: dict[str, Any] = {} if wanted.timeout is None else {"timeout": wanted.timeout}
    subject = open_server(
        wanted.url or "", model=wanted.model, concurrency=wanted.concurrency or 1, api_key=os.environ.get(API_KEY),
        raw=wanted.raw, tokenizer=tokenizer, options=options, **limits,
    )  # fmt: skip
    setting = {
        "pair": subject.name,
        "backend": f"server {wanted.url}",
        "dtype": None,
        "device": None,
        "raw": wanted.raw,
    }
    return Opened([subject], tokenizer, wanted.head or HEAD, None, setting)


def _tokenizer(place: str) -> Any:
    from dflash_fn.load import read_tokenizer
    from dflash_fn.registry import get_port
    from dflash_fn.sources import resolve

    return read_tokenizer(get_port("torch"), resolve(place, role="target"))
