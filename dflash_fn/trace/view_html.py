"""HTML that cannot be forgotten to be escaped: a string is text until something here has made HTML of it."""

from __future__ import annotations

import html
from collections.abc import Iterable

__all__ = ["Html", "joined", "shown", "tag"]

VOID = frozenset({"link", "meta"})

PICTURES = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
"""Characters of ASCII that nobody can see, and Unicode's pictures of them."""
MARKS = {"\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d", " ": "\u00b7"}
HIDDEN = frozenset(
    [*range(0x80, 0xA0), 0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF]
)
"""Further characters that cannot be seen, or that turn the order of those after them."""
CLEAN = {code: picture for code, picture in PICTURES.items() if chr(code) not in "\n\t"} | dict.fromkeys(
    [*HIDDEN, *range(0xD800, 0xE000)], 0xFFFD
)
"""What no page may hold as it is, and what stands for it; halves of surrogate pairs cannot even be written."""


class Html(str):
    """A string that is HTML already."""

    __slots__ = ()


def joined(parts: Iterable[str]) -> Html:
    """Return one piece of HTML; parts that are not `Html` are escaped."""
    return Html("".join(part if isinstance(part, Html) else _escaped(part) for part in parts))


def _escaped(text: str) -> str:
    return html.escape(text.translate(CLEAN))


def tag(name: str, /, *children: str, **attributes: str | int | None) -> Html:
    """Return an element.

    Args:
        name: of the element.
        children: its content; whatever is not `Html` is escaped.
        attributes: `_` in a name stands for `-`, one at its end for nothing (`class_`); None leaves one out.

    Example:
        >>> tag("b", "a < b", class_="x")
        '<b class="x">a &lt; b</b>'
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{said}>") if name in VOID else Html(f"<{name}{said}>{joined(children)}</{name}>")


def shown(text: str, *, flows: bool = False) -> Html:
    r"""Return text in which every character can be seen.

    Args:
        text: of a token; half a surrogate pair, which no file can hold, becomes U+FFFD.
        flows: whether it stands in running text, where spaces are spaces and a new line is one.

    Example:
        >>> shown("a\x00", flows=True)
        'a<i class="mark">␀</i>'
    """
    return joined(_shown(character, flows) for character in text)


def _shown(character: str, flows: bool) -> str:
    code = ord(character)
    if 0xD800 <= code < 0xE000:
        return "\ufffd"
    if character == " " and flows:
        return character
    mark = MARKS.get(character) or (chr(PICTURES[code]) if code in PICTURES else "")
    if code in HIDDEN:
        mark = f"U+{code:04X}"
    if not mark:
        return character
    return joined([tag("i", mark, class_="mark"), "\n" if flows and character == "\n" else ""])
