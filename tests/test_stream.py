"""`stream_generate`: one response a token, text as it settles, whatever holds the model."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors, zoo
from dflash_fn.memory import peak_host_memory
from dflash_fn.records import Pair
from tests.helpers.fixtures import checkpoints as checkpoints
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, without_draft

pytest.importorskip("torch")

import dflash_fn.stream as module

PROMPT = "class Stack:\n    def __init__(self):\n"
UNICODE = "# naïve café ☃ 漢字 🎉\n"


@pytest.fixture(scope="module")
def pair() -> Pair:
    return dflash_fn.load_zoo("tiny-code", device="cpu")


def stream(model: Any, tokenizer: Any = None, prompt: Any = PROMPT, **options: Any) -> list[Any]:
    return list(dflash_fn.stream_generate(model, tokenizer, prompt, **options))


def decoded(pair: Pair, prompt: str, count: int, **options: Any) -> tuple[int, ...]:
    state = dflash_fn.prefill(pair, prompt)
    return dflash_fn.decode(state, pair, max_new_tokens=count, **options).tokens[0][len(state.tokens[0]) :]


# what is yielded


def test_one_response_a_token_and_the_text_is_the_decoded_answer(pair: Pair) -> None:
    answer = stream(pair, max_tokens=40)
    tokens = [response.token for response in answer]
    assert tuple(tokens) == decoded(pair, PROMPT, 40)
    assert "".join(response.text for response in answer) == pair.tokenizer.decode(tokens, skip_special_tokens=True)
    assert [response.generation_tokens for response in answer] == list(range(1, 41))
    assert {response.prompt_tokens for response in answer} == {len(pair.tokenizer.encode(PROMPT))}
    assert [response.finish_reason for response in answer] == [None] * 39 + ["length"]


def test_accepted_tokens_are_from_the_draft_and_steps_say_how_many(pair: Pair) -> None:
    answer = stream(pair, max_tokens=40)
    state = dflash_fn.prefill(pair, PROMPT)
    infos = [info for _, info in dflash_fn.rounds(state, pair, max_new_tokens=40)]
    assert answer[0].step == answer[0].num_accepted == 0
    assert not answer[0].from_draft
    for info in infos:
        count = info.num_accepted[0]
        assert count is not None
        part = [response for response in answer if response.step == info.step]
        assert tuple(response.token for response in part) == info.emitted[0]
        assert {response.num_accepted for response in part} == {count}
        assert [response.from_draft for response in part] == [True] * count + [False]
    assert sum(response.from_draft for response in answer) > 5


def test_log_probabilities_are_those_the_token_was_chosen_from(pair: Pair) -> None:
    state = dflash_fn.prefill(pair, PROMPT)
    rows = [
        pair.port.to_numpy(info.logits)[0, slot].astype(np.float64)
        for _, info in dflash_fn.rounds(state, pair, max_new_tokens=12)
        for slot in range(len(info.emitted[0]))
    ]
    for response, logits in zip(stream(pair, max_tokens=12), rows, strict=True):
        values = pair.port.to_numpy(response.logprobs)
        assert values.shape == (pair.target.spec.vocab_size,)
        assert values.dtype == np.float32
        assert values.argmax() == response.token
        exact = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        np.testing.assert_allclose(values, exact, atol=1e-4)


def test_rates_and_memory_are_positive_and_finite(pair: Pair) -> None:
    answer = stream(pair, max_tokens=10)
    assert len({response.prompt_tps for response in answer}) == 1
    for response in answer:
        assert 0 < response.prompt_tps < math.inf
        assert 0 < response.generation_tps < math.inf
        assert 0.01 < response.peak_memory < 10_000
    assert peak_host_memory() >= answer[-1].peak_memory > 0


def test_a_stop_token_is_yielded_without_text(pair: Pair) -> None:
    text = decoded(pair, PROMPT, 24)
    for stop in dict.fromkeys(text[2:12]):
        first = text.index(stop)
        answer = stream(pair, max_tokens=24, stop_token_ids=[stop])
        assert [response.token for response in answer] == list(text[: first + 1])
        assert answer[-1].finish_reason == "stop"
        assert "".join(response.text for response in answer) == pair.tokenizer.decode(text[:first])


def test_the_tokenizers_stop_ids_count_beside_the_targets(pair: Pair) -> None:
    text = decoded(pair, PROMPT, 24)
    changed = dataclasses.replace(pair, tokenizer=Ending(pair.tokenizer, {text[3], text[9]}))
    answer = stream(changed, max_tokens=24)
    first = min(text.index(text[3]), text.index(text[9]))
    assert [response.token for response in answer] == list(text[: first + 1])
    assert answer[-1].finish_reason == "stop"
    assert len(stream(changed, max_tokens=24, stop_token_ids=())) == 24
    assert module._own_stop_ids(pair) == {0}


class Ending:
    """A tokenizer with several stop ids, as mlx-lm's have them."""

    def __init__(self, tokenizer: Any, eos_token_ids: set[int]) -> None:
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def test_a_full_context_is_a_length(checkpoints: Checkpoints, pair: Pair) -> None:
    small = checkpoints.pair(pair.port, DraftDesign(TargetDesign(max_context=16)))
    answer = stream(dataclasses.replace(small, tokenizer=Numbers()), prompt=[5, 9, 1, 22], max_tokens=50)
    assert len(answer) == 12
    assert answer[-1].finish_reason == "length"
    assert "".join(response.text for response in answer) == "".join(f"{response.token} " for response in answer)


