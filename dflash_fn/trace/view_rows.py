"""A row of a trace as HTML: its text, coloured by step, and its blocks, token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator

from dflash_fn.trace.view_html import Html, joined, shown, tag
from dflash_fn.trace.view_story import Block, Candidate, Mark, Slot, Story
from dflash_fn.trace.view_text import Speller

__all__ = ["GLYPHS", "blocks_of", "number", "text_of"]

GLYPHS = {
    Mark.ACCEPTED: "\u2713",
    Mark.REJECTED: "\u2717",
    Mark.UNREACHED: "\u2013",
    Mark.BONUS: "+",
    Mark.RECOVERED: "\u21bb",
    Mark.OPENING: "\u25b8",
}
"""What stands before a token, so that no colour is needed to tell what became of it."""

COLOURS = 6
"""How many colours the steps go round in."""
CANDIDATES = 6
"""How many of a slot's candidates are listed, the slot's own not counted."""
ALIKE = 5e-7
"""Below it two numbers are written alike."""


def number(value: float | None) -> str:
    """Return a probability in few characters.

    Example:
        >>> number(0.25), number(1.0), number(0.00012), number(0.0), number(None)
        ('0.250', '1', '1.2e-04', '0', '?')
    """
    if value is None:
        return "?"
    if value == 0 or abs(value - 1) < ALIKE:
        return f"{value:.0f}"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


def text_of(story: Story, speller: Speller) -> Html:
    """Return the prompt, and the text that the row gained, one element a token and one a step."""
    tokens = [slot.token for block in story.blocks for slot in block.emitted]
    written = speller.along([*story.prompt, *tokens])
    prompt, pieces = speller.separator.join(written[: len(story.prompt)]), iter(written[len(story.prompt) :])
    parts = [tag("span", shown(prompt, flows=True), class_="prompt")]
    for block in story.blocks:
        parts.append(_step_of(story, block, [next(pieces) for _ in block.emitted], speller.separator))
    return tag("p", *parts, class_="text walk", role="group", aria_label="The text, token by token")


def _step_of(story: Story, block: Block, pieces: list[str], separator: str) -> Html:
    tokens = [
        joined([separator, _token(story, block, slot, shown(piece, flows=True) or tag("i", "\u25e6", class_="mark"))])
        for slot, piece in zip(block.emitted, pieces, strict=True)
    ]
    count = tag("sup", str(block.step), aria_hidden="true")
    return tag("span", count, *tokens, class_=f"step c{block.step % COLOURS}", data_step=block.step)


def _token(story: Story, block: Block, slot: Slot, content: Html) -> Html:
    kind = "own" if slot.mark is not Mark.ACCEPTED else "drafted"
    place = _place(story, block, slot)
    return tag(
        "span", content, class_=f"tok {kind}", role="button", tabindex=0, data_tip=f"t{place}", data_go=f"s{place}",
        aria_describedby=f"t{place}",
    )  # fmt: skip


def _place(story: Story, block: Block, slot: Slot) -> str:
    extra = "x" if slot is block.extra else ""
    return f"{story.row}-{block.step}-{slot.index}{extra}"


def blocks_of(story: Story, speller: Speller) -> Html:
    """Return the blocks as a list, each with its tokens as buttons and with what is told of them."""
    plain = any(_hides(one) for block in story.blocks for slot in _slots(block) for one in slot.candidates)
    items = [
        tag("li", _head(block), _chips(story, block, speller, plain), class_=f"block c{block.step % COLOURS}",
            id=f"b{story.row}-{block.step}")
        for block in story.blocks
    ]  # fmt: skip
    listed = tag("ol", *items, class_="blocks")
    return tag("div", listed, class_="walk", role="group", aria_label="Blocks, token by token")


def _hides(one: Candidate) -> bool:
    """Whether the models' own softmax says more than p and q."""
    apart = [(one.p, one.target)] + ([(one.q, one.draft)] if one.q is not None and one.draft is not None else [])
    return any(abs(left - right) > ALIKE for left, right in apart)


def _slots(block: Block) -> Iterator[Slot]:
    """Go through a block in reading order: the extra token comes where it stands in the text."""
    yield from block.drafted[: block.num_accepted]
    if block.num_accepted < len(block.drafted):
        yield block.drafted[block.num_accepted]
    yield block.extra
    yield from block.drafted[block.num_accepted + 1 :]


