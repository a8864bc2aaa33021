"""The frame of the repository: its top level, the two commands of the README, the version, the words."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dflash_fn

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "NOTICE", "README.md", "conftest.py",
    "constraints.txt", "dflash_fn", "docs", "ports", "properties", "pyproject.toml", "tests",
}  # fmt: skip
TEXT = {".md", ".py", ".toml", ".txt", ""}
UNWANTED = re.compile(r"drafter|(?<![\w./-])/(?:work|root|opt)/", re.IGNORECASE)
"""The word is "draft"; and no path is of one machine only."""

README = ROOT / "README.md"


def git(*arguments: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split("\0")[:-1]


def test_top_level_is_what_it_is_meant_to_be() -> None:
    assert {name for name in TOP_LEVEL if not (ROOT / name).exists()} == set()
    assert {name.partition("/")[0] for name in git("ls-files", "-z")} <= TOP_LEVEL


def test_no_file_speaks_of_one_machine_or_uses_a_banned_word() -> None:
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    paths = [ROOT / name for name in names if Path(name).suffix in TEXT and (ROOT / name).is_file()]
    assert len(paths) > 20
    texts = {path: path.read_text(encoding="utf-8") for path in paths if path != Path(__file__)}
    found = [f"{path}: {match[0]}" for path, text in texts.items() for match in UNWANTED.finditer(text)]
    assert found == []


def test_version_is_one() -> None:
    assert dflash_fn.__version__ == metadata.version("dflash-fn")
    assert re.fullmatch(r"\d+\.\d+\.\d+", dflash_fn.__version__)


def test_changelog_has_a_place_for_what_is_not_released() -> None:
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_ci_reads_the_test_command_from_the_readme() -> None:
    done = subprocess.run(["bash", ROOT / ".ci" / "run", "--show"], check=True, capture_output=True, text=True)
    command = done.stdout.strip()
    assert command.endswith("pytest -n 2")
    assert '-c constraints.txt -e ".[torch,dev]"' in command
    assert f"```bash\n{command}\n```" in README.read_text()


def test_readme_says_how_to_install() -> None:
    assert "pip install" in README.read_text().partition("<!-- ci: test command -->")[0]


def test_every_dependency_is_pinned() -> None:
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert not any("+" in version for _, version in pins)
    pinned = {canonicalize_name(name): version for name, version in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in map(Requirement, chain.from_iterable(wanted)):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier
