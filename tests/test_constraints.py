"""Constraints as functions: the penalties of transformers, OpenAI and mlx-lm; bans, forced tokens, grammars."""

from __future__ import annotations

import json
import math
import sys
import threading
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn import constraints, errors
from dflash_fn.constraints import ban, force, frequency, grammar, presence, repetition
from dflash_fn.policies import constrained, match
from dflash_fn.sampling import Sampling

loose: Any = constraints
"""The same functions for arguments that their types forbid."""

LOGITS = np.random.default_rng(4).normal(size=20).astype(np.float32) * 3
TOKENS = (3, 7, 7, 0, 19, 7)


@pytest.mark.parametrize("factor", [1.0, 1.3, 0.7])
@pytest.mark.parametrize("skip", [0, 2])
def test_repetition_is_that_of_transformers_bit_for_bit(factor: float, skip: int) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers").generation.logits_process
    processor = process.RepetitionPenaltyLogitsProcessor(factor, prompt_ignore_length=skip or None)
    theirs = processor(torch.tensor([TOKENS]), torch.from_numpy(LOGITS[None]))[0].numpy()
    ours = repetition(factor, skip=skip)(LOGITS, TOKENS, 0)
    assert ours.dtype == np.float32
    assert ours.tobytes() == theirs.tobytes()


def test_presence_and_frequency_are_openais_formula() -> None:
    """mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, where c counts the answer's tokens."""
    for token in range(20):
        count = TOKENS[2:].count(token)
        assert presence(0.5, skip=2)(LOGITS, TOKENS, 0)[token] == LOGITS[token] - np.float32(0.5 * (count > 0))
        assert frequency(0.5, skip=2)(LOGITS, TOKENS, 0)[token] == LOGITS[token] - np.float32(0.5 * count)


@pytest.mark.parametrize("name", ["presence", "frequency"])
def test_presence_and_frequency_are_those_of_mlx_lm(name: str) -> None:
    mx = pytest.importorskip("mlx.core")
    made = getattr(pytest.importorskip("mlx_lm.sample_utils"), f"make_{name}_penalty")(0.25, context_size=100)
    theirs = np.array(made(mx.array(TOKENS), mx.array(LOGITS[None])))[0]
    assert {"presence": presence, "frequency": frequency}[name](0.25)(LOGITS, TOKENS, 0).tobytes() == theirs.tobytes()


def test_rows_skip_their_own_prompts() -> None:
    made = frequency(1.0, skip=[6, 3])
    assert np.array_equal(made(LOGITS, TOKENS, 0), LOGITS)
    assert (LOGITS - made(LOGITS, TOKENS, 1)).round(4)[[0, 7, 19]].tolist() == [1, 1, 1]


def test_bans_and_forced_tokens() -> None:
    banned = ban([2, 5, 5])(LOGITS, TOKENS, 0)
    assert np.flatnonzero(np.isneginf(banned)).tolist() == [2, 5]
    assert np.array_equal(np.delete(banned, [2, 5]), np.delete(LOGITS, [2, 5]))
    forced = force([11, 4], begin=[5, 6])
    assert np.flatnonzero(np.isfinite(forced(LOGITS, TOKENS, 0))).tolist() == [4]
    assert np.flatnonzero(np.isfinite(forced(LOGITS, TOKENS, 1))).tolist() == [11]
    assert forced(LOGITS, TOKENS[:4], 0) is LOGITS
    assert forced(LOGITS, (*TOKENS, 1, 1), 0) is LOGITS


