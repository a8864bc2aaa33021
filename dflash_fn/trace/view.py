"""A trace as one HTML page, to see what a draft does: no network, no other file, and readable without its script.

Reading order: `view_story` (what there is to tell) · `view_text` (tokens as text) · `view_html` (escaping) ·
`view_rows`, `view_charts` (the parts) · here, the page. `view.css` and `view.js` are put into it as they are.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from dflash_fn.metrics import TAU_DEFINITION, Summary, summarize
from dflash_fn.trace.records import Trace
from dflash_fn.trace.view_charts import slot_chart, step_chart
from dflash_fn.trace.view_html import Html, joined, tag
from dflash_fn.trace.view_rows import GLYPHS, blocks_of, text_of
from dflash_fn.trace.view_story import Mark, Story, infos_of, kept_by_slot, stories_of
from dflash_fn.trace.view_text import Speller, speller_of

__all__ = ["render_page"]

LEGEND = {
    Mark.ACCEPTED: "drafted, and kept",
    Mark.REJECTED: "drafted, and rejected",
    Mark.UNREACHED: "drafted behind a rejected token",
    Mark.RECOVERED: "recovered: the target's token in place of the rejected one",
    Mark.BONUS: "bonus: the target's token after a whole block was kept",
    Mark.OPENING: "the first token, before anything is drafted",
}


UNREACHED = {
    **dict.fromkeys(("match", "token_rejection", "typical", "relaxed", "forced"), ", so of no account"),
    "block_verification": "; the block is judged as a whole, so it had a part in how much was kept",
}
"""What more can be said of `Mark.UNREACHED`, by how a policy's name begins."""


def render_page(trace: Trace, tokenizer: Any | None = None) -> str:
    """Return a trace as an HTML page.

    The page loads nothing: style and script stand in it, and a policy in its head forbids anything else. Whatever
    comes from the trace is escaped, and characters that cannot be seen are shown.

    Args:
        trace: of `record` or `read_trace`; p and q are shown where it has them.
        tokenizer: a transformers tokenizer, that of the pair; None shows token ids.
    """
    stories, speller = stories_of(trace), speller_of(tokenizer)
    style, script = _part("view.css"), _part("view.js")
    title = f"{trace.pair}, {trace.policy}"
    body = tag(
        "main",
        _header(trace, summarize(infos_of(trace), row=None), stories),
        *(_row(story, speller, trace.block_size, alone=len(stories) == 1) for story in stories),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_allowed(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title} \u2013 dflash_fn trace"),
        tag("style", Html(style)),
    )
    whole = tag(
        "html", head, tag("body", body, tag("div", id="tip", hidden=""), tag("script", Html(script))), lang="en"
    )
    return f"<!DOCTYPE html>\n{whole}\n"


def _part(name: str) -> str:
    return files("dflash_fn.trace").joinpath(name).read_text(encoding="utf-8")


def _allowed(style: str, script: str) -> str:
    """Return a content security policy: this style, this script, an empty icon, and nothing from anywhere."""
    one, other = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    return f"default-src 'none'; img-src data:; style-src 'sha256-{one}'; script-src 'sha256-{other}'"


def _header(trace: Trace, summary: Summary, stories: list[Story]) -> Html:
    tau = "none" if summary.tau is None else f"{summary.tau:.2f}"
    count = f"{summary.num_tokens} tokens, {summary.steps} steps after the opening step"
    parts = [
        tag("h1", "What the draft did"),
        tag("p", tag("b", f"tau {tau}", class_="tau"), " ", count, class_="lead"),
        tag("p", TAU_DEFINITION, class_="quiet"),
        _facts(trace),
        _legend(trace),
    ]
    if len(stories) > 1:
        links = [tag("a", f"row {story.row}", href=f"#row{story.row}") for story in stories]
        parts.append(tag("nav", *_between(links, " "), aria_label="Rows"))
    return tag("header", *parts)


def _facts(trace: Trace) -> Html:
    lossless = {True: ", lossless", False: ", not lossless"}.get(trace.lossless, "")  # type: ignore[call-overload]
    facts = {
        "pair": trace.pair,
        "port": f"{trace.port} ({trace.backend}, {trace.device})",
        "dtype": trace.dtype,
        "policy": trace.policy + lossless,
        "sampling": trace.sampling or "not in this trace",
        "drafting": "by a function" if trace.proposer else trace.drafting or ("" if trace.drafts else "no draft"),
        "block size": f"{trace.block_size}, verified {trace.width} wide",
        "seed": ", ".join(map(str, trace.seed)),
        "made by": trace.tool,
    }
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items() if value]
    return tag("dl", *items, class_="facts")


def _legend(trace: Trace) -> Html:
    more = next((said for name, said in UNREACHED.items() if trace.policy.startswith(name)), "")
    words = LEGEND | {Mark.UNREACHED: LEGEND[Mark.UNREACHED] + more}
    items = [
        tag("li", tag("span", GLYPHS[mark], class_=f"key {mark.name.lower()}", aria_hidden="true"), tag("span", said))
        for mark, said in words.items()
    ]
    keys = "In the text every step has a colour and begins with its number, and the target's own tokens are \
underlined. Arrow keys go from token to token and from step to step; Enter goes from the text to the block; Escape \
closes what is shown of a token."
    listed = tag("ul", *items, class_="legend")
    return tag("details", tag("summary", "How to read this page"), listed, tag("p", keys), _symbols(), open="")


def _symbols() -> Html:
    said = (
        "p: what the target's token is drawn from. q: what the drafted token was drawn from; 1 where no chance had a "
        "part. target and draft: the models' own softmax, where temperature and filters change it."
    )
    return tag("p", said)


def _row(story: Story, speller: Speller, block_size: int, *, alone: bool) -> Html:
    name = "The text" if alone else f"Row {story.row}"
    tau = "" if alone or story.summary.tau is None else f": tau {story.summary.tau:.2f}, seed {story.seed}"
    return tag(
        "section",
        tag("h2", name + tau, id=f"title{story.row}"),
        text_of(story, speller),
        _charts(story, block_size),
        tag("h3", "Block by block"),
        blocks_of(story, speller),
        id=f"row{story.row}",
        aria_labelledby=f"title{story.row}",
    )


def _charts(story: Story, block_size: int) -> Html:
    kept, emitted = kept_by_slot(story.blocks), [count + 1 for count in story.summary.num_accepted]
    if not emitted:
        return Html("")
    slots = [[str(slot), f"{count} of {of}", f"{count / of:.3f}"] for slot, (count, of) in enumerate(kept, start=1)]
    steps = [[str(count), str(steps)] for count, steps in enumerate(story.summary.histogram)]
    by_slot = _figure("Kept, by slot after the anchor", slot_chart(kept), ["slot", "blocks", "share"], slots)
    by_step = _figure("Tokens a step, and their mean so far", step_chart(emitted, block_size),
                      ["drafted tokens accepted", "steps"], steps)  # fmt: skip
    return tag("div", *([by_slot] if kept else []), by_step, class_="charts")


def _figure(title: str, chart: Html, head: list[str], rows: list[list[str]]) -> Html:
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", name, scope="col") for name in head))),
        tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows)),
    )
    return tag("figure", tag("figcaption", title), chart, tag("details", tag("summary", "The numbers"), table))


def _between(parts: Iterable[Html], separator: str) -> list[Html]:
    return [joined([separator if index else "", part]) for index, part in enumerate(parts)]
