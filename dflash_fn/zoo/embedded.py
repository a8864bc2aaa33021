"""Pairs that are part of the package itself."""

from __future__ import annotations

from pathlib import Path

from dflash_fn import errors

__all__ = ["PAIRS", "folders", "present"]

PAIRS = Path(__file__).parent / "pairs"
"""Where the embedded pairs lie."""


def folders(name: str) -> tuple[Path, Path]:
    """Return the target's and the draft's checkpoint folder of an embedded pair.

    Raises:
        CheckpointError: the installed package lacks them.
    """
    target, draft = PAIRS / name / "target", PAIRS / name / "draft"
    for folder in (target, draft):
        if not (folder / "config.json").is_file():
            raise errors.CheckpointError(f"{folder}: missing from the installed package; install dflash-fn again")
    return target, draft


def present(name: str) -> bool:
    """Whether the installed package holds a pair."""
    return all((PAIRS / name / role / "config.json").is_file() for role in ("target", "draft"))
