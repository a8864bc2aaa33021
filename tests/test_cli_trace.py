"""`dflash-fn trace record` and `trace check`."""

import io
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from dataclasses import replace

from rich.console import Console
from typer.testing import CliRunner

import dflash_fn
from dflash_fn.cli import trace_report
from dflash_fn.cli.commands import app
from dflash_fn.trace import Deviation, Report, read_trace, write_trace

TINY_CODE = Path(dflash_fn.__file__).parent / "zoo" / "pairs" / "tiny-code"
PROMPT = "import random"


def invoke(*args, stdin=None):
    return CliRunner().invoke(app, ["trace", *(str(arg) for arg in args)], input=stdin)


def invoke_json(*args, stdin=None):
    result = invoke(*args, "--json", stdin=stdin)
    assert result.stdout.count("\n") == 1
    return result, json.loads(result.stdout)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "good"
    assert invoke("record", path, PROMPT, "--max-new-tokens", 9).exit_code == 0
    return path


@pytest.fixture(scope="module")
def wrong(good):
    """A trace in which step 2 emits another token."""
    trace = read_trace(good)
    row = trace.steps[2][0]
    assert row is not None
    path = good.with_name("wrong")
    steps = (*trace.steps[:2], (replace(row, next_token=row.next_token + 1),), *trace.steps[3:])
    write_trace(path, replace(trace, steps=steps))
    return path


@pytest.fixture
def no_weights(monkeypatch):
    """Loading anything is a failure."""

    def fail(*args, **options):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(dflash_fn, "load_pair", fail)


def test_recording_takes_the_flags_of_generate(tmp_path):
    path = tmp_path / "trace"
    flags = ("--max-new-tokens", 6, "--block-size", 4, "--width", 9, "--seed", 5, "--dtype", "bfloat16", "--keep", 3)
    result, value = invoke_json("record", path, "-", *flags, stdin=f"{PROMPT}\n")
    trace = read_trace(path)
    assert result.exit_code == 0
    assert value == {
        "file": str(path), "bytes": path.stat().st_size, "steps": len(trace.steps), "tokens": 6,
        "prompt_tokens": 4,
        "pair": "tiny-code", "port": "torch", "dtype": "bfloat16", "block_size": 4, "width": 9, "seed": 5,
        "policy": "match",
    }  # fmt: skip
    row = trace.steps[1][0]
    assert row is not None
    assert row.target_logits is not None
    assert row.target_logits.values.values.shape == (4, 3)


def test_all_logits_can_be_kept(tmp_path):
    assert invoke("record", tmp_path / "trace", PROMPT, "--max-new-tokens", 1, "--keep", 0).exit_code == 0
    row = read_trace(tmp_path / "trace").steps[0][0]
    assert row is not None
    assert row.target_logits is not None
    assert row.target_logits.values.values.shape == (1, 2048)


def test_recording_says_what_was_written(tmp_path):
    result = invoke("record", tmp_path / "trace", PROMPT, "--max-new-tokens", 1)
    size = (tmp_path / "trace").stat().st_size
    assert result.stdout == f"{tmp_path / 'trace'}: 1 step, 1 token, {size} bytes\n"


def test_a_trace_holds_on_its_own_port(good):
    result = invoke("check", good)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("recorded  dflash_fn 0.1.0, port torch, float32 (torch ")
    assert lines[1].startswith("replayed  port torch, float32 (torch ")
    steps = len(read_trace(good).steps)
    assert lines[-2:] == ["bits: identical", f"trace: all within what rounding explains ({steps} steps, 9 tokens)"]
    result, value = invoke_json("check", good, "--port", "torch", "--pair", "tiny-code", "--device", "cpu")
    assert (result.exit_code, value["fine"], value["bits_identical"], value["first"]) == (0, True, True, None)
    assert {"quantity", "size", "bound", "compared", "step", "row", "slot"} <= set(value["largest"][0])


def test_a_named_policy_is_that_of_the_file(tmp_path):
    path = tmp_path / "a.trace"
    warm = ("--policy", "block_verification", "--temperature", 0.8)
    assert invoke("record", path, PROMPT, "--max-new-tokens", 6, *warm).exit_code == 0
    assert invoke("check", path).exit_code == 0
    assert invoke("check", path, *warm).exit_code == 0
    result = invoke("check", path, "--temperature", 0.8)
    assert result.exit_code == 2
    assert "the trace was made with policy 'block_verification, T=0.8'" in " ".join(result.stderr.split())


def test_what_every_rule_would_keep(tmp_path, good):
    path = tmp_path / "a.trace"
    options = ("--max-new-tokens", 9, "--keep", 0, "--policy", "token_rejection", "--temperature", 1)
    assert invoke("record", path, PROMPT, *options).exit_code == 0
    _, found = invoke_json("expect", path)
    assert found["policy"] == "token_rejection, T=1"
    taus = found["expected"]
    assert list(taus) == ["match_independent", "match_inverse", "match_gumbel", "token_rejection", "block_verification"]
    assert 1 <= taus["match_independent"] <= taus["token_rejection"] <= 8
    result = invoke("expect", path)
    assert f"token_rejection     {taus['token_rejection']:.3f}" in result.stdout
    result = invoke("expect", good)
    assert result.exit_code == 2
    assert "expected all of them; record it with top_k=None (dflash-fn trace record --keep 0)" in " ".join(
        result.stderr.split()
    )