def test_constraints_of_a_policy_come_one_after_the_other() -> None:
    inner = constrained(match(), repetition(2.0))
    policy = constrained(inner, presence(1.0), ban([0]))
    expected = ban([0])(presence(1.0)(repetition(2.0)(LOGITS, TOKENS, 0), TOKENS, 0), TOKENS, 0)
    assert policy.constraint is not None
    assert np.array_equal(policy.constraint(LOGITS, TOKENS, 0), expected)
    assert policy.name == "match, constrained, constrained"
    assert policy.lossless
    assert policy.invariant


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: repetition(0), "repetition: got factor 0.0, expected a number above 0"),
        (lambda: repetition(math.nan), "repetition: factor: got nan, expected a finite number"),
        (lambda: presence(math.inf), "presence: amount: got inf, expected a finite number"),
        (lambda: loose.frequency("a"), "frequency: amount: got 'a', expected a finite number"),
        (lambda: presence(0.5, skip=-1), "presence: skip: got -1, expected an integer of at least 0"),
        (lambda: loose.presence(0.5, skip=2.5), "presence: skip: got 2.5, expected an integer"),
        (lambda: frequency(0.5, skip=[3, -1]), "frequency: skip, row 1: got -1, expected an integer of at least 0"),
        (lambda: ban([4, -1]), "ban, token 1: got -1, expected an integer of at least 0"),
        (lambda: loose.ban([1.5]), "ban, token 0: got 1.5, expected an integer"),
        (lambda: loose.ban(3), r"ban: got 3, expected token ids, such as \[1, 2\]"),
        (lambda: loose.ban("ab"), "ban: got 'ab', expected token ids"),
        (lambda: force([-1], begin=5), "force, token 0: got -1, expected an integer of at least 0"),
        (lambda: force([1], begin=-5), "force: begin: got -5, expected an integer of at least 0"),
        (lambda: ban([20])(LOGITS, TOKENS, 0), "ban: got token 20, expected an id from 0 to 19"),
        (lambda: force([20], begin=6)(LOGITS, TOKENS, 0), "force: got token 20, expected an id from 0 to 19"),
        (lambda: presence(1, skip=[3])(LOGITS, TOKENS, 1), "skip: got 1 numbers, expected one a row; row 1 has none"),
        (lambda: force([1], begin=[])(LOGITS, TOKENS, 0), "begin: got 0 numbers, expected one a row; row 0 has none"),
    ],
)
def test_what_makes_no_sense(make: Any, message: str) -> None:
    with pytest.raises(errors.InputError, match=message):
        make()


def test_numbers_of_numpy_are_numbers() -> None:
    two: Any = np.int64(2)
    assert np.array_equal(
        loose.presence(np.float32(0.5), skip=two)(LOGITS, TOKENS, 0), presence(0.5, skip=2)(LOGITS, TOKENS, 0)
    )
    rows: Any = np.array([6, 3])
    assert np.array_equal(frequency(1.0, skip=rows)(LOGITS, TOKENS, 1), frequency(1.0, skip=3)(LOGITS, TOKENS, 1))
    begin: Any = np.int64(6)
    assert np.flatnonzero(np.isfinite(loose.force([np.int64(4)], begin=begin)(LOGITS, TOKENS, 0))).tolist() == [4]


def test_an_id_of_no_token_is_an_error_with_its_place() -> None:
    pytest.importorskip("torch")
    pair = dflash_fn.load_zoo("tiny-code")
    state, size = dflash_fn.prefill(pair, [1, 2, 3]), pair.target.spec.vocab_size
    message = f"row 0, position 3: the constraint ban: got token {size}, expected an id from 0 to {size - 1}"
    with pytest.raises(errors.InputError, match=message):
        dflash_fn.decode(state, pair, policy=constrained(match(), ban([size])), max_new_tokens=2)


# --- grammar ---

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["a", "b"],
}


def compiled(pair: dflash_fn.Pair, more: int = 0) -> Any:
    xgrammar = pytest.importorskip("xgrammar", reason="the grammar test needs the extra: pip install xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(pair.tokenizer, vocab_size=pair.target.spec.vocab_size + more)
    return xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)


