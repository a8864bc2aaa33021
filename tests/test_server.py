"""Asking servers: what is counted, and failures of every kind that cost only their own requests."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import ExitStack

import pytest

from dflash_fn import errors
from dflash_fn.bench.asking import ask_all
from dflash_fn.bench.questions import Question
from dflash_fn.bench.replies import Reply, Subject
from dflash_fn.bench.server import open_server
from dflash_fn.bench.server_acceptance import steps_of, watching
from tests.helpers.servers import Misbehaving, misbehaving

pytest.importorskip("openai")


@pytest.fixture
def server():
    with misbehaving() as state:
        yield state


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(server: Misbehaving, text: str, **options) -> Reply:
    return open_server(server.url, **options).ask(question(text), 16)


def test_an_answer_and_what_was_asked(server):
    subject = open_server(server.url, options={"chat_template_kwargs": {"enable_thinking": False}})
    assert (subject.name, subject.concurrency, subject.lossless) == ("tiny", 1, True)
    reply = subject.ask(question("good"), 16)
    assert (reply.text, reply.tokens, reply.counted_by, reply.error) == ("one two", 5, "server", None)
    assert reply.first is not None
    assert 0 < reply.first <= reply.seconds
    assert (reply.emitted, reply.steps) == ((), None)
    assert server.asked == [
        {
            "model": "tiny",
            "max_tokens": 16,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": question("good"),
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]


def test_raw_prompts_go_to_completions(server):
    reply = ask(server, "good", raw=True)
    assert (reply.text, reply.tokens) == ("one two", 5)
    assert server.asked[0]["prompt"] == "good"


def test_thoughts_are_tokens_and_no_text(server):
    reply = ask(server, "thinking")
    assert (reply.text, reply.tokens) == ("so", 3)


class Letters:
    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        return list(text)


def test_a_server_that_refuses_stream_options_is_asked_without(server):
    subject = open_server(server.url, tokenizer=Letters())
    first, second = (subject.ask(question("picky"), 16) for _ in range(2))
    assert (first.text, first.tokens, first.counted_by, first.error) == ("one two", 7, "tokenizer", None)
    assert second.tokens == 7
    assert ["stream_options" in body for body in server.asked] == [True, False, False]
    reply = ask(server, "picky")
    where = f"{server.url}/v1/chat/completions"
    assert reply.error == (
        f"{where}: the server does not count tokens (usage); name a tokenizer to count them with by --target (in "
        "Python tokenizer=)"
    )


FAILURES = {
    "500": (r"the server answered 500 \(out of memory\); look at its log$", ""),
    "malformed": (r"the answer is none of the OpenAI API \(no JSON: .*\); is this the right address\?$", "one"),
    "number": (r"the answer is none of the OpenAI API \(a piece of the stream is a number, expected an object\); ", ""),
    "lists": (r"the answer is none of the OpenAI API \(a piece of the stream is a list, expected an object\); is ", ""),
    "text": (r"the answer is none of the OpenAI API \(a choice is a text, expected an object\); is this the right", ""),
    "page": (r"the answer is empty; is this the right address\?$", ""),
    "stall": (r"the server stalled, with no data for 0.3 s; look at its log, or allow it more time", "one"),
    "alive": (r"the server stalled, with no data for 0.3 s; look at its log, or allow it more time", "one"),
    "counts -3": (r"the server counts -3 tokens \(usage.completion_tokens\), expected an integer of at least 0", "one"),
    'counts "5"': (r"the server counts '5' tokens \(usage.completion_tokens\), expected an integer of at lea", "one"),
    "counts 5.5": (r"the server counts 5.5 tokens \(usage.completion_tokens\), expected an integer of at lea", "one"),
    "die": (r"the connection broke \(.*\); the server may have died, look at its log$", "one"),
    "cut": (r"the stream ended without a finish_reason, after 7 characters; the server died or cut it$", "one two"),
    "no-choices": (r"the answer holds no choices; look at the server's log$", ""),
    "reported": (r"the server reports an error \(the engine is dead\); look at its log$", "one"),
}


def test_each_failure_costs_its_own_request_alone(server):
    subject = open_server(server.url, concurrency=4, timeout=0.3)
    asked = [text for failure in FAILURES for text in (failure, "good")]
    records = list(ask_all([subject], [Question(text, (text,)) for text in asked], max_new_tokens=16))
    assert sorted(record.question for record in records) == sorted(asked)
    for text, reply in ((record.question, record.reply) for record in records):
        if text == "good":
            assert (reply.text, reply.tokens, reply.error) == ("one two", 5, None)
            continue
        pattern, came = FAILURES[text]
        assert reply.error is not None, text
        where, _, what = reply.error.partition(": ")
        assert where == f"{server.url}/v1/chat/completions"
        assert re.match(pattern, what), reply.error
        assert reply.text == came
        assert reply.tokens == 0
    assert len(server.asked) == len(asked)  # nothing was tried twice


def test_a_server_that_dies_mid_run_leaves_what_it_had_answered():
    alive = ExitStack()
    state = alive.enter_context(misbehaving())
    subject = open_server(state.url)

    replies: list[Reply] = []
    for record in ask_all([subject], [Question(str(index), ("good",)) for index in range(4)], max_new_tokens=16):
        replies.append(record.reply)
        if len(replies) == 2:
            alive.close()
    assert [reply.tokens for reply in replies] == [5, 5, 0, 0]
    assert [reply.error is None for reply in replies] == [True, True, False, False]
    assert all("no connection" in (reply.error or "") for reply in replies[2:])


def test_a_server_that_is_gone():
    with misbehaving() as state:
        subject = open_server(state.url)
    reply = subject.ask(question("good"), 16)
    assert reply.error is not None
    assert "no connection" in reply.error
    assert reply.error.endswith("is the server running, and is this its address?")
    with pytest.raises(errors.ServerError, match=r"/v1/models: no connection .* is the server running"):
        open_server(state.url)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", ""])
def test_no_address(url):
    with pytest.raises(errors.InputError, match=r"expected an address such as http://127\.0\.0\.1:8000"):
        open_server(url)


def test_models(server):
    server.models = ["a", "b"]
    with pytest.raises(errors.InputError, match=r"lists 2 models \(a, b\); name one by --model"):
        open_server(server.url)
    assert open_server(server.url + "/v1/", model="b").name == "b"
    with pytest.raises(errors.InputError, match="concurrency: got 0"):
        open_server(server.url, concurrency=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"data": []}', "lists 0 models (none)"),
        ("{}", "lists 0 models (none)"),
        ('{"data": [{"object": "model"}]}', "lists 0 models (none)"),
        ("[]", "none of the OpenAI API"),
        ('{"data": 5}', "data of the list of models is a number, expected a list"),
        ('{"data": [5]}', "an entry of the list of models is a number, expected an object"),
        ("<html>", "none of the OpenAI API"),
    ],
)
def test_a_list_of_models_that_tells_none(server, text, message):
    server.texts["/v1/models"] = text
    with pytest.raises(errors.DflashError) as caught:
        open_server(server.url)
    assert message in str(caught.value)
    assert str(caught.value).endswith("name one by --model (in Python, and in a way of compare, model=NAME)")
    assert not re.search(r"[A-Z]\w+Error|attribute", str(caught.value))
    assert open_server(server.url, model="mine").ask(question("good"), 16).tokens == 5


def sglang(**told) -> dict:
    return {"sglext": {"spec_tokens_details": told}}


DETAILED = {"speculative_decoding": {"per_step_accepted": [2, 0, 1], "num_spec_steps": 3, "acceptance_histogram": []}}


@pytest.mark.parametrize(
    ("told", "emitted", "steps"),
    [
        ({"metrics": DETAILED}, (3, 1, 2), 3),
        ({"metrics": {"speculative_decoding": {"acceptance_histogram": [2, 1], "num_spec_steps": 3}}}, (1, 1, 2), 3),
        ({"metrics": {"speculative_decoding": None}}, (), None),
        (sglang(spec_correct_drafts_histogram=[1, 0, 2], spec_verify_ct=3), (1, 3, 3), 3),
        (sglang(spec_verify_ct=7), (), 7),
        ({"timings": {"predicted_n": 16, "draft_n": 12, "draft_n_accepted": 9}}, (), 6),
        ({"timings": {"predicted_n": 16}}, (), None),
        ({}, (), None),
    ],
)  # fmt: skip
def test_steps_that_servers_tell(server, told, emitted, steps):
    assert steps_of(told) == (emitted, steps)
    server.extra = told
    reply = ask(server, "good")
    assert (reply.emitted, reply.steps) == (emitted, steps)


def test_sglang_is_asked_for_its_steps(server):
    server.owner = "sglang"
    ask(server, "good")
    assert server.asked[0]["return_spec_tokens_details"] is True


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 10.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} 900.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} 5.0
"""


