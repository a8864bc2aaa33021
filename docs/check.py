"""Fail when a public name is undocumented, docs/reference is out of date, or a relative link leads nowhere.

Run as `python docs/check.py`; it needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from build_reference import build_pages, files, stale

FENCE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*?$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n)\n(?: {4}.*\n|\n)+")
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(<?(?P<inline>[^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s+(?P<defined>\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
NOT_OURS = {"build", "dist", "node_modules"}


def main() -> None:
    """Print every problem of a checkout and exit with 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    root = parser.parse_args().root.resolve()
    problems = [*reference_problems(root), *link_problems(root)]
    print("\n".join(problems) or "docs: every public name is documented, every link leads somewhere")
    sys.exit(bool(problems))


def reference_problems(root: Path) -> Iterator[str]:
    """Yield undocumented names, and pages of docs/reference that are not what the docstrings say."""
    pages = build_pages(root)
    for page in pages:
        yield from page.problems
    old = [path.name for path in stale(root / "docs" / "reference", files(pages))]
    if old:
        yield f"docs/reference: out of date: {', '.join(old)}; run: python docs/build_reference.py"


def link_problems(root: Path) -> Iterator[str]:
    """Yield relative links whose file or heading does not exist."""
    for path in markdown_files(root):
        for link in links(path.read_text(encoding="utf-8")):
            problem = _broken(link, path)
            if problem:
                yield f"{path.relative_to(root)}: {link}: {problem}"


def markdown_files(root: Path) -> list[Path]:
    """Return the Markdown files of a checkout, but for hidden folders and what was built."""
    found = []
    for path in sorted(root.rglob("*.md")):
        folders = path.relative_to(root).parts[:-1]
        if not any(part.startswith(".") or part in NOT_OURS for part in folders):
            found.append(path)
    return found


def links(text: str) -> list[str]:
    """Return where the links of a Markdown text lead, code left out."""
    prose = CODE.sub("", INDENTED.sub("\n", FENCE.sub("", text)))
    return [match["inline"] or match["defined"] for match in LINK.finditer(prose)]


def _broken(link: str, path: Path) -> str:
    if ELSEWHERE.match(link):
        return ""
    name, _, fragment = link.partition("#")
    there = path.parent / name if name else path
    if not there.exists():
        return "no such file"
    if fragment and there.suffix == ".md" and fragment not in anchors(there.read_text(encoding="utf-8")):
        return "no such heading"
    return ""


def anchors(text: str) -> set[str]:
    """Return what fragments may name in a Markdown text: headings as GitHub spells them, and explicit anchors."""
    found = set(ANCHOR.findall(text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        spellings = [slug, *(f"{slug}-{number}" for number in range(1, len(found) + 1))]
        found.add(next(name for name in spellings if name not in found))
    return found


if __name__ == "__main__":
    main()
