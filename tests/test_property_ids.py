"""Every property that a docstring promises is tested under its id, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.property_ids import ids_under_test, problems, promised_ids

ROOT = Path(__file__).resolve().parents[1]
CORE = """def f():
    \"\"\"One.

    Raises:
        E: not a promise, P77.

    Guarantees:
        P01: this holds,
            and P02 too.

    Source:
        P78.
    \"\"\"
"""
TESTS = 'def test_p01_this():\n    """P01: so."""\n\n\nclass T:\n    def test_p02_that(self):\n        """P02."""\n'


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    for name, text in {
        "dflash_fn/a.py": CORE,
        "properties/test_a.py": TESTS,
        "ports/x/b.py": "",
        "tests/t.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_this_checkout_tests_what_it_promises() -> None:
    assert problems(ROOT) == []
    assert {"P01", "P05", "P11"} <= promised_ids(ROOT).keys() == ids_under_test(ROOT).keys()


def test_only_guarantees_are_promises(sound: Path) -> None:
    assert promised_ids(sound) == {"P01": ["dflash_fn/a.py: f"], "P02": ["dflash_fn/a.py: f"]}
    assert problems(sound) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "report"),
    [
        ("dflash_fn/a.py", "P02", "P03", "dflash_fn/a.py: f: P03 is promised, and no test has it in its name"),
        ("dflash_fn/a.py", "P02", "", "properties/test_a.py: test_p02_that: P02 is tested, and no Guarantees section"),
        ("properties/test_a.py", "test_p01", "test_p1", "dflash_fn/a.py: f: P01 is promised, and no test has it"),
        (
            "properties/test_a.py",
            "P01: so",
            "so",
            "properties/test_a.py: test_p01_this: its docstring does not name P01",
        ),
    ],
)
def test_each_fault_is_reported(sound: Path, name: str, old: str, new: str, report: str) -> None:
    path = sound / name
    path.write_text(path.read_text().replace(old, new))
    assert any(line.startswith(report) for line in problems(sound)), problems(sound)
