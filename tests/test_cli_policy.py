"""`generate --policy` and the flags of sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from dflash_fn.cli.commands import app

PROMPT = "def fibonacci(n):"
TEN_LINES = """
from dflash_fn import Policy, Verdict

def rule(xp, drafted, logits, q, uniforms):
    best = xp.astype(xp.argmax(logits, axis=-1), drafted.dtype)
    kept = xp.sum(drafted[:, :0], axis=-1, dtype=drafted.dtype)
    return Verdict(kept, xp.take_along_axis(best, kept[:, None], axis=-1)[:, 0])

never = Policy("never", rule, lossless=True)
nothing = 3

def make(sampling):
    return never

def wrong(sampling):
    return "never"
"""


def invoke(*args: Any) -> Any:
    return CliRunner().invoke(app, ["generate", PROMPT, "--max-new-tokens", "8", *map(str, args)])


def answer(*args: Any) -> dict[str, Any]:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["match", "match-inverse"])
def test_check_holds_at_any_temperature(name: str) -> None:
    found = answer("--policy", name, "--temperature", 0.9, "--top-p", 0.95, "--top-k", 200, "--seed", 5, "--check")
    assert found["check"]["tokens_identical"]
    assert found["check"]["logits_identical"]
    assert found["policy"].startswith("match, T=0.9 top_k=200 top_p=0.95")
    assert found["tokens"] != answer()["tokens"]


@pytest.mark.parametrize("name", ["token_rejection", "block_verification", "typical"])
def test_other_policies_by_name(name: str) -> None:
    found = answer("--policy", name, "--temperature", 1, "--min-p", 0.05)
    assert found["policy"].startswith(name)
    assert len(found["tokens"]) == 8


def test_check_is_refused_where_it_is_not_promised() -> None:
    result = invoke("--policy", "token_rejection", "--temperature", 1, "--check")
    assert result.exit_code == 2
    text = " ".join(result.stderr.split())
    assert "--check compares token for token, and policy 'token_rejection, T=1' promises the target's law" in text


def test_a_policy_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy_of_mine.py").write_text(TEN_LINES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    for name in ("never", "make"):
        found = answer("--policy", f"policy_of_mine:{name}")
        assert found["policy"] == "never"
        assert found["tau"] == 1.0
        assert found["tokens"] == answer()["tokens"]
    problems = {
        "policy_of_mine:nothing": "got int, expected a dflash_fn.Policy, or a function that returns one",
        "policy_of_mine:wrong": "got str, expected a dflash_fn.Policy",
        "policy_of_mine:gone": "module 'policy_of_mine' has nothing called 'gone'",
        "policy_of_nobody:gone": "there is no module 'policy_of_nobody' on Python's path",
        "best": "policy: got 'best', expected one of: match, match-inverse, token_rejection",
    }
    for name, message in problems.items():
        result = invoke("--policy", name)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
    result = invoke("--policy", "policy_of_mine:never", "--temperature", 1)
    assert "got T=1 for a policy that is finished; make it a function of a sampling" in " ".join(result.stderr.split())


def test_a_filter_without_a_temperature() -> None:
    result = invoke("--top-p", 0.9)
    assert result.exit_code == 2
    assert "top_p: got one at temperature 0" in result.stderr
