"""`dflash-fn policies list` and `policies compare`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rich.console import Console
from typer.testing import CliRunner

import dflash_fn
from dflash_fn.bench.policy_runs import Contender, Text, results_of, run_text
from dflash_fn.cli import policies_report
from dflash_fn.cli.commands import app
from dflash_fn.metrics import summarize
from dflash_fn.policies import relaxed, token_rejection, typical
from dflash_fn.policies.named import POLICIES
from dflash_fn.sampling import Sampling

PROMPTS = ("import random", "def add(a, b):")
SHORT = ("--max-new-tokens", 10, "--seeds", 2)
ONE = Sampling(1.0)


def invoke(*args: Any) -> Any:
    return CliRunner().invoke(app, ["policies", *map(str, args)])


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result = invoke("compare", *PROMPTS, *SHORT, "--policies", "match,token_rejection,typical", "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_list() -> None:
    made = json.loads(invoke("list", "--json").stdout)["policies"]
    assert [one["name"] for one in made] == list(POLICIES)
    text = invoke("list").stdout
    assert all(name in text for name in POLICIES)
    assert "2403.10444, algorithm 2" in text


def test_compared_as_json(found: dict[str, Any]) -> None:
    assert (found["prompts"], found["seeds"], found["max_new_tokens"]) == (["prompt 1", "prompt 2"], [0, 1], 10)
    assert (found["pair"], found["port"], found["sampling"], found["block_size"]) == ("tiny-code", "torch", "T=1", 8)
    match, rejection, typical = found["policies"]
    assert [one["divergence_known"] for one in found["policies"]] == ["proven", "proven", "exact"]
    assert (match["divergence"], match["tau_gain"]) == ({"value": 0.0, "half": None}, None)
    assert 0 < typical["divergence"]["value"] < 1
    assert rejection["tau_gain"]["value"] == pytest.approx(rejection["tau"]["value"] - match["tau"]["value"])
    for one in found["policies"]:
        assert one["tau"]["value"] == pytest.approx(one["tokens"] / one["steps"])
        shares = [slot["value"] for slot in one["by_slot"]]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(one["tau"]["value"] - 1)
        assert one["seconds_a_step"]["value"] > 0


def test_figures_are_those_of_plain_runs() -> None:
    """tau of whole blocks, as the steps themselves report it."""
    pair = dflash_fn.load_zoo("tiny-code")
    ids, one = pair.tokenizer.encode(PROMPTS[1]), Contender("token_rejection", token_rejection(ONE))
    text = run_text(one, pair, ids, seed=3, width=8, max_new_tokens=17, stop_token_ids=())
    state = dflash_fn.prefill(pair, ids, seed=3, width=8)
    steps = dflash_fn.rounds(state, pair, policy=token_rejection(ONE), max_new_tokens=17, stop_token_ids=())
    infos = [info for _, info in steps]
    whole = summarize(infos)
    cut = text.steps < whole.steps
    summary = summarize(infos[:-1]) if cut else whole
    assert (text.steps, text.tokens - text.steps) == (summary.steps, sum(summary.num_accepted))
    assert [a - b for a, b in zip(text.kept, [*text.kept[1:], 0], strict=True)] == list(summary.histogram[1:])
    assert text.had == [summary.steps] * 7
    assert text.surprise[2] == 17
    (result,) = results_of([one])
    assert result.tau is not None
    assert result.tau.value == summary.tau


def test_a_lossy_rule_is_seen_to_be_lossy() -> None:
    pair = dflash_fn.load_zoo("tiny-code")
    contenders = [Contender("typical", typical(ONE)), Contender("relaxed", relaxed(ONE))]
    for one in contenders:
        for seed in range(3):
            run_text(one, pair, pair.tokenizer.encode(PROMPTS[0]), seed=seed, width=8, max_new_tokens=24)
    for one in results_of(contenders):
        assert one.divergence_known == "exact"
        assert one.divergence is not None
        assert one.divergence.value > 0.1
        assert one.surprise is not None
        assert one.surprise.half is not None
        assert one.surprise.value < -one.surprise.half  # it keeps what is likely, more often than p would


def test_tables_at_every_width(found: dict[str, Any]) -> None:
    del found
    result = invoke(
        "compare", PROMPTS[0], "--max-new-tokens", 6, "--seeds", 2, "--policies", "match,block_verification"
    )
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "tiny-code, torch, float32, T=1, blocks of 8, 1 prompt x 2 seeds, 6 tokens each"
    assert "block_verification" in result.stdout
    assert max(map(len, lines)) <= policies_report.WIDE
    result = invoke(
        "compare", PROMPTS[0], "--max-new-tokens", 6, "--seeds", 1, "--policies", "match,typical", "--markdown"
    )
    tables = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert len(tables) == 2 * (2 + 2)
    assert tables[0] == "| policy | tau | gain | divergence | surprise | ms a step |"
    assert tables[5] == "| --- | --- | --- | --- | --- | --- | --- | --- |"


def test_on_a_narrow_terminal_nothing_is_cut() -> None:
    console = Console(width=60, force_terminal=True, record=True, file=io.StringIO())
    one = Contender("block_verification", token_rejection(ONE))
    setting = policies_report.Setting("a", "torch", "float32", "cpu", "T=1", 8, 8, 6, ["p"], [0])
    policies_report.show(console, setting, results_of([one]))
    text = console.export_text()
    assert "\u2026" not in text
    assert "  tau         -\n" in text.replace(" \n", "\n")


def test_intervals_say_what_they_are_over() -> None:
    def over(prompts: int, seeds: int) -> list[Any]:
        texts = [Text(6, 2, [1] * 3, [2] * 3, prompt=(index,)) for index in range(prompts) for _ in range(seeds)]
        return results_of([Contender("match", POLICIES["match"](ONE), texts)])

    few, one, many = over(2, 8), over(1, 8), over(6, 2)
    said = [policies_report.interval_of(results) for results in (few, one, many)]
    assert "of the surprise alone; 2 prompts are too few for others: give 5 or more" in said[0]
    assert "over seeds of one prompt, which speak for no other, by the jackknife" in said[1]
    assert "over prompts, each with all its seeds, by the jackknife" in said[2]
    assert [results[0].tau.half for results in (few, one, many)] == [None, 0.0, 0.0]
    assert policies_report.interval_of(over(1, 4)).endswith(
        "4 texts are too few for others: give 5 prompts, or 5 seeds of one"
    )


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, begins in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        path = tmp_path / name
        result = invoke("compare", PROMPTS[0], "--max-new-tokens", 5, "--seeds", 2, "--policies", "match,typical",
                        "--plot", path, "--json")  # fmt: skip
        assert result.exit_code == 0, result.stderr
        assert path.read_bytes().startswith(begins)
    assert "typical (lossy)" in path.read_text(encoding="utf-8").replace("<!-- ", "").replace(" -->", "")


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("compare", PROMPTS[0], "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert '--plot needs matplotlib, which is not installed; run: pip install "dflash-fn[plot]"' in result.stderr


OWN = """
from dflash_fn import Policy, Verdict

