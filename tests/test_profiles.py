"""What conftest.py promises: which tests run by default, how many examples, and that shapes are checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[1]
PROJECT = """
import pytest
from hypothesis import settings

def test_default(): print(f"<{settings.default.max_examples} {settings.default.derandomize}>")

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.real_model
def test_real(): pass

@pytest.mark.slow
@pytest.mark.real_model
def test_both(): pass
"""
OURS = ("CI", "HYPOTHESIS_PROFILE", "DFLASH_FN_SLOW", "DFLASH_FN_REAL_MODEL", "PYTEST_ADDOPTS")


def run(folder: Path, *arguments: str, **variables: str) -> str:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  real_model\n")
    (folder / "test_it.py").write_text(PROJECT)
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", "pytest", "-s", "-v", "-p", "conftest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "summary"),
    [
        ((), {}, "1 passed, 3 deselected"),
        (("--slow",), {}, "2 passed, 2 deselected"),
        (("--slow", "--real-model"), {}, "4 passed"),
        ((), {"DFLASH_FN_SLOW": "1"}, "2 passed, 2 deselected"),
        (("-m", "slow"), {}, "1 passed, 3 deselected"),
    ],
)
def test_what_runs(tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], summary: str) -> None:
    assert summary in run(tmp_path, *arguments, **variables)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "<12 False>"),
        ({"CI": "true"}, "<12 True>"),
        ({"CI": "true", "HYPOTHESIS_PROFILE": "nightly"}, "<1000 False>"),
    ],
)
def test_how_many_examples(tmp_path: Path, variables: dict[str, str], expected: str) -> None:
    assert expected in run(tmp_path, **variables)


def test_shapes_of_the_port_are_checked() -> None:
    from dflash_fn_torch import port

    assert port.__spec__ is not None
    assert type(port.__spec__.loader).__module__.startswith("jaxtyping")