def test_a_trace_can_be_held_against_another_dtype(good):
    result, value = invoke_json("check", good, "--dtype", "bfloat16")
    assert (result.exit_code, value["fine"], value["bits_identical"]) == (0, True, None)
    assert "bits: not compared; the port or the dtype is another" in invoke("check", good, "--dtype", "float16").stdout


def test_a_difference_is_named_and_has_its_own_exit_code(wrong):
    result, row = invoke("check", wrong), read_trace(wrong).steps[2][0]
    assert result.exit_code == 1
    assert row is not None
    where = f"step 2, row 0, slot {row.num_accepted}"
    assert f"trace: differs, first in verdict at {where}: not the same (recorded" in result.stdout
    result, value = invoke_json("check", wrong)
    assert (result.exit_code, value["fine"]) == (1, False)
    assert (value["first"]["quantity"], value["first"]["step"], value["first"]["row"]) == ("verdict", 2, 0)


def test_a_trace_of_a_pair_without_a_name(good, tmp_path):
    trace = read_trace(good)
    write_trace(tmp_path / "trace", replace(trace, pair="mine"))
    result = invoke("check", tmp_path / "trace")
    assert result.exit_code == 2
    assert "was made with 'mine', which is no zoo pair; name it by --target and --draft" in result.stderr
    given = ("--target", TINY_CODE / "target", "--draft", TINY_CODE / "draft")
    assert invoke("check", tmp_path / "trace", *given).exit_code == 0


def test_a_trace_of_another_pair(good):
    result = invoke("check", good, "--target", TINY_CODE / "target")
    assert (result.exit_code, result.stderr) == (
        2, "error: check: the trace was made with a draft, and the pair has none\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["record", "{tmp}/none/x", "a"], "FILE {tmp}/none/x: there is no folder {tmp}/none"),
        (["record", "{tmp}", "a"], "FILE: {tmp} is a folder"),
        (["record", "{tmp}/x", "a", "--keep", 1], "--keep: got 1, expected 2 or more, or 0 for all"),
        (["record", "{tmp}/x", "a", "--seed", -1], "--seed: got -1"),
        (["record", "{tmp}/x", ""], "the prompt is empty"),
        (["check", "{tmp}/none"], "{tmp}/none: no such file"),
        (["check", "{tmp}/bad"], "{tmp}/bad: was changed after it was written"),
        (["check", "{tmp}/cut"], "{tmp}/cut: not a whole file that dflash_fn wrote ("),
        (["check", "{tmp}/good", "--dtype", "int8"], "--dtype: got 'int8'"),
        (["check", "{tmp}/good", "--pair", "a", "--target", "b"], "--pair and --target exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_loaded(good, tmp_path, no_weights, args, text):
    whole = good.read_bytes()
    (tmp_path / "good").write_bytes(whole)
    (tmp_path / "bad").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (tmp_path / "cut").write_bytes(whole[:1000])
    result = invoke(*(str(arg).format(tmp=tmp_path) for arg in args))
    assert result.exit_code == 2
    assert text.format(tmp=tmp_path) in result.stderr


def shown(report, width=80):
    console = Console(file=io.StringIO(), width=width, record=True)
    trace_report.show(console, report)
    return console.export_text()


def test_near_ties_are_shown_and_counted():
    ties = tuple(Deviation("verdict", step, 0, 1, None, 0.1, 0.5, "gaps", near_tie=True) for step in range(5))
    report = Report("a", "b", 5, 9, None, ties, ties[:1], {"verdict": 5}, None, None)
    text = shown(report)
    assert text.count("verdict at step") == 3
    assert "... and 2 near ties more" in text
    assert "all within what rounding explains, with 5 near ties (5 steps, 9 tokens)" in text.replace("\n", " ")


def test_bits_that_differ_are_named():
    first = Deviation("target_logits", 3, 0, 0, None, 0.0, 1.0, same_bits=False)
    report = Report("a", "b", 1, 1, None, (), (), {}, False, first)
    assert "bits: differ, first in target_logits at step 3, row 0, slot 0\n" in shown(report)


def test_sizes_that_are_no_numbers_are_null():
    first = Deviation("draft_logits", 1, 0, 0, None, float("nan"), 1.0)
    report = Report("a", "b", 1, 1, first, (), (first,), {"draft_logits": 1}, None, None)
    value = trace_report.as_object(report)
    assert (value["fine"], value["first"]["size"], value["largest"][0]["size"]) == (False, None, None)
    json.dumps(value, allow_nan=False)
