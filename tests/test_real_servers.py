"""Servers that other people wrote, on loopback: their totals are those of counting by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_fn import load_pair, zoo
from dflash_fn.bench.server_asking import ask_all
from dflash_fn.bench.server import open_server
from dflash_fn.records import Pair
from dflash_fn.text import chat_prompt
from tests.helpers.servers import chat_folder, running

pytest.importorskip("torch")
pytest.importorskip("openai")

COMMANDS = {
    "transformers": ["-m", "transformers.cli.transformers", "serve", "{folder}", "--host", "127.0.0.1", "--port",
                     "{port}", "--device", "cpu", "--dtype", "float32"],
    "mlx-lm": ["-m", "mlx_lm", "server", "--model", "{folder}", "--host", "127.0.0.1", "--port", "{port}"],
}  # fmt: skip
NEEDS = {"transformers": "uvicorn", "mlx-lm": "mlx_lm"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return chat_folder(zoo.fetch("tiny-code").target, tmp_path_factory.mktemp("served") / "tiny-code")


@pytest.fixture(scope="module", params=COMMANDS)
def server(request, folder, tmp_path_factory) -> Iterator[str]:
    pytest.importorskip(NEEDS[request.param])
    command = [part.replace("{folder}", str(folder)) for part in COMMANDS[request.param]]
    with running(command, tmp_path_factory.mktemp("log") / "server.txt") as url:
        yield url


@pytest.fixture(scope="module")
def pair(folder) -> Pair:
    return load_pair(folder)


def test_totals_are_those_of_counting_by_hand(server, folder, pair):
    from dflash_fn import decode, prefill
    subject = open_server(server, model=str(folder), concurrency=2)
    questions = [[{"role": "user", "content": text}] for text in ("def mean(values):", "import os", "class A:")]
    replies = ask_all(subject, questions, 12)
    print(*replies, sep="\n")
