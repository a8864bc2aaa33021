"""The benchmark of hybrids: its tables, and arguments that it cannot use."""

from __future__ import annotations

import importlib.util

import pytest

from dflash_fn.bench import models, states

SIZES = {"layers": 2, "hidden": 32, "inner": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "vocab": 64}
TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["contexts", "--kinds", "foo"], "argument --kinds: invalid choice: 'foo'"),
        (["share", "--blocks", "0"], "argument --blocks: got '0', expected an integer of at least 1"),
        (["share", "--blocks", "8", "-3"], "argument --blocks: got '-3', expected an integer of at least 1"),
        (["contexts", "--contexts", "many"], "argument --contexts: got 'many', expected an integer of at least 1"),
        (["contexts", "--window", "0"], "argument --window: got '0', expected"),
        (["share", "--turns", "0"], "argument --turns: got '0', expected"),
        (["share", "--port", "nope"], "unknown port 'nope'"),
        (["nothing"], "argument what: invalid choice: 'nothing'"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        states.main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1].startswith(f"python -m dflash_fn.bench.states: error: {message}")


@TORCH
def test_a_block_wider_than_the_port_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(states, "SIZES", SIZES)
    with pytest.raises(SystemExit) as caught:
        states.main(["share", "--blocks", "1000", "--context", "3"])
    assert caught.value.code == 2
    assert "1000" in capsys.readouterr().err.splitlines()[-1]


@TORCH
def test_a_table_of_contexts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What is held is whole buffers: two of 1536 slots for the window, one of the prompt's and the budget's slots."""
    monkeypatch.setattr(states, "SIZES", SIZES)
    code = states.main(["contexts", "--contexts", "5", "1000", "--blocks", "2", "--turns", "1", "--window", "9"])
    assert code == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["layers", "context", "step, ms", "median", "step to the one at 1k", "MB held"]
    assert [line[:2] for line in lines[2:]] == [[kind, size] for kind in models.KINDS for size in ("5", "1000")]
    held = {(line[0], line[1]): float(line[5]) for line in lines[2:]}
    assert held["delta", "5"] == held["delta", "1000"]


@TORCH
def test_a_share_of_a_block_of_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(states, "SIZES", SIZES)
    assert states.main(["share", "--blocks", "1", "--context", "4", "--turns", "1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[2:]
    assert [cell.strip() for cell in line.split("|")[1:4:2]] == ["1", "1"]