@pytest.mark.parametrize(
    ("runs", "noise"), [(3, "inverse"), pytest.param(50, "gumbel", marks=pytest.mark.slow)], ids=["some", "fifty"]
)
def test_every_sampled_answer_parses_and_is_that_of_plain_decoding(runs: int, noise: Any) -> None:
    pytest.importorskip("torch")
    pair = dflash_fn.load_zoo("tiny-code")
    ids = pair.tokenizer.encode("x = ")
    policy = constrained(match(Sampling(0.8), noise=noise), grammar(compiled(pair), skip=len(ids)))
    finished = 0
    for seed in range(runs):
        state = dflash_fn.prefill(pair, ids, seed=seed)
        found, plain = (
            dflash_fn.decode(state, pair, policy=policy, max_new_tokens=48, block_size=size).tokens[0]
            for size in (4, 1)
        )
        assert found == plain
        text = pair.tokenizer.decode(found[len(ids) :], skip_special_tokens=True)
        if found[-1] in pair.target.spec.eos_token_ids:
            finished += 1
            answer = json.loads(text)
            assert list(answer) == ["a", "b"]
            assert isinstance(answer["a"], int)
    assert finished >= runs // 2


def test_a_text_outside_the_grammar_is_an_error() -> None:
    pytest.importorskip("torch")
    pair = dflash_fn.load_zoo("tiny-code")
    state = dflash_fn.prefill(pair, pair.tokenizer.encode("x = "))
    policy = constrained(match(), grammar(compiled(pair), skip=0))
    with pytest.raises(errors.InputError, match=r"row 0, position .*: the constraint leaves no token to emit"):
        dflash_fn.decode(state, pair, policy=policy)


def test_without_xgrammar_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(
        errors.BackendMissing, match=r"xgrammar cannot be imported .*pip install 'dflash-fn\[grammar\]'"
    ):
        grammar(None)


def test_threads_share_a_grammar() -> None:
    """Each thread walks a text of its own, and a row's matcher is not the other's; a switch at every call shows it."""
    pytest.importorskip("torch")
    pair = dflash_fn.load_zoo("tiny-code")
    vocab_size, tokenizer = pair.target.spec.vocab_size, pair.tokenizer
    made = grammar(compiled(pair))
    logits = np.zeros(vocab_size, dtype=np.float32)
    texts = [tuple(tokenizer.encode(text)) for text in ('{"a": 12, "b": [true]}', '{"a": -3, "b": []}')]
    alone = [[made(logits, ids[:end], 0).tobytes() for end in range(len(ids))] for ids in texts]
    turns, found = threading.Barrier(2), {}

    def walk(index: int) -> None:
        for end in range(max(map(len, texts))):
            turns.wait(timeout=60)
            ids = texts[index][: end % len(texts[index])]
            found[index, end] = made(logits, ids, 0).tobytes() == alone[index][len(ids)]

    threads = [threading.Thread(target=walk, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 * max(map(len, texts))
    assert all(found.values())


def test_each_thread_has_matchers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="the grammar test needs the extra: pip install xgrammar")
    pytest.importorskip("torch")
    pair = dflash_fn.load_zoo("tiny-code")
    plain, makers = xgrammar.GrammarMatcher, []

    def counted(of: Any) -> Any:
        makers.append(threading.get_ident())
        return plain(of)

    monkeypatch.setattr(xgrammar, "GrammarMatcher", counted)
    made, logits = grammar(compiled(pair)), np.zeros(pair.target.spec.vocab_size, dtype=np.float32)
    other = threading.Thread(target=lambda: made(logits, (), 0))
    made(logits, (), 0)
    other.start()
    other.join()
    made(logits, (), 0)
    assert len(makers) == len(set(makers)) == 2


def test_a_grammar_that_does_not_fit() -> None:
    pytest.importorskip("torch")
    pair = dflash_fn.load_zoo("tiny-code")
    state, size = dflash_fn.prefill(pair, [1, 2, 3]), pair.target.spec.vocab_size
    policy = constrained(match(), grammar(compiled(pair, more=64), skip=3))
    message = f"row 0, position 3: the constraint grammar: got a grammar compiled for {size + 64} token ids, expected"
    with pytest.raises(errors.InputError, match=message):
        dflash_fn.decode(state, pair, policy=policy, max_new_tokens=2)
    with pytest.raises(errors.InputError, match="grammar: got str, expected an xgrammar"):
        grammar("x")