def test_counters_of_vllm(server):
    server.owner = "vllm"
    server.texts["/metrics"] = METRICS.format(drafts="20.0", accepted="30.0")
    subject = open_server(server.url)
    assert subject.watch is not None
    seen = subject.watch()
    assert seen() is None  # nothing was decoded
    server.texts["/metrics"] = METRICS.format(drafts="24.0", accepted="1.036e+03")
    assert seen() == pytest.approx(1 + 1006 / 4)
    server.texts["/metrics"] = "python_info 1\n"
    assert subject.watch()() is None


def test_mean_of_sglang(server):
    server.owner = "sglang"
    subject = open_server(server.url)
    assert subject.watch is not None
    assert subject.watch()() is None
    server.texts["/get_server_info"] = '{"internal_states": [{"avg_spec_accept_length": 3.5}, {}]}'
    assert subject.watch()() == 3.5
    server.texts["/server_info"] = "[]"
    assert subject.watch()() is None
    assert watching(server.url, None)() is None


def test_as_many_at_once_as_told(server):
    subject = open_server(server.url, concurrency=3)
    server.meeting = threading.Barrier(3)
    questions = [Question(str(index), ("together",)) for index in range(9)]
    records = list(ask_all([subject], questions, max_new_tokens=16))
    assert [record.reply.tokens for record in records] == [5] * 9
    assert sorted(record.question for record in records) == [str(index) for index in range(9)]
    assert server.most == 3


@pytest.fixture
def ctrl_c():
    """Python's own handling of SIGINT, which a shell's background job is started without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("at_once", [1, 3])
def test_ctrl_c_ends_at_once_and_keeps_what_was_told(at_once):
    kept: list[str] = []

    def work(index: int) -> Reply:
        if index >= 3:
            threading.Event().wait(30 if at_once > 1 else 0.2)
        return Reply(str(index), 1, 0.0)

    subject = Subject("slow", lambda messages, budget: work(int(messages[0]["content"])), at_once)
    questions = [Question(str(index), (str(index),)) for index in range(8)]
    begun = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (which record it falls on is the point)
        for record in ask_all([subject], questions, max_new_tokens=1):
            kept.append(record.question)
            if len(kept) == 3:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert time.perf_counter() - begun < 5
    assert sorted(kept)[:3] == ["0", "1", "2"]
