"""The record, and its law against transformers' warpers and mlx-lm's samplers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dflash_fn import errors
from dflash_fn.policies import Policy, block_verification, match, relaxed, token_rejection, typical
from dflash_fn.sampling import GREEDY, Sampling, probabilities, weights

SETTINGS = [
    Sampling(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        [0.3, 1.0, 1.7], [None, 1, 5, 1000], [None, 0.1, 0.5, 0.9, 1.0], [None, 0.05, 0.5]
    )
]


def some_logits(rows: int = 8, vocab: int = 50) -> np.ndarray:
    """No two in a row are equal, so that ties do not matter."""
    return np.random.default_rng(0).normal(size=(1, rows, vocab)).astype(np.float32) * 3


def coarse_logits(rows: int = 40, vocab: int = 12) -> np.ndarray:
    """Full of ties, as bfloat16's are."""
    return np.random.default_rng(1).integers(0, 4, (1, rows, vocab)).astype(np.float32)


def warped_by_transformers(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers").generation.logits_process
    chain: list[Any] = [warpers.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k is not None:
        chain.append(warpers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        chain.append(warpers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        chain.append(warpers.MinPLogitsWarper(sampling.min_p))
    scores = torch.from_numpy(logits[0])
    for warper in chain:
        scores = warper(None, scores)
    return torch.softmax(scores, dim=-1).numpy()


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_law_is_that_of_transformers_warpers(sampling: Sampling) -> None:
    logits = some_logits()
    ours, theirs = probabilities(np, logits, sampling)[0], warped_by_transformers(logits, sampling)
    assert np.array_equal(ours > 0, theirs > 0)
    # scaled logits reach 60, where a last place of float32 is 4e-6, and it goes into the exponent
    assert np.allclose(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_ties_at_the_kth_are_all_kept_as_transformers_does(top_k: int) -> None:
    logits, sampling = coarse_logits(), Sampling(1.0, top_k=top_k)
    assert np.array_equal(weights(np, logits, sampling)[0] > 0, warped_by_transformers(logits, sampling) > 0)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_ties_at_the_end_of_top_p_are_all_kept(top_p: float) -> None:
    """transformers keeps as many of the tied tokens as it takes; ours are those and the others that tie with them."""
    logits, sampling = coarse_logits(), Sampling(1.0, top_p=top_p)
    ours, theirs = weights(np, logits, sampling)[0] > 0, warped_by_transformers(logits, sampling) > 0
    assert (ours & ~theirs).any()
    for row, kept, some in zip(logits[0], ours, theirs, strict=True):
        assert not (some & ~kept).any()
        assert np.array_equal(kept, row >= row[some].min())


@pytest.mark.parametrize(("top_p", "min_p"), [(0.1, 0.0), (0.5, 0.0), (0.9, 0.0), (0.0, 0.05), (0.7, 0.1)])
@pytest.mark.parametrize("make", [some_logits, coarse_logits])
def test_filters_are_those_of_mlx_lm_at_temperature_1(make: Any, top_p: float, min_p: float) -> None:
    samplers = pytest.importorskip("mlx_lm.sample_utils")
    mx = pytest.importorskip("mlx.core")
    logits = make()
    scores = mx.array(logits[0])
    scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    scores = samplers.apply_top_p(scores, top_p) if top_p else scores
    scores = samplers.apply_min_p(scores, min_p) if min_p else scores
    theirs = np.array(mx.softmax(scores, axis=-1))
    ours = probabilities(np, logits, Sampling(1.0, top_p=top_p or None, min_p=min_p or None))[0]
    assert np.array_equal(ours > 0, theirs > 0)
    assert np.allclose(ours, theirs, rtol=3e-6, atol=0)


def test_mlx_lm_filters_before_the_temperature() -> None:
    """The order matters: at a high temperature top-p keeps more where it comes after."""
    samplers = pytest.importorskip("mlx_lm.sample_utils")
    mx = pytest.importorskip("mlx.core")
    logits = some_logits()
    scores = mx.array(logits[0])
    theirs = np.array(samplers.apply_top_p(scores - mx.logsumexp(scores, axis=-1, keepdims=True), 0.5))
    ours = weights(np, logits, Sampling(2.0, top_p=0.5))[0] > 0
    assert not (np.isfinite(theirs) & ~ours).any()
    assert (ours & ~np.isfinite(theirs)).any()


def test_temperature_0_is_one_hot_at_the_first_largest() -> None:
    logits = np.array([[[1.0, 3.0, 3.0], [-np.inf, -np.inf, -2.0]]], dtype=np.float32)
    assert weights(np, logits, GREEDY).tolist() == [[[0, 1, 0], [0, 0, 1]]]


def test_what_is_banned_stays_out_and_no_temperature_overflows() -> None:
    logits = np.array([[[-np.inf, 1e30, -1e30, 1e30]]], dtype=np.float32)
    for sampling in (Sampling(1e-6), Sampling(1.0), Sampling(1e6), Sampling(1.0, top_k=4), Sampling(1.0, top_p=0.999)):
        made = weights(np, logits, sampling)
        assert made[0, 0, 0] == 0
        assert made[0, 0, 1] == made[0, 0, 3] == 1
        assert np.isfinite(made).all()


def test_numbers_of_numpy_widen_nothing() -> None:
    sampling = Sampling(np.float64(0.7), None, np.float64(0.9), np.float64(0.1))
    found = weights(np, some_logits(), sampling)
    assert found.dtype == np.float32
    assert np.array_equal(found, weights(np, some_logits(), Sampling(0.7, None, 0.9, 0.1)))


def test_half_precision_is_widened_first() -> None:
    logits = np.array([[[10.0, 9.99, 0.0]]], dtype=np.float16)
    assert weights(np, logits, Sampling(0.5)).dtype == np.float32
    assert weights(np, logits.astype(np.float64), Sampling(0.5)).dtype == np.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature: got -1, expected a number of at least 0"),
        ({"temperature": float("nan")}, "temperature: got nan, expected a number of at least 0"),
        ({"temperature": "warm"}, "temperature: got 'warm', expected a number of at least 0"),
        ({"temperature": 1e-9}, "temperature: got 1e-09, expected 0 (greedy), or a finite number from 1e-06 on"),
        ({"temperature": float("inf")}, "temperature: got inf, expected 0 (greedy), or a finite number from 1e-06 on"),
        ({"temperature": 1, "top_k": 0}, "top_k: got 0, expected an integer of at least 1; None keeps all"),
        ({"temperature": 1, "top_k": 2.5}, "top_k: got 2.5, expected an integer of at least 1"),
        ({"temperature": 1, "top_p": 0}, "top_p: got 0, expected a number above 0 to 1; temperature 0 is greedy"),
        ({"temperature": 1, "top_p": 1.5}, "top_p: got 1.5, expected a number from 0 to 1"),
        ({"temperature": 1, "min_p": True}, "min_p: got True, expected a number from 0 to 1"),
        (
            {"top_p": 0.9},
            "top_p: got one at temperature 0, where only the largest logit counts; give a temperature too",
        ),
    ],
)
def test_numbers_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InputError) as caught:
        Sampling(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize("make", [match, token_rejection, block_verification, typical, relaxed])
def test_a_bare_temperature_is_no_sampling(make: Callable[[Any], Policy]) -> None:
    with pytest.raises(errors.InputError, match=r"sampling: got 0\.7 of type float, expected a Sampling"):
        make(0.7)


def test_a_sampling_says_what_it_does() -> None:
    assert str(GREEDY) == "T=0"
    assert str(Sampling(1, 50, 0.9, 0.05)) == "T=1 top_k=50 top_p=0.9 min_p=0.05"
