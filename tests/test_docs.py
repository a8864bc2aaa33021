"""Public names are documented, pages are current, links lead somewhere, and every example runs."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.import_rules import read_modules
from tests.helpers.run_blocks import python_blocks

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = sorted({ROOT / "README.md", *(path for path in ROOT.glob("docs/**/*.md") if path.parent.name != "reference")})
PAGES = [page.relative_to(ROOT).as_posix() for page in WRITTEN if python_blocks(page.read_text(encoding="utf-8"))]
FENCE = re.compile(r"^[ >]*(```|~~~) *(py|python|python3|pycon)\b", re.MULTILINE | re.IGNORECASE)
NOT_RUN = re.compile(r"^<!-- not run: \S.* -->\n```python$", re.MULTILINE)
MODULES = [module.name for module in read_modules(ROOT) if not module.name.endswith("__main__")]

SOUND = {
    "dflash_fn/__init__.py": '"""One."""\n\nfrom dflash_fn.a import f\n\n__all__ = ["f"]\n',
    "dflash_fn/a.py": '"""Two."""\n\n__all__ = ["C", "f"]\n\nC = 1\n"""Three."""\n\n\ndef f():\n    """Four."""\n',
    "README.md": "# Top\n[a](docs/reference/dflash_fn.a.md#f) [b](#top) `[c](nowhere)`\n```\n[d](nowhere)\n```\n"
    "\n    p[i](x)\n",
}


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)


def docs(script: str, root: Path) -> subprocess.CompletedProcess[str]:
    return run(str(ROOT / "docs" / script), "--root", str(root))


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    for name, text in SOUND.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs").mkdir()
    assert docs("build_reference.py", tmp_path).returncode == 0
    return tmp_path


def test_this_checkout_is_documented() -> None:
    done = docs("check.py", ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_sound_checkout_passes(sound: Path) -> None:
    done = docs("check.py", sound)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "old", "new", "report"),
    [
        ("dflash_fn/a.py", '    """Four."""\n', "    pass\n", "dflash_fn.a.f: no docstring"),
        ("dflash_fn/a.py", '"""Three."""\n', "", "dflash_fn.a.C: no docstring"),
        ("dflash_fn/a.py", '"f"]', '"f", "g"]', "dflash_fn.a.g: in __all__, but not defined"),
        ("dflash_fn/a.py", '__all__ = ["C", "f"]', "", "dflash_fn.a: no __all__, but public definitions such as f"),
        ("dflash_fn/a.py", "Two.", "Zwei.", "out of date: README.md, dflash_fn.a.md;"),
        ("dflash_fn/a.py", "def f()", "def f(x)", "out of date: dflash_fn.a.md; run: python docs/build_reference.py"),
        ("README.md", "dflash_fn.a.md", "dflash_fn.b.md", "README.md: docs/reference/dflash_fn.b.md#f: no such file"),
        ("README.md", "#f", "#g", "README.md: docs/reference/dflash_fn.a.md#g: no such heading"),
        ("README.md", "#top", "#bottom", "README.md: #bottom: no such heading"),
    ],
)
def test_each_fault_is_reported(sound: Path, name: str, old: str, new: str, report: str) -> None:
    path = sound / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    done = docs("check.py", sound)
    assert done.returncode == 1
    assert report in done.stdout


def test_a_page_that_is_no_longer_due_is_removed_and_a_written_one_is_kept(sound: Path) -> None:
    (sound / "dflash_fn" / "a.py").rename(sound / "dflash_fn" / "b.py")
    (sound / "docs" / "reference" / "by-hand.md").write_text("# By hand\n")
    assert "dflash_fn.a.md, dflash_fn.b.md" in docs("check.py", sound).stdout
    docs("build_reference.py", sound)
    left = {path.name for path in (sound / "docs" / "reference").iterdir()}
    assert left == {"README.md", "by-hand.md", "dflash_fn.md", "dflash_fn.b.md"}


def test_every_page_with_examples_is_run() -> None:
    assert {"README.md", "docs/tutorial.md", "docs/how-to/use-your-model.md", "docs/explanation/states.md"} <= {*PAGES}


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in WRITTEN])
def test_no_example_of_a_page_escapes(page: str) -> None:
    """Every Python block is run, or says on the line before why it is not."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(FENCE.findall(text)) == len(python_blocks(text)) + len(NOT_RUN.findall(text))


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page_run(page: str, tmp_path: Path) -> None:
    done = run(str(ROOT / "tests" / "helpers" / "run_blocks.py"), str(ROOT / page), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("code", "ok"), [("x + 1", True), ("assert x == 2", False), (">>> x\n2", False)])
def test_a_failing_example_is_seen(code: str, ok: bool, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\nx = 1\n```\n<!-- not run: fails -->\n```python\n1 / 0\n```\n```python\n{code}\n```\n")
    assert [line for line, _ in python_blocks(page.read_text())] == [1, 8]
    done = run(str(ROOT / "tests" / "helpers" / "run_blocks.py"), str(page), cwd=tmp_path)
    assert (done.returncode == 0) is ok
    assert ok or "line 9" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "escapes"),
    [
        ("```python\nx\n```\n", 0),
        ("<!-- not run: needs a hub -->\n```python\nx\n```\n", 0),
        ("<!-- not run: -->\n```python\nx\n```\n", 1),
        ("```py\nx\n```\n", 1),
        ("* a\n\n  ```python\n  x\n  ```\n", 1),
        ("~~~python\nx\n~~~\n", 1),
    ],
)
def test_an_example_that_escapes_is_seen(text: str, escapes: int) -> None:
    assert len(FENCE.findall(text)) - len(python_blocks(text)) - len(NOT_RUN.findall(text)) == escapes


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    package = name.partition(".")[0]
    if package.startswith("dflash_fn_"):  # a port whose array library is not installed
        pytest.importorskip(package.removeprefix("dflash_fn_"), exc_type=ImportError)
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
