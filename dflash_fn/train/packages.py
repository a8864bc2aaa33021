"""Packages whose sources a target is trained on: fetched by pip as wheels, with their licences and digests."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from dflash_fn import errors

__all__ = ["Package", "fetch", "licence_of", "sources"]

PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|0BSD|Zlib|Unlicense|HPND)\b", re.IGNORECASE
)
COPYLEFT = re.compile(r"GPL|Mozilla|\bMPL\b|Affero|EUPL|CDDL|Proprietary", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Package:
    """A package that is part of a corpus.

    Attributes:
        name: and version, as `name==version`.
        licence: as its metadata has it.
        sha256: of the wheel.
        wheel: where it lies.
    """

    name: str
    licence: str
    sha256: str
    wheel: Path


def fetch(names: tuple[str, ...], folder: Path) -> list[Package]:
    """Have pip fetch the wheels that are not in `folder` yet, and look at their licences.

    It is a wheel's own licence that is looked at, and not those of other projects' code that it brings with it.

    Raises:
        DownloadError: pip cannot fetch one.
        InputError: a licence that is not known to be permissive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name in names:
        wheel = _wheel(name, folder) or _downloaded(name, folder)
        licence = licence_of(wheel)
        if not PERMISSIVE.search(licence) or COPYLEFT.search(licence):
            raise errors.InputError(f"{name}: its licence is {licence!r}, expected a permissive one; leave it out")
        made.append(Package(name, licence, hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel))
    return made


def _wheel(name: str, folder: Path) -> Path | None:
    package, _, version = name.partition("==")
    stem = re.sub(r"[-_.]+", "_", package).lower()
    for path in sorted(folder.glob("*.whl")):
        found, known = path.name.split("-")[:2]
        if (re.sub(r"[-_.]+", "_", found).lower(), known) == (stem, version):
            return path
    return None


def _downloaded(name: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), name], capture_output=True, text=True, check=False)
    wheel = _wheel(name, folder)
    if done.returncode or wheel is None:
        why = (done.stderr.strip().splitlines() or ["no wheel of that version"])[-1]
        raise errors.DownloadError(f"{name}: pip cannot fetch its wheel ({why}); put it into {folder}, or leave it out")
    return wheel


def licence_of(wheel: Path) -> str:
    """Return what a wheel's metadata says of its licence: the expression, else the classifiers, else the field."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        head = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    classifiers = [line.rpartition(" :: ")[2] for line in head.get_all("Classifier", []) if line.startswith("License")]
    field = (head.get("License") or "").strip().splitlines()
    return head.get("License-Expression") or "; ".join(classifiers) or (field[0] if field else "none stated")


def sources(package: Package, *, longest: int) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a wheel's Python files, sorted; files that are long or no UTF-8 are left out."""
    with zipfile.ZipFile(package.wheel) as archive:
        for info in sorted(archive.infolist(), key=lambda entry: entry.filename):
            if info.filename.endswith(".py") and 0 < info.file_size <= longest:
                text = decoded(archive.read(info))
                if text is not None:
                    yield f"{package.name}/{info.filename}", text


def decoded(content: bytes) -> str | None:
    """Return a text with Unix line ends, or None where the bytes are no UTF-8."""
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
