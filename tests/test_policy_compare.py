"""Estimates with intervals, distances from the target's law along a path, and policies side by side."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dflash_fn.bench.estimates import Estimate, difference, quantile, ratio, units
from dflash_fn.bench.path_laws import Seen, divergences, law_is_known, surprises
from dflash_fn.policies import Policy, block_verification, forced, match, relaxed, token_rejection, typical
from dflash_fn.policies.catalogue import WORDS, catalogue
from dflash_fn.policies.named import POLICIES
from dflash_fn.sampling import Sampling
from tests.helpers.laws import branches, law_of, policy_cells, target_law, tv

ONE = Sampling(1.0)


# estimates


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423)]
)
def test_students_quantiles(freedom: int, value: float) -> None:
    assert quantile(freedom) == pytest.approx(value, abs=0.01)


def test_of_equal_denominators_the_jackknife_is_the_standard_error_of_a_mean() -> None:
    values = [3.0, 5.0, 4.0, 8.0, 6.0]
    made = ratio([(4 * value, 4) for value in values])
    assert made is not None
    assert made.value == pytest.approx(5.2)
    assert made.half == pytest.approx(quantile(4) * np.std(values, ddof=1) / math.sqrt(5))


def test_what_both_have_in_common_cancels() -> None:
    first = [(10.0, 5), (30.0, 5), (20.0, 5), (10.0, 5), (30.0, 5)]
    second = [(value + 5, 5) for value, _ in first]
    alone, paired = ratio(second), difference(second, first)
    assert alone is not None
    assert alone.half is not None
    assert alone.half > 2
    assert paired is not None
    assert (paired.value, paired.half) == (1.0, pytest.approx(0.0, abs=1e-12))


def test_too_few_texts_have_no_interval() -> None:
    assert ratio([]) is None
    assert ratio([(0, 0), (0.0, 0)]) is None
    assert ratio([(6, 4)]) == Estimate(1.5, None)
    assert ratio([(6, 4), (9, 4), (5, 4), (7, 4)]) == Estimate(27 / 16, None)
    assert difference([(6, 4)], [(4, 4)]) == Estimate(0.5, None)


def test_texts_of_a_prompt_are_left_out_together() -> None:
    """Five prompts whose seeds agree: the interval is that of five texts, not of twenty."""
    values, prompts = [3.0, 5.0, 4.0, 8.0, 6.0], "abcde"
    made = ratio(
        units([(value, 1) for value in values for _ in range(4)], [name for name in prompts for _ in range(4)])
    )
    alone = ratio([(value, 1) for value in values])
    assert made is not None
    assert alone is not None
    assert (made.value, made.half) == (alone.value, pytest.approx(alone.half))


def test_an_interval_ends_where_a_share_does() -> None:
    assert Estimate(0.25, 0.5, least=0.0, most=1.0).ends == (0.0, 0.75)
    assert Estimate(2.0, 0.5).ends == (1.5, 2.5)
    assert Estimate(2.0, None).ends is None


def test_intervals_hold_what_they_say() -> None:
    """Of 400 samples with a known ratio, 95 % of the intervals hold it; the bound is three standard deviations."""
    draws = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        steps = draws.integers(5, 15, size=12)
        tokens = [(float(draws.binomial(4, 0.3, size=count).sum() + count), int(count)) for count in steps]
        made = ratio(tokens)
        assert made is not None
        assert made.half is not None
        held += abs(made.value - 2.2) <= made.half
    assert held / 400 >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 400)


# laws along a path

P = np.array([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])


def asked(policy: Policy, token: int, u: float = 0.6) -> Seen:
    """Ask a rule about a block of 2 in which `token` was drafted for certain."""
    uniforms = {"target": np.array([[u, u]])} if policy.streams else {}
    verdict = policy.rule(np, np.array([[token]]), np.log(P)[None], None, uniforms)
    return Seen(
        [token], P, int(verdict.num_accepted[0]), int(verdict.next_token[0]), {k: v[0] for k, v in uniforms.items()}
    )


@pytest.mark.parametrize(
    "policy", [typical(ONE), relaxed(ONE, delta=0.3), relaxed(ONE, top_k=2), relaxed(ONE, top_k=1)]
)
@pytest.mark.parametrize("token", range(4))
def test_divergence_is_that_of_the_enumerated_law(policy: Policy, token: int) -> None:
    def table(prefix: tuple[int, ...]) -> np.ndarray:
        return P[len(prefix)]

    made = branches(policy, table, lambda prefix: np.eye(4)[token], vocab=4, size=2, cells=policy_cells(policy, size=2))
    law, target = (
        found.sum(axis=1) for found in (law_of(made, table, vocab=4, size=2), target_law(table, vocab=4, size=2))
    )
    assert law_is_known(policy)
    seen = asked(policy, token)
    assert divergences(policy, seen, len(seen.kept)) == [pytest.approx(tv(law, target), abs=1e-12)]


def test_the_token_after_all_drafted_ones_is_left_out_and_a_cut_counts_what_was_emitted() -> None:
    seen = Seen([0, 1], np.stack([P[0], P[1], P[1]]), 2, 3, {"target": np.array([0.1, 0.1, 0.9])})
    assert divergences(typical(ONE), seen, 3) == [0.5, 0.8]
    assert divergences(typical(ONE), seen, 1) == [0.5]


def test_a_rule_that_is_not_what_it_seems_has_no_divergence() -> None:
    policy = typical(ONE)
    drawn_otherwise = Seen([3], P, 0, 3, {"target": np.array([0.1, 0.1])})
    assert divergences(policy, drawn_otherwise, 1) is None
    assert divergences(policy, Seen([0], P, 1, 3, {"target": np.array([0.1, 0.9])}, steady=False), 2) is None
    assert not any(map(law_is_known, (token_rejection(ONE), block_verification(ONE), match(ONE))))
    assert law_is_known(forced(1))


def test_surprise_has_mean_0_and_the_stated_variance_under_p() -> None:
    found = [surprises(Seen([], P[:1], 0, token), 1)[0][0] for token in range(4)]
    mean = sum(chance * value for chance, (value, _) in zip(P[0], found, strict=True))
    variance = sum(chance * value**2 for chance, (value, _) in zip(P[0], found, strict=True))
    assert mean == pytest.approx(0, abs=1e-15)
    assert {round(told, 12) for _, told in found} == {round(variance, 12)}
    assert surprises(Seen([], np.array([[1.0, 0.0]]), 0, 1), 1) == ([], 1)


def test_the_catalogue_says_what_policies_say() -> None:
    found = {one.name: one for one in catalogue()}
    assert list(found) == list(POLICIES) == list(WORDS)
    assert (found["match"].lossless, found["match"].invariant, found["match"].needs_q) == (True, True, False)
    rejection = found["token_rejection"]
    assert (rejection.lossless, rejection.invariant, rejection.needs_q) == (True, False, True)
    assert not found["typical"].lossless
    assert all(one.rule and one.source for one in found.values())
