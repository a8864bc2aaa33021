"""The match rule on numpy, by exact enumeration, and within the subset of the array API that rules may use."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors, policies
from dflash_fn.policies import Policy, budget, confidence_cut, forced, match, relaxed, token_rejection, typical
from dflash_fn.sampling import Sampling, probabilities
from tests.helpers.enumeration import all_blocks, all_ties, matched
from tests.helpers.verdicts import KINDS, some_blocks, verdicts

loose: Any = policies
"""The same functions for arguments that their types forbid."""

SIZES = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3), (3, 4)]


@pytest.fixture(params=["numpy", "array_api_strict"])
def xp(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


@pytest.mark.parametrize(("vocab", "size"), SIZES)
def test_match_on_every_block(xp: Any, vocab: int, size: int) -> None:
    check(xp, *all_blocks(vocab, size))


@pytest.mark.parametrize("vocab", [2, 3])
def test_match_takes_the_first_of_tied_logits(xp: Any, vocab: int) -> None:
    check(xp, *all_ties(vocab))


def check(xp: Any, drafted: np.ndarray, logits: np.ndarray) -> None:
    verdict = match().rule(xp, xp.asarray(drafted), xp.asarray(logits), None, {})
    found = list(zip(np.asarray(verdict.num_accepted).tolist(), np.asarray(verdict.next_token).tolist(), strict=True))
    assert found == [matched(*case) for case in zip(drafted.tolist(), logits.tolist(), strict=True)]


def test_match_returns_the_dtype_of_the_drafted_tokens() -> None:
    drafted, logits = all_blocks(2, 3)
    verdict = match().rule(np, drafted, logits, None, {})
    assert (verdict.num_accepted.dtype, verdict.next_token.dtype) == (drafted.dtype, drafted.dtype)
    assert verdict.num_accepted.shape == verdict.next_token.shape == (len(drafted),)


def test_match_says_what_it_is() -> None:
    assert (match().name, match().lossless, match().needs_q, match().streams) == ("match", True, False, ())
    assert match() == match()
    assert dflash_fn.match is match


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_policies_use_nothing_but_the_standard(kind: str, size: int) -> None:
    """array-api-strict has the standard's functions and no others, and refuses to mix types."""
    strict = pytest.importorskip("array_api_strict")
    blocks = some_blocks(30, size, 7)
    given = {name: strict.asarray(values) for name, values in blocks.items()}
    assert verdicts(KINDS[kind], strict, given) == verdicts(KINDS[kind], np, blocks)


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, top_k=3, top_p=0.8, min_p=0.1)], ids=str)
def test_drafting_uses_nothing_but_the_standard(sampling: Sampling) -> None:
    strict = pytest.importorskip("array_api_strict")
    blocks = some_blocks(30, 4, 7)
    for policy in (match(sampling), match(sampling, noise="inverse"), token_rejection(sampling)):
        found = []
        for xp in (np, strict):
            numbers = {name: xp.asarray(blocks.get(name, blocks["accept"])) for name in policy.drafting.streams}
            tokens, q = policy.drafting.rule(xp, xp.asarray(blocks["logits"]), numbers)
            found.append([np.asarray(tokens).tolist(), np.asarray(q).tolist()])
        assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["token_rejection", "block_verification"])
def test_one_number_is_drawn_for_what_follows(kind: str) -> None:
    """That of the slot where the block ends; the others may be anything (which the enumeration of laws builds on)."""
    blocks = some_blocks(40, 4, 7)
    counts, tokens = verdicts(KINDS[kind], np, blocks)
    others = np.where(np.arange(4) == np.array(counts)[:, None], blocks["recover"], 0.999)
    assert verdicts(KINDS[kind], np, {**blocks, "recover": others}) == [counts, tokens]


def test_a_residual_without_mass_returns_p() -> None:
    """u * q < p fails for equal p and q at u = 1, which rounding to float32 makes; then p is drawn from."""
    logits = np.log(np.array([[[0.5, 0.5, 1e-30]] * 2], dtype=np.float32))
    q = probabilities(np, logits, Sampling(1.0))[:, :1]
    numbers = {"accept": np.ones((1, 2), dtype=np.float32), "recover": np.array([[0.75, 0.1]], dtype=np.float32)}
    verdict = token_rejection(Sampling(1.0)).rule(np, np.array([[0]]), logits, q, numbers)
    assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([0], [1])


@pytest.mark.parametrize("kind", ["token_rejection", "block_verification"])
def test_a_token_of_probability_0_is_not_kept_whatever_q_says(kind: str) -> None:
    logits = np.array([[[0.0, -np.inf, 0.0]] * 2], dtype=np.float32)
    numbers = {"accept": np.zeros((1, 2)), "recover": np.zeros((1, 2))}
    for chance in (0.0, 0.5, 1.0):
        q = np.array([[[1 - chance, chance, 0.0]]], dtype=np.float32)
        verdict = KINDS[kind].rule(np, np.array([[1]]), logits, q, numbers)
        assert verdict.num_accepted.tolist() == [0]
        assert verdict.next_token.tolist() != [1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: match(noise=cast("Any", "white")), "match: got noise 'white', expected 'inverse' or 'gumbel'"),
        (
            lambda: match(drafts=cast("Any", "good")),
            "match: got drafts 'good', expected 'shared', 'independent' or 'argmax'",
        ),
        (lambda: typical(Sampling()), "typical: got temperature 0, where p has no entropy; give a temperature, or use"),
        (lambda: typical(epsilon=1.0), "typical: got epsilon 1.0 and delta 1.0, expected 0 < epsilon < 1, delta > 0"),
        (lambda: relaxed(top_k=0), "relaxed: top_k: got 0, expected an integer of at least 1"),
        (lambda: forced(-1), "forced: got -1, expected an integer of at least 0"),
        (lambda: loose.forced(1.5), "forced: got 1.5, expected an integer"),
        (lambda: loose.relaxed(top_k=1.5), "relaxed: top_k: got 1.5, expected an integer"),
        (lambda: relaxed(delta=math.nan), "relaxed: delta: got nan, expected a finite number from 0 to 1"),
        (lambda: typical(delta=math.inf), "typical: delta: got inf, expected a finite number"),
        (lambda: loose.budget(match(), 1.5), "budget: got 1.5, expected an integer"),
        (lambda: budget(match(), True), "budget: got True, expected an integer"),
        (lambda: loose.budget(match, 2), "budget: got <function mat"),
        (
            lambda: loose.confidence_cut("match", 0.5),
            "confidence_cut: got 'match' of type str, expected a Policy, such as",
        ),
        (lambda: loose.constrained(None), "constrained: got None of type NoneType, expected a Policy, such as"),
        (
            lambda: loose.constrained(match(), 3),
            "constrained: constraint 0: got 3, expected a function (logits, tokens, row) -> logits",
        ),
        (lambda: budget(match(), -1), "budget: got -1, expected an integer of at least 0"),
        (lambda: confidence_cut(match(), 2), "confidence_cut: threshold: got 2, expected a finite number from 0 to 1"),
    ],
)
def test_what_makes_no_sense(make: Any, message: str) -> None:
    with pytest.raises(errors.InputError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_a_policy_is_a_value() -> None:
    policy = Policy("mine", match().rule, lossless=False)
    with pytest.raises(AttributeError):
        policy.name = "yours"  # pyright: ignore[reportAttributeAccessIssue]
