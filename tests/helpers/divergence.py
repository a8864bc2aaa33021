"""Where two right programs part: at a near tie, whose gap is smaller than what rounding may move, or by a mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dflash_fn.divergence import Divergence

KNOWN = Path(__file__).resolve().parents[1] / "known"


class NearTie(AssertionError):
    """Two programs chose differently where rounding may decide: the one failure that tests/known may excuse."""


def demand_near_tie(found: Divergence) -> None:
    """Raise AssertionError unless rounding explains the divergence."""
    assert found.near_tie, str(found)


def known_near_ties(port: str) -> Mapping[str, str]:
    """Read tests/known/PORT.txt: a reason for each test name that may end in `NearTie`."""
    lines = (KNOWN / f"{port}.txt").read_text(encoding="utf-8").splitlines()
    return parse_known([line.strip() for line in lines])


def parse_known(lines: Sequence[str]) -> Mapping[str, str]:
    """Read `NAME: REASON` lines; raise ValueError where one is something else."""
    known: dict[str, str] = {}
    for line in lines:
        if not line or line.startswith("#"):
            continue
        name, _, reason = line.partition(": ")
        if not reason.strip() or name in known:
            raise ValueError(f"expected one 'NAME: REASON' for each name, got {line!r}")
        known[name] = reason.strip()
    return known
