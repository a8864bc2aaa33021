"""`stream_generate` beside mlx-lm's own: the same fields, tokens, text and endings for the same model object."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors, zoo
from dflash_fn.config import parse_target
from dflash_fn.divergence import explain_divergence, first_difference
from dflash_fn.sources import read_config
from dflash_fn.tolerances import TIE, bound

INSTALL = 'pip install ".[mlx]"'
mx: Any = pytest.importorskip("mlx.core", reason=f"needs mlx: {INSTALL}")
mlx_lm: Any = pytest.importorskip("mlx_lm", reason=f"needs mlx-lm: {INSTALL}")
# `mlx_lm.generate` is a function, which hides the module of that name
reference: Any = pytest.importorskip("mlx_lm.generate").GenerationResponse
tree_flatten: Any = pytest.importorskip("mlx.utils").tree_flatten

PROMPTS = (
    "class Stack:\n    def __init__(self):\n",
    "def fibonacci(n):\n",
    "import os\n\n\ndef main(args):\n    for name in sorted(",
)
ADDED = ("num_accepted", "step")
MEASURED = ("prompt_tps", "generation_tps", "peak_memory")


@pytest.fixture(scope="module")
def files() -> Any:
    return zoo.fetch("tiny-code")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest, files: Any) -> tuple[Any, Any, str]:
    model, tokenizer, *_ = mlx_lm.load(str(files.target))
    model.set_dtype(getattr(mx, request.param))
    return model, tokenizer, request.param


def theirs(model: Any, tokenizer: Any, prompt: Any, count: int) -> list[Any]:
    return list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=count))


def host(array: Any) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def shared(ours: list[Any], other: list[Any], dtype: str, files: Any) -> int:
    """Return how many responses have the same tokens; fail where they part at more than a near tie."""
    at = first_difference([response.token for response in ours], [response.token for response in other])
    if at is None:
        assert len(ours) == len(other)
        return len(ours)
    spec = parse_target(read_config(files.target))
    rows = host(ours[at].logprobs), host(other[at].logprobs)
    found = explain_divergence(f"token {at}", at, *rows, relative_bound=bound(dtype, "logits", spec))  # pyright: ignore[reportArgumentType]
    assert found.near_tie, str(found)
    return at


def same_text(ours: list[Any], other: list[Any]) -> None:
    """Compare; mlx-lm drops a space with which an answer begins, though the tokenizer decodes it."""
    mine, their = ("".join(response.text for response in responses) for responses in (ours, other))
    assert their in (mine, mine.removeprefix(" "))


def test_the_fields_are_mlx_lms_and_two_more(loaded: tuple[Any, Any, str], files: Any) -> None:
    model, tokenizer, _ = loaded
    names = [field.name for field in dataclasses.fields(reference)]
    assert [field.name for field in dataclasses.fields(dflash_fn.GenerationResponse)] == [*names, *ADDED]
    ours = next(dflash_fn.stream_generate(model, tokenizer, PROMPTS[0], draft=files.draft, max_tokens=3))
    other = next(mlx_lm.stream_generate(model, tokenizer, PROMPTS[0], max_tokens=3))
    for name in names:
        assert type(getattr(ours, name)) is type(getattr(other, name)), name
    assert ours.logprobs.shape == other.logprobs.shape


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_text_and_endings_are_the_same(prompt: str, loaded: tuple[Any, Any, str], files: Any) -> None:
    model, tokenizer, dtype = loaded
    ours = list(dflash_fn.stream_generate(model, tokenizer, prompt, draft=files.draft, max_tokens=32))
    other = theirs(model, tokenizer, prompt, 32)
    count = shared(ours, other, dtype, files)
    assert any(response.from_draft for response in ours)
    for mine, their in zip(ours[:count], other[:count], strict=True):
        assert mine.generation_tokens == their.generation_tokens
        assert mine.prompt_tokens == their.prompt_tokens
        assert mine.finish_reason == their.finish_reason
        assert all(getattr(mine, name) > 0 for name in MEASURED)
    if count == len(ours):
        same_text(ours, other)


def test_log_probabilities_are_near(loaded: tuple[Any, Any, str], files: Any) -> None:
    model, tokenizer, dtype = loaded
    ours = next(dflash_fn.stream_generate(model, tokenizer, PROMPTS[0], draft=files.draft, max_tokens=1))
    other = theirs(model, tokenizer, PROMPTS[0], 1)[0]
    scale = TIE * bound(dtype, "logits", parse_target(read_config(files.target)))  # pyright: ignore[reportArgumentType]
    assert np.abs(host(ours.logprobs) - host(other.logprobs)).max() <= scale * np.abs(host(other.logprobs)).max()


def test_the_tokenizers_stop_ids_end_both(loaded: tuple[Any, Any, str], files: Any) -> None:
    model, tokenizer, _ = loaded
    text = [response.token for response in theirs(model, tokenizer, PROMPTS[0], 12)]
    ending = copy.copy(tokenizer)
    ending.eos_token_ids = {text[5], text[9]}
    other = theirs(model, ending, PROMPTS[0], 12)
    ours = list(dflash_fn.stream_generate(model, ending, PROMPTS[0], draft=files.draft, max_tokens=12))
    assert [response.token for response in ours] == [response.token for response in other]
    assert ours[-1].finish_reason == other[-1].finish_reason == "stop"
    same_text(ours, other)


def test_prompts_in_arrays_and_models_without_a_draft(loaded: tuple[Any, Any, str], files: Any) -> None:
    model, tokenizer, dtype = loaded
    prompt = mx.array(tokenizer.encode(PROMPTS[1]))
    ours = list(dflash_fn.stream_generate(model, tokenizer, prompt, max_tokens=12))
    shared(ours, theirs(model, tokenizer, prompt, 12), dtype, files)
    assert not any(response.from_draft for response in ours)


def test_the_model_is_unchanged(loaded: tuple[Any, Any, str], files: Any) -> None:
    model, tokenizer, _ = loaded
    before = {name: id(value) for name, value in tree_flatten(model.parameters())}
    values = {name: host(value) for name, value in tree_flatten(model.parameters())}
    attributes = dict(vars(model))
    list(dflash_fn.stream_generate(model, tokenizer, PROMPTS[0], draft=files.draft, max_tokens=8))
    assert vars(model) == attributes
    after = dict(tree_flatten(model.parameters()))
    assert {name: id(value) for name, value in after.items()} == before
    assert all(np.array_equal(host(value), values[name]) for name, value in after.items())


def test_a_draft_that_does_not_fit_is_refused(loaded: tuple[Any, Any, str], files: Any) -> None:
    model, tokenizer, _ = loaded
    with pytest.raises(errors.ConfigError, match="dflash_config"):
        dflash_fn.stream_generate(model, tokenizer, PROMPTS[0], draft=files.target, max_tokens=1)
