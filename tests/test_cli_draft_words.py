"""`--draft ngram` and `--draft both`: guesses without a model, or beside one, never another text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

import dflash_fn
from dflash_fn.cli.commands import app

TARGET = str(Path(dflash_fn.__file__).parent / "zoo" / "pairs" / "tiny-code" / "target")
REPEATED = "x = [1, 2, 3]\n" * 8


def generate(*arguments: str) -> dict:
    done = CliRunner().invoke(app, ["generate", REPEATED, "--max-new-tokens", "32", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_without_a_draft_of_its_own_a_target_repeats_itself_faster():
    """Of 31 tokens after the first, at most a third are steps of their own; the text is that of the target alone."""
    alone = generate("--target", TARGET)
    found = generate("--target", TARGET, "--draft", "ngram", "--check")
    assert alone["tau"] == 1.0
    assert found["tokens"] == alone["tokens"]
    assert found["tau"] > 3
    assert (found["block_size"], found["width"]) == (8, 8)
    assert (found["check"]["tokens_identical"], found["check"]["logits_identical"]) == (True, True)


def test_both_ask_the_draft_where_nothing_occurred_before():
    new = ["generate", "class Parser:", "--max-new-tokens", "24", "--json"]
    taus = {}
    for word in ("ngram", "both"):
        done = CliRunner().invoke(app, [*new, "--draft", word])
        taus[word] = json.loads(done.stdout)["tau"]
    assert taus["ngram"] < taus["both"]
    assert generate("--draft", "both", "--block-size", "4", "--check")["check"]["logits_identical"] is True


def test_a_state_is_saved_and_gone_on_with(tmp_path):
    file = str(tmp_path / "state")
    first = generate("--draft", "ngram", "--save-state", file)
    more = ["generate", "--resume", file, "--draft", "ngram", "--max-new-tokens", "16", "--json"]
    done = CliRunner().invoke(app, more)
    assert done.exit_code == 0, done.output
    whole = generate("--draft", "ngram", "--max-new-tokens", "48")
    assert first["tokens"] + json.loads(done.stdout)["tokens"] == whole["tokens"]


def test_a_chat_guesses_too():
    done = CliRunner().invoke(
        app, ["generate", "--chat", "--draft", "ngram", "--max-new-tokens", "24"], input="a = 1\n"
    )
    assert done.exit_code == 0, done.output
    assert "no draft" not in done.stderr
    assert "tau" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "x", "--target", TARGET, "--draft", "both"],
            "--draft both asks a draft where n-grams know nothing; there is none, use --draft ngram",
        ),
        (["generate", "x", "--draft", "ngrams"], "draft: got 'ngrams', which is no folder; expected"),
        (["doctor", "--prove", "--draft", "ngram"], "--draft ngram: expected a folder or hub id; that word is for"),
        (["compare", "ours", "ours", "x", "--draft", "ngram"], "--draft ngram: write it in a way, as in ours,draft="),
    ],
)
def test_where_the_words_mean_nothing(arguments, message):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert f"error: {message}" in done.stderr
