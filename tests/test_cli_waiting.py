"""Threads sleep while they wait on a machine that is busy already."""

from __future__ import annotations

import os

import pytest

from dflash_fn.cli import waiting


@pytest.mark.parametrize(
    ("settings", "busy", "expected"),
    [
        ({}, 0.1, {}),
        ({}, 0.5, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 2.0, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "10"}, 2.0, {"GOMP_SPINCOUNT": "10"}),
        ({"KMP_BLOCKTIME": "0"}, 2.0, {"KMP_BLOCKTIME": "0"}),
    ],
)
def test_what_is_set(settings: dict[str, str], busy: float, expected: dict[str, str]) -> None:
    waiting.wait_kindly(settings, busy)
    assert settings == expected


def test_the_load_of_a_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 0.0, 0.0), raising=False)
    assert waiting.load() == 0.5
    monkeypatch.setattr(os, "getloadavg", unknown, raising=False)
    assert waiting.load() == 0.0
    monkeypatch.delattr(os, "getloadavg")
    assert waiting.load() == 0.0