def _head(block: Block) -> Html:
    size = len(block.drafted)
    said = f"accepted {block.num_accepted} of {size}" if size else "nothing was drafted"
    cut = block.num_accepted + 1 - len(block.emitted)
    parts = [f"position {block.extra.position - block.num_accepted}", said]
    parts += [f"{cut} cut off"] if cut else []
    parts += [f"ends: {block.stop.value}"] if block.stop else []
    return tag("p", tag("b", f"step {block.step}"), " \u00b7 ", " \u00b7 ".join(parts), class_="head")


def _chips(story: Story, block: Block, speller: Speller, plain: bool) -> Html:
    anchor = tag("span", tag("span", shown(speller.alone(block.anchor)), class_="what"), tag("small", "anchor"),
                 class_="chip anchor")  # fmt: skip
    chips = [_chip(story, block, slot, speller, plain) for slot in _slots(block)]
    return tag("div", anchor, *chips, class_="chips", data_step=block.step)


def _chip(story: Story, block: Block, slot: Slot, speller: Speller, plain: bool) -> Html:
    place = _place(story, block, slot)
    word = slot.mark.value if slot.emitted or slot.mark not in _KEPT else f"{slot.mark.value}, cut off"
    glyph = tag("span", GLYPHS[slot.mark], class_="glyph", aria_hidden="true")
    name = shown(speller.alone(slot.token))
    small = "" if slot.own is None else " ".join(_chances(slot, slot.own, plain))
    button = tag(
        "button", tag("span", glyph, tag("span", name, class_="name"), class_="what"), tag("small", small),
        tag("span", f", {word}", class_="unseen"), type="button", id=f"s{place}", data_tip=f"t{place}",
        class_=f"chip tok {slot.mark.name.lower()}{'' if slot.emitted or slot.mark not in _KEPT else ' cut'}",
        aria_describedby=f"t{place}",
    )  # fmt: skip
    return tag("span", button, _tip(place, slot, speller, plain, word), class_="holder")


_KEPT = (Mark.ACCEPTED, Mark.BONUS, Mark.RECOVERED, Mark.OPENING)


def _chances(slot: Slot, own: Candidate, plain: bool) -> list[str]:
    """Return p and q in words; the models' own where temperature 0 leaves of them no more than which token is first."""
    pairs = [("p", own.p), ("q", own.q)]
    if plain and all(one.p in (0.0, 1.0) for one in slot.candidates):
        pairs = [("target", own.target), ("draft", own.draft)]
    return [f"{name} {number(value)}" for name, value in pairs if value is not None]


def _has_q(slot: Slot) -> bool:
    return slot.own is not None and slot.own.q is not None


def _tip(place: str, slot: Slot, speller: Speller, plain: bool, word: str) -> Html:
    name = json.dumps(speller.alone(slot.token), ensure_ascii=False)
    head = tag("b", GLYPHS[slot.mark], " ", shown(name, flows=True))
    about = f"{word}, slot {slot.index}, position {slot.position}, id {slot.token}"
    parts = [tag("p", head), tag("p", about)]
    if slot.own is None:
        parts.append(tag("p", "p and q are not in this trace"))
    else:
        chances = f"p = {number(slot.own.p)}" + (f", q = {number(slot.own.q)}" if _has_q(slot) else ", no q here")
        parts.append(tag("p", chances, class_="chances"))
        parts.append(_table(slot, speller, plain))
    if slot.overlap is not None:
        parts.append(tag("p", f"p and q overlap by {number(slot.overlap)}"))
    return tag("div", *parts, class_="tip", id=f"t{place}", role="tooltip")


def _table(slot: Slot, speller: Speller, plain: bool) -> Html:
    rows = [one for one in slot.candidates if one.token != slot.token][:CANDIDATES]
    listed = [one for one in slot.candidates if one.token == slot.token or one in rows]
    names = ["token", "p", *(["q"] if _has_q(slot) else [])]
    names += ["target", *(["draft"] if _has_q(slot) and listed[0].draft is not None else [])] if plain else []
    head = tag("tr", *(tag("th", name, scope="col") for name in names))
    body = [
        tag("tr", tag("th", shown(speller.alone(one.token)), scope="row"),
            *(tag("td", number(getattr(one, name))) for name in names[1:]),
            class_="this" if one.token == slot.token else None)
        for one in listed
    ]  # fmt: skip
    return tag("table", tag("thead", head), tag("tbody", *body))
