"""The page of a trace: what it says, and that nothing from the trace can become markup."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

import dflash_fn
from dflash_fn.cli.commands import app
from dflash_fn.metrics import TAU_DEFINITION, summarize
from dflash_fn.policies import Policy, match, token_rejection
from dflash_fn.records import Pair, StopReason
from dflash_fn.sampling import Sampling
from dflash_fn.trace import Trace, read_trace, record, render_page, write_trace
from dflash_fn.trace.view_html import shown, tag
from dflash_fn.trace.view_story import Mark, infos_of, kept_by_slot, stories_of

PROMPTS = ["import random", "def add(a, b):\n"]
WARM = Sampling(0.8, top_p=0.95)
VOID = {"meta", "link"}


class Page(HTMLParser):
    """Elements in order, each with its classes, attributes and text; fails where tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []
        self.open: list[dict[str, Any]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = {"tag": tag, "attrs": dict(attrs), "text": "", "path": [one["tag"] for one in self.open]}
        self.found.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        for element in self.open if self.open[-1:] and self.open[-1]["tag"] != "sup" else ():  # numbers of steps
            element["text"] += data

    def all(self, tag: str = "", **attributes: str) -> list[dict[str, Any]]:
        """Return elements that have a tag, and words in their attributes."""
        return [
            one
            for one in self.found
            if tag in ("", one["tag"])
            and all(word in (one["attrs"].get(name.rstrip("_")) or "").split() for name, word in attributes.items())
        ]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return dflash_fn.load_zoo("tiny-code")


def recorded(pair: Pair, policy: Policy, count: int = 24, **options: Any) -> Trace:
    state = dflash_fn.prefill(pair, PROMPTS, seed=(3, 4))
    return record(state, pair, policy=policy, max_new_tokens=count, stop_token_ids=(), **options)[1]


@pytest.fixture(scope="module")
def trace(pair: Pair) -> Trace:
    return recorded(pair, token_rejection(WARM))


@pytest.fixture(scope="module")
def page(trace: Trace, pair: Pair) -> Page:
    return Page(render_page(trace, pair.tokenizer))


def test_figures_are_those_of_the_metrics(page: Page, trace: Trace) -> None:
    infos = infos_of(trace)
    every = summarize(infos, row=None)
    (tau,) = page.all("b", class_="tau")
    assert tau["text"] == f"tau {every.tau:.2f}"
    assert any(one["text"] == TAU_DEFINITION for one in page.all("p"))
    assert any(f"{every.num_tokens} tokens, {every.steps} steps" in one["text"] for one in page.all("p", class_="lead"))
    titles = [one["text"] for one in page.all("h2")]
    for row, (title, story) in enumerate(zip(titles, stories_of(trace), strict=True)):
        summary = summarize(infos, row)
        assert title == f"Row {row}: tau {summary.tau:.2f}, seed {trace.seed[row]}"
        kept = kept_by_slot(story.blocks)
        assert sum(count for count, _ in kept) == sum(summary.num_accepted)
        assert [of for _, of in kept] == [summary.steps] * (trace.block_size - 1)
        assert kept[0][0] - kept[1][0] == summary.histogram[1]


def test_infos_of_a_trace_are_those_of_the_run(pair: Pair) -> None:
    state = dflash_fn.prefill(pair, PROMPTS, seed=(3, 4))
    options: dict[str, Any] = {"max_new_tokens": 24, "stop_token_ids": (), "policy": token_rejection(WARM)}
    infos = [info for _, info in dflash_fn.rounds(state, pair, **options)]
    for row in (0, 1, None):
        assert summarize(infos_of(recorded(pair, token_rejection(WARM))), row) == summarize(infos, row)


def test_every_token_of_every_block_is_there_with_its_mark(page: Page, trace: Trace) -> None:
    expected: Counter[str] = Counter()
    for rows in trace.steps:
        for row in filter(None, rows):
            size = len(row.block) - 1
            expected["accepted"] += row.num_accepted
            expected["rejected"] += row.num_accepted < size
            expected["unreached"] += max(size - row.num_accepted - 1, 0)
            last = "opening" if size == 0 else "bonus" if row.num_accepted == size else "recovered"
            expected[last] += 1
    found = Counter({mark.name.lower(): len(page.all("button", class_=mark.name.lower())) for mark in Mark})
    assert found == +expected
    assert min(expected[name] for name in ("accepted", "rejected", "recovered")) > 0
    assert len(page.all(class_="block")) == sum(row is not None for rows in trace.steps for row in rows)
    assert len(page.all("section")) == 2
    assert len(page.all("span", class_="step")) == len(page.all(class_="block"))


def test_every_token_has_p_and_q_for_mouse_and_keyboard_alike(page: Page, trace: Trace) -> None:
    tips = {one["attrs"]["id"]: one for one in page.all("div", role="tooltip")}
    tokens = page.all(class_="tok")
    assert len(tips) == len(page.all("button"))
    for one in tokens:
        assert one["attrs"]["data-tip"] == one["attrs"]["aria-describedby"]
        assert one["attrs"]["data-tip"] in tips
        assert one["tag"] == "button" or one["attrs"]["tabindex"] == "0"
    row = trace.steps[1][0]
    assert row is not None
    assert row.laws is not None
    place = row.laws.ids[0].tolist().index(row.block[1])
    text = tips["t0-1-1"]["text"]
    assert f"p = {row.laws.p[0, place]:.3f}, q = {row.laws.q[0, place]:.3f}" in text
    assert f"slot 1, position {len(trace.prompts[0]) + 1}, id {row.block[1]}" in text
    assert f"p and q overlap by {row.laws.overlap[0]:.3f}" in text


def test_the_text_is_the_text(page: Page, trace: Trace, pair: Pair) -> None:
    for row, one in enumerate(page.all("p", class_="text")):
        emitted = [token for rows in trace.steps if (found := rows[row]) for token in found.emitted]
        whole = pair.tokenizer.decode([*trace.prompts[row], *emitted])
        assert re.sub("[\u21b5\u25e6]", "", one["text"]) == whole


def test_the_head_says_what_ran(page: Page, trace: Trace) -> None:
    facts = dict(zip([one["text"] for one in page.all("dt")], [one["text"] for one in page.all("dd")], strict=True))
    assert facts["pair"] == "tiny-code"
    assert facts["policy"] == "token_rejection, T=0.8 top_p=0.95, lossless"
    assert facts["sampling"] == "T=0.8 top_p=0.95"
    assert (facts["dtype"], facts["seed"], facts["block size"]) == ("float32", "3, 4", "8, verified 8 wide")
    assert facts["port"].startswith("torch (torch ")


def test_nothing_is_fetched_and_nothing_else_may_run(page: Page) -> None:
    for one in page.found:
        for name, value in one["attrs"].items():
            assert not name.startswith("on")
            assert name != "style"
            if name in ("src", "href", "action"):
                assert (value or "").startswith(("#", "data:,"))
    (allowed,) = [one["attrs"]["content"] for one in page.all("meta") if "http-equiv" in one["attrs"]]
    assert allowed.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    for name in ("style", "script"):
        assert all("http" not in one["text"] and "@import" not in one["text"] for one in page.all(name))


EVIL = '</script><img src=x onerror="alert(1)">&amp;\x00\x1b[31m\u202e\ud800'


class Speaking:
    """A tokenizer of which every token is as bad as can be."""

    clean_up_tokenization_spaces = False
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __len__(self) -> int:
        return 4096

    def convert_ids_to_tokens(self, token: int) -> str:
        return EVIL

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return EVIL * len(ids)


def test_a_token_cannot_become_markup(trace: Trace, page: Page) -> None:
    evil = replace(trace, pair=EVIL, policy="<b>", tool="<script>")
    text = render_page(evil, Speaking())
    made = Page(text)
    for name in ("img", "script", "style", "b"):
        assert len(made.all(name)) == len(page.all(name))
    assert len(made.found) > len(page.found)  # marks of what cannot be seen
    text.encode()
    assert not set(text) & {*map(chr, range(9)), "\x1b", "\u202e", "\ud800"}
    assert {"\u2400", "\u241b", "U+202E", "\ufffd"} <= {one["text"] for one in made.all("i")} | {"\ufffd"}


def test_tags_escape_text_and_attributes() -> None:
    assert tag("a", "<", tag("b", "&"), title='"<') == '<a title="&quot;&lt;">&lt;<b>&amp;</b></a>'
    assert shown("a b\n\t") == ('a<i class="mark">\u00b7</i>b<i class="mark">\u21b5</i><i class="mark">\u21e5</i>')
    assert shown("a b\n", flows=True) == 'a b<i class="mark">\u21b5</i>\n'


def test_ids_where_there_is_no_tokenizer(trace: Trace) -> None:
    made = Page(render_page(trace))
    row = trace.steps[0][1]
    assert row is not None
    assert made.all("button", id="s1-0-1x")[0]["text"].startswith(f"\u25b8{row.next_token}p ")
    assert made.all("span", class_="prompt")[0]["text"] == " ".join(map(str, trace.prompts[0]))


def test_a_trace_without_p_and_q_still_makes_a_page(trace: Trace, pair: Pair) -> None:
    bare = tuple(tuple(row and replace(row, laws=None) for row in rows) for rows in trace.steps)
    made = Page(render_page(replace(trace, steps=bare, sampling=None, drafting=None, lossless=None), pair.tokenizer))
    assert all("p and q are not in this trace" in one["text"] for one in made.all("div", role="tooltip"))
    assert "not in this trace" in [one["text"] for one in made.all("dd")]


def test_a_cut_block_says_what_was_cut(trace: Trace, pair: Pair) -> None:
    step, row = next((step, row) for step, (row, _) in enumerate(trace.steps) if row and row.num_accepted >= 2)
    short = replace(row, emitted=row.emitted[:1], stop=StopReason.STOP_TOKEN)
    cut = replace(trace, steps=(*trace.steps[:step], (short, None)))
    made = Page(render_page(cut, pair.tokenizer))
    head = next(one["text"] for one in made.all("p", class_="head") if one["text"].startswith(f"step {step} "))
    assert f"accepted {row.num_accepted} of 7 \u00b7 {row.num_accepted} cut off" in head
    assert "ends: a stop token was emitted" in head
    assert len(made.all("button", class_="cut")) == row.num_accepted
    (story, _) = stories_of(cut)
    assert sum(count for count, _ in kept_by_slot(story.blocks)) == sum(story.summary.num_accepted)


def test_greedy_shows_what_the_models_thought(pair: Pair) -> None:
    trace = recorded(pair, match(), 6)
    made = Page(render_page(trace, pair.tokenizer))
    row = trace.steps[1][0]
    assert row is not None
    assert row.laws is not None
    place = row.laws.ids[0].tolist().index(row.block[1])
    text = next(one["text"] for one in made.all("button", id="s0-1-1"))
    assert row.laws.draft is not None
    assert f"target {row.laws.target[0, place]:.3f} draft {row.laws.draft[0, place]:.3f}" in text


def test_nothing_was_decoded(pair: Pair) -> None:
    made = Page(render_page(recorded(pair, match(), 0), pair.tokenizer))
    assert made.all("b", class_="tau")[0]["text"] == "tau none"
    assert made.all("svg") == []
    made = Page(render_page(recorded(pair, match(), 6, block_size=1), pair.tokenizer))
    assert made.all("b", class_="tau")[0]["text"] == "tau 1.00"


# the command


def invoke(*args: Any) -> Any:
    return CliRunner().invoke(app, ["trace", "view", *map(str, args)])


@pytest.fixture(scope="module")
def file(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "a.trace"
    write_trace(path, trace)
    return path


def test_the_page_lies_beside_the_trace_and_tokens_are_text(file: Path, pair: Pair, trace: Trace) -> None:
    result = invoke(file)
    page = Path(f"{file}.html")
    assert (result.exit_code, result.stdout) == (0, f"{page}: {page.stat().st_size} bytes\n")
    assert page.read_text(encoding="utf-8") == render_page(read_trace(file), pair.tokenizer)


def test_ids_and_places(file: Path, tmp_path: Path, trace: Trace) -> None:
    result = invoke(file, "--ids", "--out", tmp_path / "ids.html", "--json")
    size = (tmp_path / "ids.html").stat().st_size
    assert result.stdout == f'{{"file": "{tmp_path}/ids.html", "bytes": {size}, "tokens_as": "ids"}}\n'
    assert (tmp_path / "ids.html").read_text(encoding="utf-8") == render_page(trace)
    write_trace(tmp_path / "mine", replace(trace, pair="mine"))
    assert "tokens as ids, --pair or --target names a tokenizer" in invoke(tmp_path / "mine").stdout
    result = invoke(tmp_path / "mine", "--pair", "tiny-code", "--json")
    assert '"tokens_as": "text"' in result.stdout


def test_open_hands_the_page_to_the_browser(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert invoke(file, "--ids", "--open").exit_code == 0
    assert opened == [Path(f"{file}.html").resolve().as_uri()]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["{tmp}/none"], "{tmp}/none: no such file"),
        (["{file}", "--out", "{tmp}/no/x"], "--out {tmp}/no/x: there is no folder {tmp}/no"),
        (["{file}", "--out", "{file}"], "--out {file}: is the trace itself; give the name of another file"),
        (["{file}", "--ids", "--pair", "tiny-code"], "--ids needs no tokenizer; leave --pair and --target out"),
        (["{file}", "--target", "a", "--pair", "tiny-code"], "--pair and --target exclude each other"),
        (["{file}", "--pair", "tiny"], "tiny"),
    ],
)
def test_what_cannot_be_is_refused(file: Path, tmp_path: Path, args: list[str], text: str) -> None:
    result = invoke(*(arg.format(tmp=tmp_path, file=file) for arg in args))
    assert result.exit_code == 2
    assert text.format(tmp=tmp_path, file=file) in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("match, T=1", "drafted behind a rejected token, so of no account<"),
        (
            "block_verification, T=1",
            "a rejected token; the block is judged as a whole, so it had a part in",
        ),
        ("mine", "drafted behind a rejected token<"),
    ],
)
def test_what_lies_behind_a_rejected_token_depends_on_the_policy(trace: Trace, policy: str, words: str) -> None:
    assert words in render_page(replace(trace, policy=policy))
