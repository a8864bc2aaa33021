"""What servers tell of tokens and log probabilities, in every form, and what is made of a divergence with that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from dflash_fn import errors, load_zoo, zoo
from dflash_fn.bench.compare import compare
from dflash_fn.bench.server_logprobs import Names, read_choice
from dflash_fn.bench.ways import Answer, Recipe, Way, open_way, parse
from dflash_fn.cli.commands import app
from dflash_fn.glimpses import Glimpse, explain_rows
from dflash_fn.tolerances import PEAK, TIE, typical
from tests.helpers.servers import Refused, misbehaving

pytest.importorskip("torch")


def test_recipes():
    way = parse("server,url=http://a:1/v1?x=y,model=m,dtype=bfloat16,api=chat,peak=20")
    assert way == Recipe("server", dtype="bfloat16", url="http://a:1/v1?x=y", model="m", api="chat", peak=20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server", "way 'server': which server? give url=http://..."),
        ("server,url=http://a,api=raw", "got api=raw, expected one of: completions, chat"),
        (
            "server,url=http://a,block=4",
            "got 'block=4', expected one of: api=..., dtype=..., model=..., peak=..., url=",
        ),
        ("server,url=http://a,peak=x", "got peak=x, expected a number of at least 1"),
        ("server,url=http://a,dtype=int8", "got dtype 'int8', expected one of: float32, bfloat16, float16"),
    ],
)
def test_recipes_that_are_none(text, message):
    with pytest.raises(errors.InputError) as caught:
        parse(text)
    assert message in str(caught.value)


class Words:
    """A tokenizer of five words, two of which read the same."""

    words = ("a", "b", "c", "?", "?")

    def __len__(self) -> int:
        return len(self.words)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.words[index] for index in ids)


NAMES = Names(Words(), 5)


def entry(token: str, logprob: float, given: int | None = None) -> dict:
    return {"token": token, "logprob": logprob} | ({} if given is None else {"id": given})


def test_lists_beside_each_other():
    told = {"tokens": ["a", "c"], "token_logprobs": [-0.5, -0.1], "top_logprobs": [{"a": -0.5, "b": -0.7}, {"?": -3.0}]}
    assert read_choice({"logprobs": told}, "ac", NAMES) == [Glimpse(0, {0: -0.5, 1: -0.7}), Glimpse(2, {2: -0.1})]


def test_names_that_are_ids():
    told = {
        "tokens": ["token_id:3", "token_id:1"],
        "token_logprobs": [-0.5, -0.4],
        "top_logprobs": [{"token_id:3": -0.5, "token_id:4": -0.6}, None],
    }
    assert read_choice({"logprobs": told}, "?b", NAMES) == [Glimpse(3, {3: -0.5, 4: -0.6}), Glimpse(1, {1: -0.4})]


def test_ids_beside_texts():
    told = {"tokens": ["?", "a"], "token_logprobs": [-0.5, -0.1], "top_logprobs": [{"a": -0.6}, {"b": -3.0}]}
    expected = [Glimpse(4, {0: -0.6}), Glimpse(0, {0: -0.1, 1: -3.0})]
    assert read_choice({"logprobs": told, "token_ids": [4, 0]}, "?a", NAMES) == expected
    assert read_choice({"token_ids": [4, 0]}, "?a", NAMES) == [Glimpse(4), Glimpse(0)]


def test_entries():
    best = [entry("?", -0.2, 4), entry("a", -0.9, 0)]
    told = {"content": [entry("?", -0.2, 4) | {"top_logprobs": best}, entry("b", -0.1)]}
    assert read_choice({"logprobs": told}, "?b", NAMES) == [Glimpse(4, {4: -0.2, 0: -0.9}), Glimpse(1, {1: -0.1})]


def test_entries_that_are_called_after_any_of_their_best():
    best = [entry("a", -0.9, 0), entry("c", -0.2, 2), entry("?", -0.2, 3)]
    choice = {"logprobs": {"content": [best[0] | {"top_logprobs": best}]}}
    assert read_choice(choice, " c", NAMES) == [Glimpse(2, {0: -0.9, 2: -0.2, 3: -0.2})]


def test_a_choice_that_is_not_the_best_is_kept():
    choice = {"logprobs": {"content": [entry("a", -0.9, 0) | {"top_logprobs": [entry("c", -0.2, 2)]}]}}
    assert read_choice(choice, "a", NAMES) == [Glimpse(0, {0: -0.9, 2: -0.2})]


@pytest.mark.parametrize(
    "told",
    [
        None,
        {},
        {"content": []},
        {"tokens": ["?"], "token_logprobs": [-0.1], "top_logprobs": None},
        {"tokens": ["zebra"], "token_logprobs": [-0.1]},
        {"content": [entry("a", -0.9, 0) | {"top_logprobs": [entry("b", -0.2, 1)]}]},
    ],
)
def test_tokens_that_are_not_told(told):
    assert read_choice({"logprobs": told}, "?", NAMES) is None


def explained(ours, theirs, chosen=(1, 2), limit=0.01, peak=10.0):
    return explain_rows("x", 7, ours, theirs, chosen, relative_bound=limit, peak=peak)


def test_gaps_of_log_probabilities_are_those_of_logits():
    row = np.array([0.0, 5.0, 4.95, -3.0])
    other = row - np.log(np.exp(row).sum())
    part = Glimpse(2, {1: other[1] - 0.05, 2: other[2] + 0.05, 0: other[0]})
    found = explained(row, part, limit=0.011)
    assert (found.ours.best, found.ours.second, found.ours.scale) == (1, 2, 5.0)
    assert (found.theirs.best, found.theirs.second, found.theirs.scale) == (2, 1, None)
    assert (found.ours.gap, found.theirs.gap) == (pytest.approx(0.05), pytest.approx(0.05))
    assert found.apart == pytest.approx(0.05)
    assert found.bound == pytest.approx(0.055)  # of the peak of the full row, 5
    assert found.near_tie
    assert not explained(row, part, limit=0.009).near_tie


@pytest.mark.parametrize(("gap", "near"), [(0.19, True), (0.21, False)])
def test_two_servers_are_measured_by_the_peak(gap, near):
    ours, theirs = Glimpse(1, {1: -0.5, 2: -0.5 - gap}), Glimpse(2, {2: -0.6, 1: -0.6})
    found = explained(ours, theirs)
    assert found.apart == pytest.approx(gap / 2)
    assert (found.bound, found.near_tie) == (pytest.approx(0.1), near)
    assert found.verdict == ("near tie" if near else "not explained by rounding")
    wide = explained(replace(ours, values={**ours.values, 3: -50.5}), theirs)
    assert wide.bound == pytest.approx(0.25)  # logits that are 50 apart are 25 large at least


def test_a_choice_outside_what_the_other_knows_is_not_explained():
    ours = Glimpse(1, {1: -0.50, 0: -0.51})
    theirs = Glimpse(2, {2: -0.50, 0: -0.51})
    assert explained(ours, theirs).near_tie  # each may have had the other's choice right below
    assert not explained(ours, Glimpse(2, {2: -0.5, 0: -5.0})).near_tie


def test_a_choice_that_was_not_the_best():
    found = explained(Glimpse(1, {1: -3.0, 0: -0.1, 2: -3.0}), Glimpse(2, {2: -0.1, 1: -3.0, 0: -3.0}))
    assert (found.ours.best, found.ours.second, found.ours.gap) == (1, 0, pytest.approx(2.9))
    assert not found.near_tie


@pytest.mark.parametrize("row", [Glimpse(2), Glimpse(2, {2: -0.1}), Glimpse(2, {1: -0.1, 0: -3.0})])
def test_nothing_is_said_of_what_is_not_known(row):
    found = explained(np.array([0.0, 2.0, 1.0]), row)
    assert (found.near_tie, found.apart, found.bound) == (False, None, None)
    assert found.verdict == "unknown: the server gave no log probabilities"
    assert str(found) == "x, position 7: ours 1 before 2 by 1, theirs 2: unknown: the server gave no log probabilities"


@pytest.fixture(scope="module")
def pair():
    return load_zoo("tiny-code")


def scripted(pair, answer: Answer, name="server", peak=PEAK) -> Way:
    return Way(name, "bfloat16", pair.target.spec, pair.tokenizer, lambda ids, count: answer, peak)


def glimpses(tokens: Sequence[int]) -> list[Glimpse]:
    return [Glimpse(token, {token: -0.1, token + 1: -0.1001}) for token in tokens]


def test_ways_of_which_little_is_known(pair):
    first = scripted(pair, Answer([5, 6, 7], glimpses([5, 6, 7])))
    second = scripted(pair, Answer([5, 6, 8], glimpses([5, 6, 8])))
    (found,) = compare(first, second, [("x", [1, 2])], 3).prompts
    assert (found.tokens, found.slots, found.bits_identical, found.same_steps) == (2, (None, None), False, None)
    assert found.divergence is not None
    assert found.divergence.position == 4
    assert found.divergence.bound == pytest.approx(2.0 * typical("bfloat16", pair.target.spec) * PEAK)
    assert found.explained
    far = Answer([5, 6, 9], [*glimpses([5, 6]), Glimpse(9, {9: 0.0, 7: -TIE * 1000.0})])
    (found,) = compare(first, scripted(pair, far), [("x", [1, 2])], 3).prompts
    assert not found.explained


def test_texts_are_compared_as_texts(pair):
    tokens = pair.tokenizer.encode("import os\nimport sys\n")
    exact = scripted(pair, Answer(tokens, [np.zeros(4, np.float32)] * len(tokens)))
    same = scripted(pair, Answer([], [], text="import os\nimport sys\n"))
    (found,) = compare(exact, same, [("x", [1])], 9).prompts
    assert (found.tokens, found.divergence) == (len(tokens), None)
    other = scripted(pair, Answer([], [], text="import os\nimport re\n"))
    (found,) = compare(exact, other, [("x", [1])], 9).prompts
    assert found.divergence is not None
    assert found.divergence.verdict == "unknown: the server gave no log probabilities"
    assert not found.explained


@pytest.mark.parametrize(("next_token", "explained"), [("stop", True), ("other", False)])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_server_that_stops(pair, next_token, explained, swapped):
    (stop,) = pair.target.spec.eos_token_ids
    token = stop if next_token == "stop" else 9
    went_on = scripted(pair, Answer([5, 6, token, 7], glimpses([5, 6, token, 7])))
    stopped = scripted(pair, Answer([5, 6], glimpses([5, 6]), ended=True))
    ways = (stopped, went_on) if swapped else (went_on, stopped)
    (found,) = compare(*ways, [("x", [1])], 4).prompts
    assert (found.tokens, found.explained) == (2, explained)
    if not explained:
        assert found.divergence is not None
        assert found.divergence.verdict.startswith("unknown: the server stopped there")
        sides = (found.divergence.ours.best, found.divergence.theirs.best)
        assert sides == ((stop, 9) if swapped else (9, stop))
    (found,) = compare(
        went_on, replace(stopped, answer=lambda ids, count: Answer([5, 6], glimpses([5, 6]))), [("x", [1])], 4
    ).prompts
    assert found.explained  # it had emitted all that it was asked for


def test_a_server_that_shows_its_stop_token(pair):
    (stop,) = pair.target.spec.eos_token_ids
    went_on = scripted(pair, Answer([5, stop, 7], glimpses([5, stop, 7])))
    stopped = scripted(pair, Answer([5, stop], glimpses([5, stop]), ended=True))
    (found,) = compare(went_on, stopped, [("x", [1])], 3).prompts
    assert (found.tokens, found.divergence) == (2, None)


def told(ids: Sequence[int], owner: str) -> dict:
    """Return a choice whose every position has a second token right below."""
    names = [f"token_id:{token}" for token in ids]
    best = [{name: -0.1, f"token_id:{token + 1}": -0.2} for name, token in zip(names, ids, strict=True)]
    lists = {"tokens": names, "token_logprobs": [-0.1] * len(ids), "top_logprobs": best}
    return {"index": 0, "text": owner, "logprobs": lists, "finish_reason": "length"}


def test_two_servers_at_the_command_line(pair):
    pytest.importorskip("openai")
    with misbehaving() as plain, misbehaving() as fast:
        plain.owner = fast.owner = "vllm"
        plain.whole = lambda body: told([50, 60, 70, 80][: body["max_tokens"]], "t")
        fast.whole = lambda body: told([50, 60, 71, 80][: body["max_tokens"]], "t")
        ways = [f"server,url={server.url},dtype=bfloat16" for server in (plain, fast)]
        done = CliRunner().invoke(app, ["compare", *ways, "def f():", "--max-new-tokens", "4", "--json"])
        assert done.exit_code == 0, done.output
        (one,) = json.loads(done.stdout)["prompts"]
        assert one["tokens_alike"] == 2
        assert one["divergence"]["tokens"] == [70, 71]
        assert one["divergence"]["gaps"] == pytest.approx([0.1, 0.1])
        assert one["divergence"]["slots"] == [None, None]
        assert one["divergence"]["verdict"] == "near tie"
        asked = plain.asked[-1]
        assert asked["prompt"] == pair.tokenizer.encode("def f():")
        assert (asked["ignore_eos"], asked["return_tokens_as_token_ids"], asked["logprobs"]) == (True, True, 10)
        fast.whole = lambda body: {"index": 0, "text": "nothing alike", "finish_reason": "length"}
        done = CliRunner().invoke(app, ["compare", *ways, "def f():", "--max-new-tokens", "4"])
        assert done.exit_code == 1, done.output
        assert "unknown: the server gave no log probabilities" in done.stdout
        assert done.stdout.endswith(
            "0 not explained by rounding, 1 unknown, for a server that tells no log probabilities\n"
        )
        fast.whole = None
        done = CliRunner().invoke(app, ["compare", *ways, "500", "--max-new-tokens", "4"])
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: {fast.url}/v1/completions: the server answered 500 (out of memory)")


def test_a_server_that_refuses_log_probabilities(pair):
    pytest.importorskip("openai")
    with misbehaving() as server:
        server.owner = "sglang"

        def whole(body):
            if "logprobs" in body:
                raise Refused("logprobs are not supported with speculation")
            ids = [50, 60, 70][: body["max_tokens"]]
            return {"index": 0, "text": pair.tokenizer.decode(ids), "token_ids": ids, "finish_reason": "length"}

        server.whole = whole
        way = open_way(f"server,url={server.url}", zoo.fetch("tiny-code").target, None)
        answer = way.answer([1, 2, 3], 3)
        assert (answer.tokens, answer.text, answer.ended) == ([50, 60, 70], None, False)
        assert answer.logits == [Glimpse(50), Glimpse(60), Glimpse(70)]
        assert (server.asked[-1]["prompt"], server.asked[-1]["return_token_ids"]) == ([1, 2, 3], True)

        def never(body):
            raise Refused("no decoding today")

        server.whole = never
        with pytest.raises(errors.ServerError, match=r"completions: the server answered 400 \(no decoding today\)"):
            open_way(f"server,url={server.url}", zoo.fetch("tiny-code").target, None)


def test_a_server_that_reads_another_prompt():
    pytest.importorskip("openai")
    with misbehaving() as server:
        server.whole = lambda body: told([50], "x")
        way = open_way(f"server,url={server.url}", zoo.fetch("tiny-code").target, None)
        server.prompt_tokens = 5
        with pytest.raises(errors.ServerError, match=r"read the prompt as 5 tokens, here it has 3; is --target what"):
            way.answer([1, 2, 3], 1)
