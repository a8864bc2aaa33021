"""Questions, ways, and what replies come to, counted by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest

from dflash_fn import errors
from dflash_fn.bench import (
    Question,
    Record,
    Reply,
    ReplyFolder,
    Subject,
    as_markdown,
    ask_all,
    figures_of,
    parse_ways,
    read_questions,
    shortened,
    warm_up,
)
from dflash_fn.bench.clock import Clock
from dflash_fn.bench.contenders import parse_blocks
from dflash_fn.bench.estimates import quantile, quotient
from dflash_fn.bench.questions import SETS, digest
from dflash_fn.bench.ranks import World
from dflash_fn.bench.reply_files import REPLIES
from dflash_fn.bench.tables import as_object, failures, grids
from dflash_fn.text import conversation_ids

# questions


def test_wording_is_upstreams_and_raw_has_none() -> None:
    (asked,) = read_questions(["gsm8k"], limit=1)
    (bare,) = read_questions(["gsm8k"], limit=1, raw=True)
    text = bare.turns[0]
    assert asked == Question(
        "gsm8k/0", (f"{text}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",)
    )
    (code,) = read_questions(["humaneval"], limit=1)
    assert code.turns[0].startswith("Write a solution to the following problem and make sure that it passes the tests:")
    assert code.turns[0].endswith('"""\n\n```')
    (two,) = read_questions(["mt-bench"], limit=1)
    assert len(two.turns) == 2


@pytest.mark.oracle
@pytest.mark.parametrize("name", SETS)
def test_data_sets_are_those_of_upstream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = pytest.importorskip("dflash.benchmark")
    theirs = benchmark.DATASETS[name]
    assert (SETS[name].hub, SETS[name].split) == (theirs["load_args"], theirs["load_kwargs"]["split"])
    row = {"question": "a {b}?", "problem": "a {b}?", "prompt": ["a {b}?", "c"] if name == "mt-bench" else "a {b}?"}
    wanted = {"gsm8k": "question", "math500": "problem"}.get(name, "prompt")
    hub = ModuleType("datasets")
    calls = []

    def load_dataset(*place: str, split: str) -> list[dict]:
        calls.append((place, split))
        return [{wanted: row[wanted]}] * 12

    hub.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    found = read_questions([name], source="hub", limit=2)
    assert calls == [(SETS[name].hub, SETS[name].split)]
    said = theirs["format"]({wanted: row[wanted]})
    assert [list(one.turns) for one in found] == [said if isinstance(said, list) else [said]] * 2


@pytest.mark.oracle
def test_seed_42_gives_upstreams_order() -> None:
    benchmark = pytest.importorskip("dflash.benchmark")
    ours = read_questions(["gsm8k"], limit=7, shuffle=42)
    assert ours == benchmark._select_dataset(read_questions(["gsm8k"]), 7)


def test_rows_of_files(tmp_path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(4)))
    assert read_questions(data=[f"{file}:1-2"]) == [Question("mine/1", ("1?",)), Question("mine/2", ("2?",))]
    (worded,) = read_questions(data=[f"gsm8k={file}:3"])
    assert worded.turns[0].startswith("3?\nPlease reason")
    assert digest([worded]) != digest([replace(worded, turns=("3?",))])


def test_the_head_of_a_text(tmp_path) -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(letter) for letter in text]

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(map(chr, ids))

    (tmp_path / "some.py").write_text("import os\nimport sys\n")
    (question,) = read_questions(data=[str(tmp_path / "some.py")], raw=True)
    assert not question.whole
    assert shortened(question, Letters(), 9) == Question("some.py", ("import os",))
    assert shortened(Question("x", ("a long one",)), Letters(), 3).turns == ("a long one",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to ask; name a data set (gsm8k, math500, humaneval, mbpp, mt-bench), or give --data FILE"),
        ({"names": ["gsm9k"]}, "data set: got 'gsm9k', expected one of: gsm8k, math500"),
        (
            {"names": ["math500"]},
            "math500 is not bundled (humaneval, gsm8k, mt-bench are); add --source hub, or give its rows by --data",
        ),
        ({"names": ["gsm8k"], "source": "web"}, "source: got 'web', expected one of: bundled, hub"),
        ({"names": ["gsm8k"], "data": ["gsm8k:0"]}, "two questions are called gsm8k/0; name each once"),
        ({"data": ["some.py"]}, "--data some.py: is no .jsonl or .json file, and so a text to go on from; add --raw"),
        ({"data": ["some.py"], "raw": True}, "--data some.py: cannot be read as UTF-8 text (No such file"),
        ({"data": ["some.py:3"], "raw": True}, "--data some.py:3: names rows, which only .jsonl and .json files have"),
        ({"data": ["no.jsonl"]}, "no.jsonl: cannot be read as a JSONL file (No such file"),
    ],
)
def test_questions_that_cannot_be_asked(options, message) -> None:
    with pytest.raises(errors.InputError) as caught:
        read_questions(**options)
    assert message in str(caught.value)


def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(errors.BackendMissing, match=r'needs the package datasets.*run: pip install "dflash-fn\[bench'):
        read_questions(["mbpp"], source="hub")
    hub = ModuleType("datasets")

    def load_dataset(*place: str, split: str) -> None:
        raise ConnectionError("nobody\nthere")

    hub.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(errors.DownloadError) as caught:
        read_questions(["mbpp"], source="hub")
    assert str(caught.value) == (
        "mbpp: google-research-datasets/mbpp cannot be had from the hub (ConnectionError: nobody there); give its rows "
        "by --data mbpp=FILE, or ask what is bundled (humaneval, gsm8k, mt-bench) by --source bundled"
    )


# names of ways


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ours",
            "--ways: got 'ours', expected some of: generate, mlx-lm, upstream:B, plain:B, ngram:B, draft:B, both:B",
        ),
        ("ngrams", "--ways: got 'ngrams', expected some of"),
        ("generate:4", "--ways: got 'generate:4', expected some of"),
        ("draft:x", "--ways: got a block of 'x', expected a number of at least 2, or auto"),
        ("plain:auto", "--ways: got a block of 'auto', expected a number of at least 1"),
        ("draft:1", "--ways: got a block of '1', expected a number of at least 2"),
        ("plain,plain", "--ways: names plain twice"),
    ],
)
def test_ways_that_are_none(text, message) -> None:
    with pytest.raises(errors.InputError) as caught:
        parse_ways(text)
    assert message in str(caught.value)


def test_blocks() -> None:
    assert parse_blocks("4, 16,auto") == [4, 16, "auto"]
    with pytest.raises(errors.InputError, match="--blocks: got a block of '', expected a number of at least 2"):
        parse_blocks("4,")
    with pytest.raises(errors.InputError, match="--blocks 4,4: names one of them twice"):
        parse_blocks("4,4")


# figures


def record(question: str, way: str, reply: Reply, *, turn: int = 0, begun: float = 0.0, memory=None) -> Record:
    return Record(question, turn, way, reply, begun, memory)


def test_totals_are_those_of_a_count_by_hand() -> None:
    parts = {"draft": 0.5, "verify": 1.0, "select": 0.25, "overhead": 0.25}
    records = [
        record("a", "plain", Reply("xy", 9, 5.0, 1.0, (1,) * 8)),
        record("b", "plain", Reply("z", 5, 3.0, 1.0, (1,) * 4)),
        record("a", "draft:4", Reply("xy", 9, 3.0, 1.0, (4, 1, 3), parts), memory=1.5),
        record("b", "draft:4", Reply("w", 5, 3.0, 2.0, (2, 2), parts), memory=2.5),
        record("c", "draft:4", Reply("", 0, 9.0, error="it broke")),
        record("a", "generate", Reply("xy", 9, 9.0, 1.0)),
        record("b", "generate", Reply("", 0, 0.0, error="it broke")),
    ]
    plain, draft, engine = figures_of(records, ["plain", "draft:4", "generate"], blocks={"draft:4": 4})
    assert (draft.replies, draft.failed, draft.tokens, draft.steps) == (2, 1, 14, 5)
    assert draft.tau is not None
    assert draft.tau.value == 12 / 5
    assert draft.histogram == (1, 2, 1, 1)
    assert [share.value for share in draft.by_slot if share] == [4 / 5, 2 / 5, 1 / 5]
    assert (draft.rate.value, draft.whole_rate.value) == (12 / 3, 14 / 6)  # pyright: ignore
    assert (draft.first_median, draft.first_p90) == (1.5, pytest.approx(1.9))
    assert draft.speedup.value == (12 / 3) / (12 / 6)  # pyright: ignore
    assert draft.efficiency.value == pytest.approx(2 / 2.4)  # pyright: ignore
    assert draft.over_engine.value == (8 / 2) / (8 / 8)  # pyright: ignore  (of the question that both answered)
    assert draft.shares == {"draft": 0.25, "verify": 0.5, "select": 0.125, "overhead": 0.125}
    assert draft.memory == 2.5
    assert (draft.same, draft.compared) == (1, 2)
    assert (plain.tau.value, plain.speedup.value, plain.same) == (1.0, 1.0, 2)  # pyright: ignore
    assert (engine.tau, engine.histogram, engine.failed, engine.memory) == (None, (), 1, None)
    assert failures(records) == ["c, draft:4: it broke", "b, generate: it broke"]


def test_pictures_draw_intervals_where_there_are_some() -> None:
    pytest.importorskip("matplotlib")
    from dflash_fn.bench import plots

    few = figures_of([record("a", "x", Reply("", 5, 2.0, 1.0, (2, 1)))], ["x"])
    (axes,) = plots._speed(few, "a line").axes
    assert axes.get_xlabel() == "tokens/s after the first token"
    assert not axes.collections
    assert not axes.lines  # the caps of intervals
    (axes,) = plots._slots(few, "a line").axes
    assert not axes.collections
    many = [record(str(n), "x", Reply("", 5 + n, 2.0, 1.0, (2, 1))) for n in range(5)]
    (axes,) = plots._speed(figures_of(many, ["x"]), "a line").axes
    assert axes.get_xlabel() == "tokens/s after the first token; bars: intervals of 95 %"
    assert len(axes.collections) == 1
    (axes,) = plots._speed([*few, *figures_of(many, ["x"])], "a line").axes
    drawn = [
        segment for segment in axes.collections[0].get_segments() if len(segment) and segment.sum() == segment.sum()
    ]
    assert len(drawn) == 1


def test_a_slot_that_a_step_did_not_draft_is_no_rejection() -> None:
    """Counted by hand: blocks of 4, 2 and 8 drafted 3, 1 and 7 tokens, and a step of block 1 none."""
    paced = record("a", "draft:auto", Reply("", 12, 2.0, 1.0, (4, 2, 5, 1), blocks=(4, 2, 8, 1)))
    other = record("b", "draft:auto", Reply("", 3, 2.0, 1.0, (2,), blocks=(4,)))
    (found,) = figures_of([paced, other], ["draft:auto"], blocks={"draft:auto": 8})
    shares = [share and share.value for share in found.by_slot]
    assert shares == [4 / 4, 2 / 3, 2 / 3, 1 / 1, 0.0, 0.0, 0.0]
    small = replace(paced, reply=replace(paced.reply, emitted=(2, 2), blocks=(4, 2)))
    (found,) = figures_of([small], ["draft:auto"], blocks={"draft:auto": 8})
    assert [share and share.value for share in found.by_slot] == [1.0, 0.0, 0.0, None, None, None, None]
    assert grids([found])[-1].rows == (("draft:auto", "100", "0", "0"),)


def test_throughput_counts_time_in_which_something_was_under_way() -> None:
    spans = [(100.0, 4.0), (101.0, 1.0), (103.0, 2.0), (500.0, 5.0)]
    records = [record(str(i), "x", Reply("", 10, took, 0.5), begun=at) for i, (at, took) in enumerate(spans)]
    (found,) = figures_of(records, ["x"])
    assert found.throughput == 40 / 10
    assert found.whole_rate.value == 40 / 12  # pyright: ignore
    assert ("all at once, tokens/s", "4.0") in zip(grids([found])[1].head, grids([found])[1].rows[0], strict=True)


def test_tau_of_servers_that_tell_less() -> None:
    known = record("a", "x", Reply("", 17, 2.0, 1.0, steps=4))
    silent = record("a", "y", Reply("", 17, 2.0, 1.0))
    one, other = figures_of([known, silent], ["x", "y"], told={"x": 9.0, "y": 2.5})
    assert (one.tau.value, one.tau_told_by, one.steps) == (4.0, None, 4)  # pyright: ignore
    assert (other.tau.value, other.tau_told_by, other.steps) == (2.5, "server", 0)  # pyright: ignore


def test_a_speed_up_has_the_interval_of_the_quotient() -> None:
    """The same factor everywhere leaves no doubt, however much the questions differ."""
    first = [(10.0, 5.0), (30.0, 5.0), (20.0, 5.0), (10.0, 5.0), (30.0, 5.0)]
    made = quotient(first, [(tokens, 2 * seconds) for tokens, seconds in first])
    assert made is not None
    assert (made.value, made.half) == (2.0, pytest.approx(0.0, abs=1e-12))
    doubtful = quotient(first, [(10.0, 5.0)] * 5)
    assert doubtful is not None
    whole, left_out = 100 / 25 / 2, [(100 - tokens) / 20 / 2 for tokens, _ in first]
    mean = sum(left_out) / 5
    half = quantile(4) * (4 / 5 * sum((value - mean) ** 2 for value in left_out)) ** 0.5
    assert (doubtful.value, doubtful.half) == (whole, pytest.approx(half))
    assert quotient([], []) is None
    assert quotient([(1.0, 1.0)], [(0.0, 1.0)]) is None


def test_tables_say_what_is_known_and_nothing_else() -> None:
    records = [record("a", "server", Reply("", 5, 2.0, 1.0)), record("b", "server", Reply("", 0, 0.0, error="no"))]
    figures = figures_of(records, ["server"])
    text = as_markdown("a line", figures, records)
    assert "| way | tokens/s | failed |\n| --- | --- | --- |\n| `server` | 4.0 | 1 |" in text
    assert "accepted by slot" not in text
    assert text.endswith("1 of 2 replies failed:\n\n* b, server: no")
    told = json.loads(json.dumps(as_object({"backend": "x"}, figures, records), allow_nan=False))
    assert told["ways"][0]["rate"] == {"value": 4.0, "half": None}
    assert told["ways"][0]["tau"] is None
    assert (told["replies"], told["failed"]) == (2, ["b, server: no"])


def test_a_run_that_came_to_nothing_has_tables_too() -> None:
    figures = figures_of([], ["plain", "draft:4"])
    assert [(one.replies, one.tau, one.speedup) for one in figures] == [(0, None, None)] * 2
    assert grids(figures) == []
    assert as_markdown("a line", figures, []).startswith("a line\n\n")


def test_raw_turns_are_lines_of_one_text() -> None:
    class Letters:
        chat_template = "never asked"

        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert conversation_ids(Letters(), turns, raw=True) == [97, 10, 98, 10, 99]


# asking


def scripted(name: str, heard: list, fails: str = "", **options) -> Subject:
    def ask(messages, count):
        heard.append((name, [message["content"] for message in messages]))
        said = messages[-1]["content"]
        return Reply("", 0, 0.1, error="broken") if said == fails else Reply(f"{name} of {said}", 3, 0.2, 0.1, (2,))

    return Subject(name, ask, **options)


TWO = [Question("a", ("one", "two")), Question("b", ("three",))]


def test_every_way_answers_before_the_next_question_and_a_second_turn_follows_plains_answer() -> None:
    heard: list = []
    subjects = [scripted("draft", heard), scripted("plain", heard)]
    records = list(ask_all(subjects, TWO, max_new_tokens=4))
    assert [one.key for one in records] == [
        ("a", 0, "draft"), ("a", 0, "plain"), ("a", 1, "draft"), ("a", 1, "plain"), ("b", 0, "draft"),
        ("b", 0, "plain"),
    ]  # fmt: skip
    assert heard[2] == ("draft", ["one", "plain of one", "two"])
    assert heard[3] == ("plain", ["one", "plain of one", "two"])
    heard.clear()
    warm_up(subjects, TWO, 4)
    assert heard == [("draft", ["one"]), ("plain", ["one"])]


def test_a_reply_that_failed_costs_the_turns_that_would_follow_it_and_no_other() -> None:
    heard: list = []
    subjects = [scripted("draft", heard), scripted("plain", heard, fails="one")]
    found = {one.key: one.reply.error for one in ask_all(subjects, TWO, max_new_tokens=4)}
    lost = "turn 1 has no answer by plain to go on from"
    assert found == {
        ("a", 0, "draft"): None, ("a", 0, "plain"): "broken", ("a", 1, "draft"): lost, ("a", 1, "plain"): lost,
        ("b", 0, "draft"): None, ("b", 0, "plain"): None,
    }  # fmt: skip
    other = [scripted("draft", heard, fails="one"), scripted("plain", heard)]
    found = [one.reply.error for one in ask_all(other, TWO, max_new_tokens=4)]
    assert found == ["broken", None, None, None, None, None]


def test_known_replies_are_not_asked_again_but_those_that_failed() -> None:
    heard: list = []
    first = list(ask_all([scripted("plain", heard, fails="three")], TWO, max_new_tokens=4))
    heard.clear()
    again = list(ask_all([scripted("plain", heard)], TWO, max_new_tokens=4, known={one.key: one for one in first}))
    assert [name for name, _ in heard] == ["plain"]
    assert heard[0][1] == ["three"]
    assert again[:2] == first[:2]
    assert again[2].reply.error is None


def test_several_at_once_hold_whole_conversations() -> None:
    heard: list = []
    questions = [Question(str(i), (f"first {i}", f"second {i}")) for i in range(20)]
    found = list(ask_all([scripted("server", heard, concurrency=4)], questions, max_new_tokens=4))
    assert sorted(one.key for one in found) == sorted((str(i), turn, "server") for i in range(20) for turn in (0, 1))
    assert sorted(said for _, said in heard) == sorted(
        [[f"first {i}"] for i in range(20)] + [[f"first {i}", f"server of first {i}", f"second {i}"] for i in range(20)]
    )
    with pytest.raises(errors.InputError, match="several ways, of which one is asked several questions at once"):
        next(ask_all([scripted("a", []), scripted("b", [], concurrency=2)], TWO, max_new_tokens=4))


def test_a_bug_in_a_thread_is_raised_where_records_are_read() -> None:
    def ask(messages, count):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        list(ask_all([Subject("x", ask, concurrency=2)], TWO, max_new_tokens=4))


def test_of_calls_inside_each_other_the_outermost_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_fn.bench import clock

    ticks = iter([0.0, 5.0, 10.0, 11.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))
    made = Clock()
    verify = made.timed("verify", lambda x: x + 1)
    draft = made.timed("draft", lambda x: verify(x) * 2)
    assert (draft(1), verify(1)) == (4, 2)
    assert made.seconds == {"draft": 5.0, "verify": 1.0}
    assert made.parts(10.0) == {"draft": 5.0, "verify": 1.0, "select": 0.0, "overhead": 4.0}


# the folder of a run


def test_a_folder_goes_on_where_it_was_cut(tmp_path) -> None:
    folder = ReplyFolder(tmp_path / "run")
    folder.begin({"budget": 4}, resume=False)
    records = list(ask_all([scripted("plain", [])], TWO, max_new_tokens=4))
    for one in records[:2]:
        folder.add(one)
    folder.close()
    whole = folder.path.read_text()
    folder.path.write_text(whole + '{"question": "b", "tur')
    again = ReplyFolder(tmp_path / "run")
    again.begin({"budget": 4}, resume=True)
    known = again.read()
    assert list(known.values()) == records[:2]
    for one in records[1:2]:
        again.add(known[one.key])  # it is there already
    again.add(records[2])
    assert folder.path.read_text().startswith(whole)
    assert list(ReplyFolder(tmp_path / "run").read().values()) == records
    (tmp_path / "run" / "replies.3.jsonl").write_text("")
    again.finish(records[::-1])
    assert [path.name for path in (tmp_path / "run").glob("*.jsonl")] == [REPLIES]
    assert list(ReplyFolder(tmp_path / "run").read().values()) == records[::-1]


def test_replies_of_older_runs_have_no_blocks_and_still_read(tmp_path) -> None:
    folder = ReplyFolder(tmp_path)
    made = [
        record("a", "draft:auto", Reply("", 5, 2.0, 1.0, (4,), blocks=(4,))),
        record("a", "plain", Reply("", 1, 1.0)),
    ]
    folder.finish(made)
    assert list(ReplyFolder(tmp_path).read().values()) == made
    lines = [json.loads(line) for line in folder.path.read_text().splitlines()]
    for line in lines:
        del line["blocks"]
    folder.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    old = list(ReplyFolder(tmp_path).read().values())
    assert old == [replace(one, reply=replace(one.reply, blocks=())) for one in made]


def test_folders_that_cannot_be_gone_on_with(tmp_path) -> None:
    folder = ReplyFolder(tmp_path / "run")
    with pytest.raises(errors.InputError, match=r"--resume: there is no run to go on with in .*run"):
        folder.begin({"budget": 4}, resume=True)
    folder.begin({"budget": 3}, resume=False)
    folder.begin({"budget": 4}, resume=False)  # a run that ended before its first reply is none
    folder.add(record("a", "plain", Reply("", 1, 1.0)))
    folder.close()
    with pytest.raises(
        errors.InputError, match=r"--out .*run: holds a run already; go on with it by --resume, or name"
    ):
        folder.begin({"budget": 4}, resume=False)
    with pytest.raises(errors.InputError, match=r"made with other options \(budget was 4, got 5\); give the same"):
        folder.begin({"budget": 5}, resume=True)
    (tmp_path / "run" / REPLIES).write_text("[]\n")
    with pytest.raises(errors.InputError, match=r"replies.jsonl, line 1: is no reply"):
        folder.read()
    (tmp_path / "file").touch()
    with pytest.raises(errors.CacheFolderError, match=r"--out .*file: cannot be written"):
        ReplyFolder(tmp_path / "file").begin({}, resume=False)


# several processes


def test_shares_of_a_world() -> None:
    told = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}
    world = World.of(told)
    assert (world.share(list(range(8))), world.device("cuda"), world.device("cpu")) == ([1, 4, 7], "cuda:1", "cpu")
    assert World.of({}).alone
    assert World.of({}).device("cuda") == "cuda"
    assert sorted(item for rank in range(3) for item in World(rank, 3).share(list(range(8)))) == list(range(8))
    with pytest.raises(errors.InputError, match="RANK=3 and WORLD_SIZE=3: expected a rank below the size"):
        World.of({"RANK": "3", "WORLD_SIZE": "3"})
