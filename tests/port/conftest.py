"""Every test here runs on every port; `known_failures.txt` lists what a port is known to get wrong, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.fixtures import checkpoints, port

__all__ = ["checkpoints", "port"]

HERE = Path(__file__).parent


def known_failures() -> dict[str, str]:
    """Read the list: the end of a test's id, two spaces or more, the reason."""
    lines = (HERE / "known_failures.txt").read_text(encoding="utf-8").splitlines()
    entries = [line.partition("  ") for line in lines if line.strip() and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, _, reason in entries}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = known_failures()
    for item in items:
        reason = known.get(item.nodeid.rpartition("/")[2]) if item.path.is_relative_to(HERE) else None
        if reason:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
