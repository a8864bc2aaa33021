"""Two ways side by side: what agrees, what parts at a near tie, and a mistake that is called one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import dflash_fn
from dflash_fn import errors, load_zoo
from dflash_fn.bench import ways
from dflash_fn.bench.compare import compare
from dflash_fn.bench.ways import Answer, Recipe, Way, parse
from dflash_fn.cli.commands import app
from dflash_fn.tolerances import TIE, bound
from tests.helpers.faults import Faulty, rolled_back_one_short

pytest.importorskip("torch")
PROMPT = "def mean(values):"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ours", Recipe()),
        ("block=4", Recipe(block=4)),
        ("ours, port=mlx,width=16", Recipe(port="mlx", width=16)),
        ("transformers,dtype=bfloat16", Recipe("transformers", dtype="bfloat16")),
        ("draft=ngram", Recipe(draft="ngram")),
    ],
)
def test_recipes(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm", "way 'vllm': got engine 'vllm', expected one of: ours, transformers, mlx-lm"),
        ("", "way '': got engine '', expected one of"),
        ("ours,blocks=4", "got 'blocks=4', expected one of: block=..., draft=..., dtype=..., port=..., width=..."),
        ("ours,block", "got 'block', expected one of: block=..."),
        ("ours,block=8,width=4", "got block=8 above width=4; the block must fit in"),
        ("ours,block=99", "got more than 32 slots, the most that a port verifies at once"),
        ("ours,block=0", "got block=0, expected a number of at least 1"),
        ("transformers,block=4", "got 'block=4', expected one of: dtype=..."),
    ],
)
def test_recipes_that_are_none(text, message):
    with pytest.raises(errors.InputError) as caught:
        parse(text)
    assert message in str(caught.value)


def scripted(way: Way, rows: np.ndarray) -> Way:
    """Return a way that emits the argmax of each row of logits."""

    def answer(ids: Sequence[int], count: int) -> Answer:
        return Answer(rows.argmax(-1).tolist(), list(rows))

    return replace(way, answer=answer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("gap", "near"), [(0.9, True), (1.1, False)])
def test_a_near_tie_is_as_near_as_rounding_reaches(dtype, gap, near):
    pair = load_zoo("tiny-code")
    way = Way("a", dtype, pair.target.spec, None, lambda ids, count: Answer([], []))
    reach = bound(dtype, "logits", pair.target.spec) * 10.0
    rows = np.zeros((3, 6))
    rows[:, 2], rows[:, 4] = 10.0, 10.0 - TIE * reach * gap
    other = rows.copy()
    other[2, 4] += TIE * reach * gap * 1.001  # now a hair better
    other[2, 2] = 10.0 - 1e-9
    (found,) = compare(scripted(way, rows), scripted(way, other), [("x", [1, 2])], 3).prompts
    assert found.tokens == 2
    assert found.divergence is not None
    assert (found.divergence.ours.best, found.divergence.theirs.best) == (2, 4)
    assert found.divergence.position == 4
    assert not found.explained  # the logits themselves are further apart than one bound
    other = rows.copy()
    other[2, 2], other[2, 4] = 10.0 - reach * 0.99, 10.0 - TIE * reach * gap + reach * 0.99
    (found,) = compare(scripted(way, rows), scripted(way, other), [("x", [1, 2])], 3).prompts
    assert found.explained == near or found.divergence is None
    assert (found.divergence is not None) == near


def test_vocabularies_that_differ():
    pair = load_zoo("tiny-code")
    one = Way("a", "float32", pair.target.spec, None, lambda ids, count: Answer([], []))
    two = replace(one, name="b", spec=replace(pair.target.spec, vocab_size=7))
    with pytest.raises(errors.InputError, match="ways 'a' and 'b': got vocabularies of 2048 and 7, expected the same"):
        compare(one, two, [("x", [1])], 1)


def run(*arguments: str) -> tuple[int, dict]:
    done = CliRunner().invoke(app, ["compare", *arguments, "--max-new-tokens", "24", "--json"])
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout)


def test_shapes_proposers_and_transformers_say_the_same():
    code, found = run("ours,block=8", "ours,block=4,width=8,draft=both", PROMPT, "import os\n")
    assert code == 0
    assert [one["bits_identical"] for one in found["prompts"]] == [True, True]
    assert found["prompts"][0]["same_steps"] is False
    code, found = run("ours,block=8", "block=8,width=8", PROMPT)
    assert [one["same_steps"] for one in found["prompts"]] == [True]
    code, found = run("draft=ngram", "transformers", PROMPT)
    assert code == 0
    assert found["prompts"] == [
        {"prompt": "prompt 1", "tokens_alike": 24, "bits_identical": False, "same_steps": None, "divergence": None}
    ]


def test_a_broken_rollback_is_not_explained(monkeypatch):
    right = dflash_fn.load_pair

    def broken(target, draft, **options):
        pair = right(target, draft, **options)
        port = Faulty(pair.port, {"select": rolled_back_one_short}) if draft else pair.port
        return replace(pair, port=port)

    monkeypatch.setattr(ways, "load_pair", broken)
    code, found = run("ours,block=8", "ours,draft=none", PROMPT)
    assert code == 1
    (one,) = found["prompts"]
    assert one["divergence"]["near_tie"] is False
    assert one["divergence"]["slots"][1] == 0
    shown = CliRunner().invoke(app, ["compare", "ours,block=8", "draft=none", PROMPT, "--max-new-tokens", "24"])
    assert shown.exit_code == 1
    assert "NOT explained by rounding" in shown.stdout
    assert shown.stdout.endswith("1 prompt: 0 alike, 0 part at a near tie, 1 not explained by rounding\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ours", "nobody", "x"], "way 'nobody': got engine 'nobody'"),
        (["ours", "ours"], "no prompts; give some, or --data FILE"),
        (["ours", "ours", "x", "--max-new-tokens", "0"], "--max-new-tokens: got 0, expected 1 or more"),
        (["ours", "ours", "x", "--pair", "a", "--target", "b"], "--pair and --target exclude each other"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    done = CliRunner().invoke(app, ["compare", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {message}")