def rule(xp, drafted, logits, q, uniforms):
    count = xp.sum(xp.ones_like(drafted), axis=-1, dtype=drafted.dtype)
    return Verdict(count, xp.astype(xp.argmax(logits, axis=-1), drafted.dtype)[:, -1])

def everything(sampling):
    return Policy("everything", rule, lossless=False, sampling=sampling)

def says_so(sampling):
    return Policy("says so", rule, lossless=True, sampling=sampling)
"""


def test_a_policy_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rule_of_mine.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    names = "rule_of_mine:everything,rule_of_mine:says_so"
    result = invoke("compare", *PROMPTS, "--max-new-tokens", 20, "--seeds", 1, "--policies", names, "--json")
    assert result.exit_code == 0, result.stderr
    lossy, claims = json.loads(result.stdout)["policies"]
    assert (lossy["divergence_known"], claims["divergence_known"]) == ("exact", "as it says")
    assert lossy["tau"]["value"] == 8.0
    assert lossy["divergence"]["value"] > 0.3
    # what it says of itself is repeated; what it does is measured
    assert claims["divergence"] == {"value": 0.0, "half": None}
    assert claims["surprise"] == lossy["surprise"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "no prompts, or an empty one; give some, or --data FILE"),
        (["a", "--policies", "best"], "policy: got 'best', expected one of: match"),
        (["a", "--policies", "match,match"], "--policies match,match: names one of them twice"),
        (["a", "--temperature", 0, "--policies", "typical"], "typical: got temperature 0"),
        (["a", "--policies", ","], "--policies ',': expected names with commas between them, or all"),
        (["a", "--policies", ":x"], "policy :x: expected module:attribute, such as my_policies:mine"),
        (["a", "--policies", "json:"], "policy json:: expected module:attribute"),
        (
            ["a", "--policies", "dflash_fn.policies.match:greedy_match"],
            "got a function that takes other arguments (missing a required argument: 'drafted'); expected a dflash_fn.",
        ),
        (["--data", "{tmp}/no.jsonl"], "{tmp}/no.jsonl: cannot be read as a JSONL file (No such file or directory)"),
        (["--data", "{tmp}"], "{tmp}: cannot be read as a JSONL file (Is a directory)"),
        (["--data", "{tmp}/rows.jsonl:5"], "rows.jsonl: got rows 5 to 5, expected rows from 0 to 4: the file has 5"),
        (["--data", "{tmp}/rows.jsonl:2-1"], "rows.jsonl: got rows 2 to 1, expected rows from 0 to 4"),
        (["--data", "{tmp}/rows.jsonl:a-b"], "rows.jsonl:a-b: got rows 'a-b', expected FILE, FILE:3 or FILE:20-39"),
        (["--data", "{tmp}/rows.jsonl:1"], "rows.jsonl, row 1 (line 2): is no JSON ("),
        (["--data", "{tmp}/rows.jsonl:2"], "rows.jsonl, row 2 (line 3): got JSON of type list, expected an object"),
        (
            ["--data", "{tmp}/rows.jsonl:3"],
            "rows.jsonl, row 3 (line 4): field 'prompt': got 7, expected text, or a list",
        ),
        (
            ["--data", "{tmp}/rows.jsonl:4"],
            "rows.jsonl, row 4 (line 5): has none of the fields prompt, question, problem, turns",
        ),
        (["--data", "{tmp}/empty.jsonl"], "empty.jsonl: is empty; expected a JSON object a line"),
        (["a", "--seeds", 0], "--seeds: got 0, expected 1 or more"),
        (["a", "--block-size", 1], "policies compare judges drafted tokens"),
        (["a", "--json", "--markdown"], "--json and --markdown exclude each other"),
        (["a", "--plot", "{tmp}/a.jpg"], "--plot {tmp}/a.jpg: expected a name that ends with .png or .svg"),
        (["a", "--plot", "{tmp}/no/a.png"], "--plot {tmp}/no/a.png: there is no folder {tmp}/no"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[Any], text: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(dflash_fn, "load_pair", fail)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\nno\n[]\n{"prompt": 7}\n{"x": 1}\n\n', encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    result = invoke("compare", *(str(arg).format(tmp=tmp_path) for arg in args))
    assert result.exit_code == 2
    assert text.format(tmp=tmp_path) in " ".join(result.stderr.split())
