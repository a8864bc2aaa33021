"""Ids of properties: promised in docstrings, and tested under their names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ids_under_test", "problems", "promised_ids"]

ID = re.compile(r"\bP\d\d\b")
SECTION = re.compile(r"^Guarantees:\n(?P<lines>(?:[ ].*\n?|\n)*)", re.MULTILINE)
TEST = re.compile(r"test_(?P<id>p\d\d)_")


def promised_ids(root: Path) -> dict[str, list[str]]:
    """Return the ids that Guarantees sections of the core and the ports name, each with where."""
    found: dict[str, list[str]] = {}
    for where, _, text in _docstrings(root, "dflash_fn", "ports"):
        for section in SECTION.finditer(text):
            for name in ID.findall(section["lines"]):
                found.setdefault(name, []).append(where)
    return found


def ids_under_test(root: Path) -> dict[str, list[str]]:
    """Return the ids that names of tests begin with, each with where."""
    found: dict[str, list[str]] = {}
    for where, name, _ in _tests(root):
        found.setdefault(name, []).append(where)
    return found


def problems(root: Path) -> list[str]:
    """Say which ids are promised and not tested, or tested and not promised, or not in their test's docstring."""
    promised, known = promised_ids(root), ids_under_test(root)
    untested = [(where, name) for name in promised.keys() - known.keys() for where in promised[name]]
    unpromised = [(where, name) for name in known.keys() - promised.keys() for where in known[name]]
    return [
        *(f"{where}: {name} is promised, and no test has it in its name" for where, name in sorted(untested)),
        *(f"{where}: {name} is tested, and no Guarantees section names it" for where, name in sorted(unpromised)),
        *(f"{where}: its docstring does not name {name}" for where, name, text in _tests(root) if name not in text),
    ]


def _tests(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (where, id, docstring) of each test of a property."""
    for where, name, text in _docstrings(root, "properties", "tests"):
        match = TEST.match(name)
        if match:
            yield where, match["id"].upper(), text


def _docstrings(root: Path, *folders: str) -> Iterator[tuple[str, str, str]]:
    """Yield (where, name, docstring) of each module, class and function."""
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                name = "" if isinstance(node, ast.Module) else node.name
                yield f"{path.relative_to(root).as_posix()}: {name}", name, ast.get_docstring(node) or ""
