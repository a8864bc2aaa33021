"""`dflash-fn bench` on tiny pairs: every way, folders, Ctrl-C, several processes, servers, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

import dflash_fn
from dflash_fn import errors
from dflash_fn.bench import Contender, Manner, Reply, Subject, contenders, open_subject, open_subjects
from dflash_fn.bench import subjects as subjects_module
from dflash_fn.cli.commands import app
from dflash_fn.metrics import summarize
from dflash_fn.records import Pair
from dflash_fn.text import chat_prompt
from tests.helpers.chatting import write_tokenizer
from tests.helpers.hearing import HEARING
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

DRAFT = DraftDesign(target=TargetDesign(eos=(0,)), block_size=4)
FEW = ("--max-new-tokens", "12", "--limit", "2")


@dataclass(frozen=True)
class Places:
    """Folders of a tiny target with a tokenizer, and of its draft."""

    target: str
    draft: str

    @property
    def flags(self) -> tuple[str, ...]:
        """That name them."""
        return "--target", self.target, "--draft", self.draft

    def load(self, port: str = "torch") -> Pair:
        """Load them."""
        try:
            return dflash_fn.load_pair(self.target, self.draft, port=port, dtype="float32")
        except errors.BackendMissing as missing:
            pytest.skip(str(missing))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    made = Checkpoints(tmp_path_factory.mktemp("tiny"))
    return Places(str(write_tokenizer(made.folder(DRAFT.target))), str(made.folder(DRAFT)))


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


def ask(subject: Subject, text: str, count: int = 24) -> Reply:
    return subject.ask([{"role": "user", "content": text}], count)


# ways


@pytest.mark.parametrize("port", ["torch", "mlx"])
def test_every_way_of_a_port_says_the_same_and_counts_as_the_loop_does(places: Places, port: str) -> None:
    pair = places.load(port)
    rows = [one for one in contenders(pair, blocks=[2, 4, "auto"]) if one.kind != "upstream"]
    engine = {"torch": "generate", "mlx": "mlx-lm"}[port]
    assert [one.name for one in rows] == [engine, "plain", "ngram:4", "draft:2", "draft:4", "draft:auto", "both:4"]
    replies = {one.name: ask(open_subject(pair, one, Manner(parts=True)), "what is 2 and 2?") for one in rows}
    assert {reply.error for reply in replies.values()} == {None}
    assert len({(reply.text, reply.tokens) for reply in replies.values()}) == 1
    ids = chat_prompt(pair.tokenizer, [{"role": "user", "content": "what is 2 and 2?"}])
    infos = [info for _, info in dflash_fn.rounds(dflash_fn.prefill(pair, ids), pair, max_new_tokens=24)]
    found, counted = replies["draft:4"], summarize(infos)
    assert (found.tokens, len(found.emitted)) == (counted.num_tokens, counted.steps)
    assert tuple(count - 1 for count in found.emitted) == counted.num_accepted
    paced = replies["draft:auto"]
    assert len(paced.blocks) == len(paced.emitted)
    assert all(count <= block <= 4 for count, block in zip(paced.emitted, paced.blocks, strict=True))
    assert found.blocks == ()
    assert replies["plain"].emitted == (1,) * (found.tokens - 1)
    assert replies[engine].emitted == ()
    for name in ("plain", "ngram:4", "draft:4"):
        reply = replies[name]
        assert reply.first is not None
        assert sum(reply.parts.values()) == pytest.approx(reply.seconds - reply.first, abs=2e-3)
        assert all(seconds >= 0 for seconds in reply.parts.values())
        assert (reply.parts["draft"] > 0) == (name != "plain")
    assert all(0 < (reply.first or 0) <= reply.seconds for reply in replies.values())


def test_mlx_computes_later_so_that_parts_are_timed_on_request(places: Places) -> None:
    reply = ask(open_subject(places.load("mlx"), Contender("draft", 4, True)), "hello")
    assert reply.error is None
    assert reply.parts == {}


@pytest.mark.oracle
def test_upstreams_loop_says_the_same(places: Places) -> None:
    pytest.importorskip("dflash")
    pair = places.load()
    plain, theirs = open_subjects(pair, contenders(pair, [("plain", None), ("upstream", None)]))
    one, other = ask(plain, "hello there"), ask(theirs, "hello there")
    assert (other.error, other.text, other.tokens) == (None, one.text, one.tokens)
    assert sum(other.emitted) == other.tokens - 1


def test_all_ways_end_at_stop_tokens_or_past_them(places: Places) -> None:
    pair = places.load()
    stop = int(dflash_fn.decode(dflash_fn.prefill(pair, "abc"), pair, max_new_tokens=5).tokens[0][-1])
    target = replace(pair.target, spec=replace(pair.target.spec, eos_token_ids=(stop,)))
    pair = replace(pair, target=target)
    rows = contenders(pair, [("generate", None), ("plain", None), ("draft", None)])
    ended = [ask(one, "abc").tokens for one in open_subjects(pair, rows, Manner(raw=True))]
    assert len(set(ended)) == 1
    assert ended[0] <= 5
    assert [ask(one, "abc").tokens for one in open_subjects(pair, rows, Manner(raw=True, ignore_eos=True))] == [24] * 3


def test_thinking_is_the_templates_switch(places: Places) -> None:
    pair = places.load()
    message = [{"role": "user", "content": "a"}]
    assert pair.tokenizer.decode(chat_prompt(pair.tokenizer, message)) == "<user>a<bot>"
    assert pair.tokenizer.decode(chat_prompt(pair.tokenizer, message, thinking=False)) == "<user>a<bot>="
    assert pair.tokenizer.decode(chat_prompt(pair.tokenizer, message, thinking=True)) == "<user>a<bot>"
    pair.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(errors.InputError) as caught:
        open_subject(pair, Contender("plain"), Manner(thinking=True))
    assert str(caught.value) == (
        "thinking: the chat template has no switch enable_thinking; leave --thinking and --no-thinking out"
    )


def test_thinking_of_a_tokenizer_without_a_template_is_refused_once() -> None:
    done = invoke("gsm8k", "--limit", "1", "--no-thinking", "--ways", "plain")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith(
        "error: thinking: is a switch of chat templates, and the tokenizer has none; leave --thinking and "
        "--no-thinking out\n"
    )


def test_blocks_are_those_of_the_word_too(places: Places) -> None:
    pair = places.load()
    assert [one.name for one in contenders(pair, blocks=[2, "auto"], word="ngram")] == [
        "generate", "plain", "ngram:2", "ngram:auto",
    ]  # fmt: skip
    assert [one.name for one in contenders(pair, [("ngram", None), ("draft", None)], [2])] == ["ngram:4", "draft:2"]
    without = dflash_fn.load_pair(places.target)
    assert [one.name for one in contenders(without, [("ngram", None)], [4], word="ngram")] == ["ngram:4"]
    with pytest.raises(errors.InputError, match="--blocks 4: is for draft without a block of its own, and no such"):
        contenders(without, blocks=[4])


def test_what_an_engine_raises_costs_its_question(places: Places) -> None:
    pair = places.load()
    reply = ask(open_subject(pair, Contender("draft", 4, True)), "a" * 5000)
    assert reply.error is not None
    assert reply.error.startswith("row 0: the prompt has 5002 tokens; the target's context holds 4096")


@pytest.mark.parametrize(
    ("port", "ways", "message"),
    [
        ("torch", [("mlx-lm", None)], "way mlx-lm runs beside port mlx, got port torch; leave it out"),
        ("mlx", [("upstream", None)], "way upstream runs beside port torch, got port mlx; leave it out"),
        ("torch", [("draft", 99)], "way draft:99: port torch verifies 32 tokens at most"),
        ("torch", [("draft", None), ("draft", 4)], "way draft:4 is named twice, by --ways and --blocks; leave it out"),
    ],
)
def test_ways_that_a_pair_cannot_have(places: Places, port, ways, message) -> None:
    with pytest.raises(errors.InputError) as caught:
        contenders(places.load(port), ways)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "field 'prompt': is empty; expected text"),
        (["what?", ""], "field 'prompt': is empty; expected text"),
        (
            "a \ud800",
            "field 'prompt': is no UTF-8 text (half a character, '\\ud800', at offset 2); expected a whole one",
        ),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_before_anything_is(tmp_path: Path, value, message) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("fine", value)))
    done = invoke("--data", str(file))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"error: {file}, row 1 (line 2): {message}\n"


def test_ways_of_a_pair_without_a_draft(places: Places) -> None:
    pair = dflash_fn.load_pair(places.target)
    assert [one.name for one in contenders(pair)] == ["generate", "plain", "ngram:8"]
    assert [one.name for one in contenders(places.load(), word="both")] == ["generate", "plain", "both:4"]
    with pytest.raises(errors.InputError, match=r"way both needs a draft, and .* has none; give one by --draft"):
        contenders(pair, [("both", None)])


# the command


def test_tables_files_and_json(places: Places, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ways = ("--ways", "plain,draft,ngram")
    done = invoke("mt-bench", *FEW, *places.flags, *ways, "--out", str(out), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["questions"] == ["mt-bench/0", "mt-bench/1"]
    assert [way["name"] for way in told["ways"]] == ["plain", "draft:4", "ngram:4"]
    lines = [json.loads(line) for line in (out / "replies.jsonl").read_text().splitlines()]
    assert [(line["question"], line["turn"], line["way"]) for line in lines] == [
        (f"mt-bench/{row}", turn, way) for row in (0, 1) for turn in (0, 1) for way in ("plain", "draft:4", "ngram:4")
    ]
    for way in told["ways"]:
        mine = [line for line in lines if line["way"] == way["name"]]
        assert (way["replies"], way["failed"], way["same"], way["compared"]) == (4, 0, 4, 4)
        assert way["tokens"] == sum(line["tokens"] for line in mine)
        assert way["steps"] == sum(len(line["emitted"]) for line in mine)
        assert way["tau"]["value"] == sum(sum(line["emitted"]) for line in mine) / way["steps"]
        assert sum(way["histogram"]) == way["steps"]
        assert way["memory"] > 0
    assert (out / "table.md").read_text().count("\n| `draft:4` |") == 3
    assert (out / "speed.png").stat().st_size > 1000
    assert (out / "slots.png").stat().st_size > 1000
    shown = invoke("mt-bench", *FEW, *places.flags, *ways, "--out", str(out), "--resume")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[0].endswith("12 tokens at most, greedy, chat template, bundled rows")
    assert "accepted by slot after the anchor, %" in shown.stdout
    other = invoke("mt-bench", *FEW, *places.flags, "--ways", "plain", "--out", str(out), "--resume", "--markdown")
    assert other.exit_code == 2
    assert "was made with other options (ways was 'plain,draft,ngram', got 'plain'); give the same" in other.stderr


def test_a_question_that_fails_is_a_row_and_an_exit_code(places: Places, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"prompt": "a" * 5000}) + "\n" + json.dumps({"prompt": "hello"}) + "\n")
    done = invoke("--data", str(file), *FEW, *places.flags, "--ways", "plain,draft", "--markdown")
    assert done.exit_code == 1, done.output
    assert "2 of 4 replies failed:\n\n* mine/0, plain: row 0: the prompt has 5002 tokens" in done.stdout
    assert "\n| `plain` |" in done.stdout


def test_raw_text_goes_on_from_its_head(places: Places, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("abcdefgh" * 100)
    flags = ("--data", str(tmp_path / "some.py"), "--raw", "--head", "10", *FEW, *places.flags, "--ways", "plain")
    done = invoke(*flags, "--json", "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    pair = places.load()
    state = dflash_fn.prefill(pair, "abcdefghab", width=1)
    ids = dflash_fn.decode(state, pair, max_new_tokens=12, block_size=1).tokens[0][10:]
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "replies.jsonl").read_text().splitlines()]
    assert line["text"] == pair.tokenizer.decode(ids, skip_special_tokens=True)


def test_ctrl_c_keeps_what_there_is_and_resume_makes_it_whole(places: Places, tmp_path: Path, monkeypatch) -> None:
    flags = ("gsm8k", "mt-bench", *FEW, *places.flags, "--ways", "plain,draft")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert invoke(*flags, "--out", str(whole)).exit_code == 0
    right = subjects_module._asked
    left = [7]  # the warm-up asks each way once

    def counted(*args):
        answer = right(*args)

        def ask(messages, count):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return answer(messages, count)

        return ask

    with monkeypatch.context() as patch:
        patch.setattr(subjects_module, "_asked", counted)
        done = invoke(*flags, "--out", str(cut))
    assert done.exit_code == 130
    assert "5 of 12 replies" in done.stdout
    assert f"interrupted; 5 replies are in {cut}, --resume goes on from them" in done.stderr
    assert (cut / "table.md").exists()
    assert len((cut / "replies.jsonl").read_text().splitlines()) == 5
    refused = invoke(*flags, "--out", str(cut))
    assert refused.exit_code == 2
    assert "holds a run already; go on with it by --resume" in refused.stderr
    assert invoke(*flags, "--out", str(cut), "--resume").exit_code == 0
    assert bare(cut) == bare(whole)


def bare(folder: Path) -> list[tuple]:
    """Return the replies of a run without times and memory."""
    lines = [json.loads(line) for line in (folder / "replies.jsonl").read_text().splitlines()]
    names = ("question", "turn", "way", "text", "tokens", "error", "emitted")
    return [tuple(line[name] for name in names) for line in lines]


def program(*arguments: str, **options) -> subprocess.Popen:
    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(root), str(root / "ports"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **options}
    return subprocess.Popen([*HEARING, sys.executable, *arguments], stdout=-1, stderr=-1, text=True, env=environment)


@pytest.mark.slow
def test_ctrl_c_of_a_real_process(places: Places, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ("humaneval", *places.flags, "--ways", "plain,draft", "--ignore-eos", "--out", str(out))
    process = program("-m", "dflash_fn", "bench", *flags)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (out / "replies.jsonl").exists() and (out / "replies.jsonl").read_text().count("\n") > 2:
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.05)
    said, complaint = process.communicate(timeout=120)
    assert process.returncode == 130, complaint
    count = len((out / "replies.jsonl").read_text().splitlines())
    assert 2 < count < 128
    assert f"{count} of 128 replies" in said
    assert complaint.endswith("--resume goes on from them\n")


@pytest.mark.slow
def test_ctrl_c_of_two_processes_keeps_replies_without_a_traceback_of_ours(places: Places, tmp_path: Path) -> None:
    """The one traceback is that of torchrun, which raises SignalException on every Ctrl-C."""
    out = tmp_path / "run"
    flags = ("humaneval", *places.flags, "--ways", "plain,draft", "--limit", "40", "--out", str(out))
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dflash_fn", "bench")
    process = program(*run, *flags, "--ignore-eos", GLOO_SOCKET_IFNAME="lo")
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if sum(path.read_text().count("\n") for path in out.glob("replies.*.jsonl")) > 4:
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.05)
    _, complaint = process.communicate(timeout=120)
    assert complaint.count("Traceback (most recent call last)") <= 1
    assert "dflash_fn/" not in complaint
    kept = sum(path.read_text().count("\n") for path in out.glob("replies.*.jsonl"))
    told = [int(line.split()[1]) for line in complaint.splitlines() if line.startswith("interrupted; ")]
    assert sum(told) == kept > 4
    done = invoke(*flags, "--ignore-eos", "--resume", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["replies"] == 80


def test_two_processes_come_to_what_one_does(places: Places, tmp_path: Path) -> None:
    """Started by torchrun, talking by gloo; the questions are an odd number, and one conversation has two turns."""
    flags = ("gsm8k", "mt-bench", *FEW, "--data", "humaneval:7", *places.flags, "--ways", "plain,draft", "--json")
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dflash_fn", "bench")
    one, two = tmp_path / "one", tmp_path / "two"
    alone = invoke(*flags, "--out", str(one))
    process = program(*run, *flags, "--out", str(two), GLOO_SOCKET_IFNAME="lo")
    said, complaint = process.communicate(timeout=200)
    assert process.returncode == 0, complaint
    first, second = json.loads(alone.stdout), json.loads(said)
    for mine, theirs in zip(first["ways"], second["ways"], strict=True):
        for name in ("name", "replies", "failed", "tokens", "steps", "tau", "histogram", "by_slot", "same", "compared"):
            assert mine[name] == theirs[name]
    assert bare(one) == bare(two)
    assert sorted(path.name for path in two.glob("*.jsonl")) == ["replies.jsonl"]


def test_what_is_not_installed_is_left_out_and_told(places: Places, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "dflash", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = invoke("gsm8k", *FEW, *places.flags, "--out", str(tmp_path / "run"), "--json")
    assert done.exit_code == 0, done.output
    names = [way["name"] for way in json.loads(done.stdout)["ways"]]
    assert names == ["generate", "plain", "ngram:4", "draft:4", "both:4"]
    missing = "way upstream needs the package dflash, which is not installed; run: pip install --no-deps dflash==0.1.0"
    assert f"left out: {missing}\n" in done.stderr
    assert 'no pictures: pictures need matplotlib, which is not installed; run: pip install "dflash-fn[p' in done.stderr
    assert (tmp_path / "run" / "table.md").exists()
    refused = invoke("gsm8k", *FEW, *places.flags, "--ways", "upstream")
    assert (refused.exit_code, refused.stderr) == (2, f"error: {missing}\n")


def test_ctrl_c_before_the_first_reply(places: Places, monkeypatch) -> None:
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_fn.bench.asking.warm_up", interrupted)
    done = invoke("gsm8k", *FEW, *places.flags, "--ways", "plain", "--json")
    assert done.exit_code == 130
    assert json.loads(done.stdout)["replies"] == 0
    assert done.stderr == "interrupted\n"


# servers


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict:
    """A module that opens no server, but says how it was asked to."""
    asked: dict = {}
    module = ModuleType("dflash_fn.bench.server")

    def open_server(url: str, **options) -> Subject:
        asked.update(options, url=url)

        def ask(messages, count):
            if messages[-1]["content"].startswith("fails"):
                return Reply("", 0, 0.1, error="http://x: the server answered 500")
            return Reply("yes", 5, 0.5, 0.1, counted_by="server")

        return Subject("a-model", ask, options["concurrency"], watch=lambda: lambda: 2.5)

    module.open_server = open_server  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "dflash_fn.bench.server", module)
    return asked


def test_a_server_is_asked_several_questions_at_once(server: dict, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "fails", "b")))
    flags = ("--backend", "openai", "--url", "http://x", "--concurrency", "3", "--no-thinking", "--timeout", "9")
    done = invoke("--data", str(file), *flags, "--json")
    assert done.exit_code == 1
    assert (server["url"], server["concurrency"], server["timeout"]) == ("http://x", 3, 9.0)
    assert server["options"] == {"chat_template_kwargs": {"enable_thinking": False}}
    told = json.loads(done.stdout)
    (way,) = told["ways"]
    assert (way["name"], way["replies"], way["failed"], way["tokens"]) == ("a-model", 2, 1, 10)
    assert (way["tau"], way["tau_told_by"]) == ({"value": 2.5, "half": None}, "server")
    assert told["failed"] == ["mine/1, a-model: http://x: the server answered 500"]
    shown = invoke("--data", str(file), *flags)
    assert "2.50 (server)" in shown.stdout


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to ask; name a data set"),
        (["gsm8k", "--limit", "0"], "--limit: got 0, expected 1 or more"),
        (["gsm8k", "--max-new-tokens", "0"], "--max-new-tokens: got 0, expected 1 or more"),
        (["gsm8k", "--resume"], "--resume goes on with the run in a folder; name it by --out DIR"),
        (["gsm8k", "--json", "--markdown"], "--json and --markdown exclude each other"),
        (["gsm8k", "--raw", "--no-thinking"], "--raw and --thinking exclude each other"),
        (["gsm8k", "--ways", "fast"], "--ways: got 'fast', expected some of: generate, mlx-lm"),
        (["gsm8k", "--blocks", "all"], "--blocks: got a block of 'all', expected a number of at least 2, or auto"),
        (
            ["gsm8k", "--blocks", "auto", "--ways", "plain"],
            "and no such way is measured; leave --blocks out, or write a block with its way, as in --ways plain,ngram:",
        ),
        (["gsm8k", "--blocks", "4", "--ways", "plain,draft:8"], "--blocks 4: is for draft without a block of its own"),
        (
            ["gsm8k", "--draft", "ngram", "--blocks", "4", "--ways", "plain"],
            "--blocks 4: is for draft and ngram without a block of its own",
        ),
        (
            ["gsm8k", "--head", "5"],
            "--head 5: cuts a text to go on from, and no question is one; give --raw --data FILE, or leave it out",
        ),
        (["gsm8k", "--url", "http://x"], "--url is for --backend openai"),
        (["gsm8k", "--concurrency", "2"], "--concurrency is for --backend openai"),
        (["gsm8k", "--backend", "openai"], "--backend openai asks a server; give its address by --url"),
        (
            ["gsm8k", "--backend", "openai", "--url", "http://x", "--ways", "plain"],
            "--ways is for a pair in this process; --backend openai asks a server",
        ),
        (["gsm8k", "--backend", "tpu"], "port 'tpu'"),
        (["gsm8k", "--draft", "both", "--pair", "tiny-code", "--ways", "mlx-lm"], "way mlx-lm runs beside port mlx"),
    ],
)
def test_bad_input_is_one_line(arguments, message) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