class Numbers:
    """A tokenizer of 48 tokens that spells each as its number; text begins with token 7, `<s>`."""

    clean_up_tokenization_spaces = False
    bos_token, eos_token_id = "<s>", None
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012 (nobody writes it)

    def __len__(self) -> int:
        return 48

    def convert_ids_to_tokens(self, index: int) -> str:
        return str(index)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [7] * add_special_tokens + [7 if part == "<s>" else int(part) for part in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(f"{index} " for index in ids)


def test_prompts_are_text_ids_or_arrays(pair: Pair) -> None:
    ids = pair.tokenizer.encode(UNICODE)
    expected = [response.token for response in stream(pair, prompt=UNICODE, max_tokens=6)]
    for prompt in (ids, tuple(ids), np.array(ids)):
        assert [response.token for response in stream(pair, prompt=prompt, max_tokens=6)] == expected


def test_text_that_begins_with_the_first_token_gets_no_second_one(checkpoints: Checkpoints, pair: Pair) -> None:
    small = dataclasses.replace(checkpoints.pair(pair.port, DraftDesign()), tokenizer=Numbers())
    assert stream(small, prompt="<s> 5 9", max_tokens=1)[0].prompt_tokens == 3
    assert stream(small, prompt="5 9", max_tokens=1)[0].prompt_tokens == 3


def test_tokens_do_not_depend_on_block_size_or_draft(pair: Pair) -> None:
    expected = [response.token for response in stream(pair, max_tokens=20, width=16)]
    for options in ({"block_size": 1}, {"block_size": 3}, {"block_size": 16}):
        assert [response.token for response in stream(pair, max_tokens=20, width=16, **options)] == expected
    plain = stream(without_draft(pair), max_tokens=20, width=16)
    assert [response.token for response in plain] == expected
    assert not any(response.from_draft for response in plain)
    assert len(stream(pair, max_tokens=20, block_size=12)) == 20


def test_no_tokens_no_responses(pair: Pair) -> None:
    assert stream(pair, max_tokens=0) == []


# where the model comes from


def test_folders_models_and_pairs_say_the_same(pair: Pair) -> None:
    transformers = pytest.importorskip("transformers")
    files = zoo.fetch("tiny-code")
    held = transformers.AutoModelForCausalLM.from_pretrained(files.target, dtype="float32")
    expected = [response.token for response in stream(pair, max_tokens=12)]
    for model, words in (
        (files.target, None),
        (str(files.target), pair.tokenizer),
        (held, files.target),
        (held, pair.tokenizer),
    ):
        answer = stream(model, words, draft=files.draft, max_tokens=12, device="cpu", dtype="float32")
        assert [response.token for response in answer] == expected
        assert any(response.from_draft for response in answer)
    assert [response.token for response in stream(pair, files.target, max_tokens=12)] == expected


def test_only_ports_of_imported_libraries_are_asked(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    asked: list[str] = []

    def get(name: str) -> Any:
        asked.append(name)
        if name == "numpy":
            raise errors.BackendMissing("numpy has no port")
        return pair.port

    monkeypatch.setattr(module, "port_names", lambda: ("numpy", "not_imported", "torch"))
    monkeypatch.setattr(module, "get_port", get)
    assert "not_imported" not in sys.modules
    import torch

    assert module._port_of(torch.nn.Linear(1, 1)) is pair.port
    assert asked == ["numpy", "torch"]
    assert module._port_of("a/b") == module._port_of(Path()) == "torch"


def test_an_object_that_no_port_claims_is_named(pair: Pair) -> None:
    with pytest.raises(errors.InputError, match=r"model: got an object of type dict, .*torch.*; expected a Pair"):
        stream({}, pair.tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "x/y"}, "draft: got one beside a loaded pair"),
        ({"port": "torch"}, "port: got one beside a loaded pair"),
        ({"dtype": "bfloat16"}, "dtype: got one beside a loaded pair"),
        ({"sampler": len}, "sampler: stream_generate takes no such argument; beside its own it takes dtype, device, "),
        ({"max_tokens": -1}, "max_tokens: got -1, expected an integer of at least 0"),
        ({"max_tokens": 1.5}, "max_tokens: got 1.5, expected an integer"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"block_size": "4"}, "block_size: got '4', expected an integer"),
        ({"block_size": 4, "width": 2}, "block_size 4 is above the state's width 2"),
        ({"prompt": []}, "row 0: the prompt is empty"),
        ({"prompt": [10**6]}, "row 0, token 0: got 1000000"),
        ({"seed": -1}, "seed: got -1"),
        ({"stop_token_ids": 10**6}, "stop_token_ids: got 1000000"),
    ],
)
def test_what_cannot_be_used_is_refused_by_the_call(options: dict[str, Any], message: str, pair: Pair) -> None:
    with pytest.raises(errors.InputError, match=message):
        dflash_fn.stream_generate(pair, None, **{"prompt": PROMPT, **options})


def test_a_tokenizer_is_needed_and_must_fit(pair: Pair) -> None:
    bare = dataclasses.replace(pair, tokenizer=None)
    with pytest.raises(errors.InputError, match="tokenizer: got None, and the model brings none"):
        dflash_fn.stream_generate(bare, None, [1, 2])
    with pytest.raises(errors.TokenizerMismatch, match="the tokenizer has 48 tokens"):
        dflash_fn.stream_generate(bare, Numbers(), [1, 2])


@pytest.mark.parametrize("prompt", [5, np.array(5)])
def test_a_number_is_no_prompt(pair: Pair, prompt: Any) -> None:
    with pytest.raises(errors.InputError) as caught:
        dflash_fn.stream_generate(pair, None, prompt)
    assert str(caught.value) == "prompt: got 5, expected text or a sequence of token ids"
