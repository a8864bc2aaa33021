"""Servers that other people wrote, on loopback: their totals are those of counting by hand, and their text ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_fn import decode, load_pair, prefill, zoo
from dflash_fn.bench.server import open_server
from dflash_fn.bench.server_way import TOPS
from dflash_fn.bench.ways import open_way
from dflash_fn.cli.commands import app
from dflash_fn.glimpses import Glimpse
from dflash_fn.records import Pair
from dflash_fn.text import Message, chat_prompt
from tests.helpers.servers import chat_folder, running

pytest.importorskip("torch")
pytest.importorskip("openai")

COMMANDS = {
    "transformers": ["-m", "transformers.cli.transformers", "serve", "{folder}", "--host", "127.0.0.1", "--port",
                     "{port}", "--device", "cpu", "--dtype", "float32"],
    "mlx-lm": ["-m", "mlx_lm", "server", "--model", "{folder}", "--host", "127.0.0.1", "--port", "{port}"],
}  # fmt: skip
NEEDS = {"transformers": "uvicorn", "mlx-lm": "mlx_lm"}
PROMPTS = ["def mean(values):", "import os", "class A:"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return chat_folder(zoo.fetch("tiny-code").target, tmp_path_factory.mktemp("served") / "tiny-code")


@pytest.fixture(scope="module", params=COMMANDS)
def server(request, folder, tmp_path_factory) -> Iterator[tuple[str, str]]:
    pytest.importorskip(NEEDS[request.param])
    command = [part.replace("{folder}", str(folder)) for part in COMMANDS[request.param]]
    with running(command, tmp_path_factory.mktemp("log") / "server.txt") as url:
        yield request.param, url


@pytest.fixture(scope="module")
def pair(folder) -> Pair:
    return load_pair(folder)


def by_hand(pair: Pair, messages: list[Message], budget: int) -> list[int]:
    """Return the answer's tokens, decoded here."""
    ids = chat_prompt(pair.tokenizer, messages)
    state = decode(prefill(pair, ids), pair, max_new_tokens=budget)
    return list(state.tokens[0][len(ids) :])


def test_totals_are_those_of_counting_by_hand(server, folder, pair):
    _, url = server
    subject = open_server(url, model=str(folder), concurrency=2)
    questions: list[list[Message]] = [[{"role": "user", "content": text}] for text in PROMPTS]
    replies = [subject.ask(question, 12) for question in questions]
    expected = [by_hand(pair, question, 12) for question in questions]
    assert [reply.error for reply in replies] == [None] * 3
    assert [reply.tokens for reply in replies] == [len(tokens) for tokens in expected]
    assert sum(reply.tokens for reply in replies) == sum(len(tokens) for tokens in expected)
    assert {reply.counted_by for reply in replies} == {"server"}
    for reply, tokens in zip(replies, expected, strict=True):
        # transformers repeats the prompt's last line before its answer, mlx-lm drops a space
        assert reply.text.strip().endswith(pair.tokenizer.decode(tokens).strip())
        assert reply.first is not None
        assert reply.first <= reply.seconds


def compared(folder: Path, *arguments: str) -> tuple[int, dict]:
    done = CliRunner().invoke(app, ["compare", *arguments, "--target", str(folder), "--json"])
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout)


def test_its_text_is_ours(server, folder):
    name, url = server
    # mlx-lm runs the checkpoint's own dtype, whose near ties are explained; transformers' chat adds to the text
    dtype, apis = {"transformers": ("float32", ["completions"]), "mlx-lm": ("bfloat16", ["completions", "chat"])}[name]
    for api in apis:
        way = f"server,url={url},model={folder},dtype={dtype},api={api}"
        code, found = compared(folder, way, "ours,draft=none", *PROMPTS, "--max-new-tokens", "16")
        assert code == 0
        for one in found["prompts"]:
            assert one["tokens_alike"] == 16 or one["divergence"]["verdict"] == "near tie"
            assert one["bits_identical"] is False


def test_what_it_tells(server, folder, pair):
    name, url = server
    way = open_way(f"server,url={url},model={folder}", folder, None)
    assert way.dtype == "bfloat16"
    ids = chat_prompt(way.tokenizer, [{"role": "user", "content": PROMPTS[0]}])
    answer = way.answer(ids, 8)
    expected = by_hand(pair, [{"role": "user", "content": PROMPTS[0]}], 8)
    if name == "transformers":  # which ignores that log probabilities are asked for
        assert (answer.text, list(answer.tokens)) == (pair.tokenizer.decode(expected), [])
        return
    assert (answer.text, list(answer.tokens)) == (None, expected)
    for row, token in zip(answer.logits, expected, strict=True):
        assert isinstance(row, Glimpse)
        assert row.chosen == token
        assert len(row.values) == TOPS
        assert row.values[token] == max(row.values.values())
