"""P13 and P14: the output laws of policies, by exact enumeration over small vocabularies and blocks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_fn.draws import draw
from dflash_fn.expected import expected_accepted
from dflash_fn.policies import (
    Policy,
    block_verification,
    budget,
    confidence_cut,
    forced,
    match,
    relaxed,
    token_rejection,
    typical,
)
from dflash_fn.records import Verdict
from dflash_fn.sampling import Sampling
from tests.helpers.laws import (
    Branch,
    Table,
    branches,
    cells,
    law_of,
    mean_accepted,
    policy_cells,
    sums,
    target_law,
    tv,
    verdict,
)

ONE = Sampling(1.0)
EXACT = 1e-12
"""What sums of some thousands of float64 products may be off by."""

LOSSLESS = {
    "match": match(ONE, noise="inverse"),
    "token_rejection": token_rejection(ONE),
    "block_verification": block_verification(ONE),
    "budget": budget(block_verification(ONE), 1),
    "cut match": confidence_cut(match(ONE, noise="inverse"), 0.5),
    "cut block_verification": confidence_cut(block_verification(ONE), 0.5),
    "cut token_rejection": confidence_cut(token_rejection(ONE), 0.5),
}


class Tables:
    """A distribution a prefix, made from weights that hypothesis draws; deterministic in the prefix."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = [np.array(row, dtype=np.float64) / sum(row) for row in rows]

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray:
        return self.rows[sum((token + 1) * 7**place for place, token in enumerate(prefix)) % len(self.rows)]


@st.composite
def distributions(draw: st.DrawFn, vocab: int) -> list[int]:
    """Integer weights: ordinary ones, with zeros, one-hot, on one side only."""
    kind = draw(st.sampled_from(["any", "any", "zeros", "one-hot", "left", "right", "flat"]))
    if kind == "one-hot":
        hot = draw(st.integers(0, vocab - 1))
        return [int(token == hot) for token in range(vocab)]
    if kind == "flat":
        return [1] * vocab
    least = 1 if kind == "any" else 0
    row = draw(st.lists(st.integers(least, 9), min_size=vocab, max_size=vocab))
    half = vocab // 2
    row = {"left": row[:half] + [0] * (vocab - half), "right": [0] * half + row[half:]}.get(kind, row)
    if not sum(row):
        row[0 if kind == "left" else -1] = 1
    return row


SIZES = tuple((vocab, size) for vocab in range(2, 6) for size in range(1, 5 if vocab < 4 else 4))
"""V and B whose outcomes are enumerated in moments."""

LARGE = ((4, 4), (5, 4), (2, 5), (3, 5), (4, 5))
"""Those that take seconds: up to four drafted tokens."""


@st.composite
def models(draw: st.DrawFn, *, sizes: tuple[tuple[int, int], ...] = SIZES) -> tuple[int, int, Tables, Tables]:
    """V, B, target and draft; now and then the draft is the target."""
    vocab, size = draw(st.sampled_from(sizes))
    p, q = (Tables(draw(st.lists(distributions(vocab), min_size=1, max_size=5))) for _ in range(2))
    return vocab, size, p, p if draw(st.integers(0, 5)) == 0 else q


def enumerated(policy: Policy, model: tuple[int, int, Table, Table], **options: Any) -> list[Branch]:
    vocab, size, p, q = model
    inside = policy_cells(policy, size=size)
    return branches(policy, p, q, vocab=vocab, size=size, cells=inside, **options)


def error_of(policy: Policy, model: tuple[int, int, Table, Table], **options: Any) -> float:
    vocab, size, p, _ = model
    made = enumerated(policy, model, **options)
    assert sum(branch.weight for branch in made) == pytest.approx(1, abs=EXACT)
    return float(np.abs(law_of(made, p, vocab=vocab, size=size) - target_law(p, vocab=vocab, size=size)).max())


@pytest.mark.parametrize("name", LOSSLESS)
@given(model=models())
def test_p13_a_lossless_policy_has_the_targets_law(name: str, model: tuple[int, int, Tables, Tables]) -> None:
    """P13: the law of the text is the target's."""
    assert error_of(LOSSLESS[name], model) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token_rejection", "block_verification"])
@settings(max_examples=5)
@given(model=models(sizes=LARGE))
def test_p13_of_longer_blocks(name: str, model: tuple[int, int, Tables, Tables]) -> None:
    """P13: with up to four drafted tokens, for the rules that look ahead or carry a ratio along."""
    assert error_of(LOSSLESS[name], model) <= EXACT


@pytest.mark.parametrize("name", ["token_rejection", "block_verification"])
@given(model=models())
def test_p13_a_proposers_tokens_may_count_as_certain(name: str, model: tuple[int, int, Tables, Tables]) -> None:
    """P13: told a q that is 1 at what a function of the state proposed, the law is the target's, whatever that is."""
    assert error_of(LOSSLESS[name], model, certain=True) <= EXACT


@given(model=models())
def test_p14_block_verification_never_accepts_less(model: tuple[int, int, Tables, Tables]) -> None:
    """P14: mean num_accepted of block verification is at least token rejection's."""
    tokens, blocks = (
        mean_accepted(enumerated(LOSSLESS[name], model)) for name in ("token_rejection", "block_verification")
    )
    assert blocks >= tokens - EXACT


@given(model=models())
def test_p13_no_rule_emits_what_the_target_never_would(model: tuple[int, int, Tables, Tables]) -> None:
    """P13: a token of probability 0 is not emitted by a lossless rule, not even at the ends of the uniforms' range."""
    vocab, size, p, q = model
    for policy in LOSSLESS.values():
        for end in (0.0, 1 - 2.0**-53):

            def at_end(
                drafted: np.ndarray, target: np.ndarray, draft: np.ndarray, policy: Policy = policy, end: float = end
            ) -> Any:
                return [(1.0, {name: np.full(size, end) for name in (*policy.streams, "target")})]

            for branch in branches(policy, p, q, vocab=vocab, size=size, cells=at_end):
                chances = [p(branch.emitted[:slot])[token] for slot, token in enumerate(branch.emitted)]
                assert all(chance > 0 for chance in chances), policy.name


# --- stated examples ---


def fixed(*weights: float) -> Table:
    row = np.array(weights) / sum(weights)
    return lambda prefix: row


P, Q = fixed(5, 3, 2), fixed(6, 2, 2)


@pytest.mark.parametrize(
    ("p", "q", "size", "tokens", "blocks"),
    [
        # two tokens, p = (1/3, 2/3), q = (2/3, 1/3): the example of the block verification paper, section 2
        (fixed(1, 2), fixed(2, 1), 3, 10 / 9, 11 / 9),
        (P, Q, 3, 0.9 + 0.81, 0.9 + 0.83),
    ],
)
def test_p14_block_verification_accepts_more_on_stated_examples(
    p: Table, q: Table, size: int, tokens: float, blocks: float
) -> None:
    """P14: strictly more where the rules' means differ."""
    model = (len(p(())), size, p, q)
    assert mean_accepted(enumerated(token_rejection(ONE), model)) == pytest.approx(tokens, abs=EXACT)
    assert mean_accepted(enumerated(block_verification(ONE), model)) == pytest.approx(blocks, abs=EXACT)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("match_independent", LOSSLESS["match"]),
        ("token_rejection", LOSSLESS["token_rejection"]),
        ("block_verification", LOSSLESS["block_verification"]),
    ],
)
@given(model=models())
def test_p15_expected_acceptance_is_the_mean_over_all_outcomes(
    name: str, policy: Policy, model: tuple[int, int, Tables, Tables]
) -> None:
    """P15: on every drafted path, and so on their average."""
    vocab, size, p, q = model
    expected = 0.0
    for drafted in itertools.product(range(vocab), repeat=size - 1):
        target, draft = (
            np.array([table(drafted[:slot]) for slot in range(size - 1)]).reshape(-1, vocab) for table in (p, q)
        )
        weight = np.prod([row[token] for row, token in zip(draft, drafted, strict=True)])
        if weight > 0:
            expected += weight * expected_accepted(name, np.array(drafted, dtype=np.int64), target, draft)
    assert mean_accepted(enumerated(policy, model)) == pytest.approx(expected, abs=EXACT)


@given(model=models())
def test_p15_expected_acceptance_of_a_shared_uniform(model: tuple[int, int, Tables, Tables]) -> None:
    """P15: both tokens of the first slot drawn from one u, over all the intervals that u can fall in."""
    _, _, p, q = model
    kept = dict.fromkeys(range(len(p(()))), 0.0)
    edges = sorted({0.0, 1.0, *np.cumsum(p(()))[:-1].tolist(), *np.cumsum(q(()))[:-1].tolist()})
    for low, high in itertools.pairwise(edges):
        ours, theirs = (int(draw(np, row(()), np.array((low + high) / 2))) for row in (p, q))
        kept[theirs] += (high - low) * (ours == theirs)
    for token, mass in kept.items():
        if q(())[token] > 0:
            found = expected_accepted("match_inverse", np.array([token]), p(())[None], q(())[None])
            assert found * q(())[token] == pytest.approx(mass, abs=EXACT)


@given(model=models())
def test_p15_couplings_are_in_order(model: tuple[int, int, Tables, Tables]) -> None:
    """P15: over all drafts of one token, shared noise keeps its bound, and no coupling beats token rejection."""
    _, _, p, q = model
    rows = p(())[None], q(())[None]
    distance = tv(*rows)

    def mean(name: str) -> float:
        drawn = [token for token in range(rows[1].shape[1]) if rows[1][0, token] > 0]
        return sum(rows[1][0, token] * expected_accepted(name, np.array([token]), *rows) for token in drawn)

    assert mean("token_rejection") == pytest.approx(1 - distance, abs=EXACT)
    assert mean("token_rejection") >= mean("match_gumbel") - EXACT
    assert mean("match_gumbel") >= (1 - distance) / (1 + distance) - EXACT
    assert mean("token_rejection") >= mean("match_inverse") - EXACT


# --- rules that are wrong, as public code has them (FAULTS.md) ---

Sums = list[float]


def wrong(keep: Any, then: Any, *, drafts: Table = Q) -> tuple[Policy, Table]:
    """A rule over one drafted token: `keep(x, y, u)` and `then(x, y)`, the law drawn from where it is not kept."""

    def rule(xp: Any, drafted: Any, logits: Any, q: Any, uniforms: Any) -> Verdict:
        counts, tokens = [], []
        for row, (x,) in enumerate(drafted.tolist()):
            y = int(draw(np, P(()), uniforms["target"][row, 0]))
            kept = keep(x, y, uniforms["accept"][row, 0])
            law = P(()) if kept else then(x, y)
            counts.append(int(kept))
            tokens.append(int(draw(np, law, uniforms["recover"][row, 0])))
        return verdict(np.array(counts), np.array(tokens))

    return Policy("wrong", rule, lossless=True, needs_q=True, streams=("target", "accept", "recover")), drafts


RESIDUAL = np.maximum(P(()) - Q(()), 0)
RATIO = P(()) / Q(())
SOFTMAX = np.exp(RESIDUAL) / np.exp(RESIDUAL).sum()

WRONG = {
    "redraw on mismatch": (wrong(lambda x, y, u: x == y, lambda x, y: P(())), 0.10),
    "residual on mismatch": (wrong(lambda x, y, u: x == y, lambda x, y: RESIDUAL), 0.36),
    "argmax draft, soft q": (wrong(lambda x, y, u: u < RATIO[x], lambda x, y: RESIDUAL, drafts=fixed(1, 0, 0)), 1 / 3),
    "residual through softmax": (wrong(lambda x, y, u: u < RATIO[x], lambda x, y: SOFTMAX), 0.0644),
    "dropped when the drawn token is unlikely": (
        wrong(lambda x, y, u: Q(())[x] >= 0.3 and u < RATIO[x], lambda x, y: RESIDUAL if Q(())[x] >= 0.3 else P(())),
        0.20,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name: str) -> None:
    (policy, drafts), distance = WRONG[name]
    points = {
        "target": [sums(P(()))],
        "accept": [RATIO.tolist()],
        "recover": [[*sums(P(())), *sums(RESIDUAL), *sums(SOFTMAX)]],
    }
    made = branches(policy, P, drafts, vocab=3, size=2, cells=lambda drafted, p, q: cells(points, 2))
    law = law_of(made, P, vocab=3, size=2)
    assert law.sum() == pytest.approx(1, abs=EXACT)
    assert tv(law, target_law(P, vocab=3, size=2)) == pytest.approx(distance, abs=5e-5)


@pytest.mark.parametrize("name", LOSSLESS)
@given(model=models())
def test_no_comparison_turns_inside_a_cell(name: str, model: tuple[int, int, Tables, Tables]) -> None:
    """What the enumeration rests on: a rule says the same at both ends of a cell as in its middle."""
    vocab, size, p, q = model
    policy, eps = LOSSLESS[name], 1e-9
    inside = policy_cells(policy, size=size)

    def at(side: float) -> Any:
        def moved(drafted: np.ndarray, target: np.ndarray, draft: np.ndarray) -> Any:
            return [(weight, numbers) for weight, numbers in inside(drafted, target, draft, side) if weight > 0]

        return branches(policy, p, q, vocab=vocab, size=size, cells=moved)

    middle = at(0.5)
    for side in (eps, 1 - eps):
        for one, other in zip(middle, at(side), strict=True):
            assert one.weight < 1e-9 or (one.emitted, one.num_accepted) == (other.emitted, other.num_accepted)


LOSSY = {"typical": typical(ONE), "relaxed": relaxed(ONE, delta=0.25), "forced": forced(1)}


@pytest.mark.parametrize(
    ("name", "first", "off"),
    [
        # every token passes the bar of 0.09, so the first one has the draft's law
        ("typical", [0.6, 0.2, 0.2], 0.1),
        # 0.2 is below 0.5 - 0.25: token 2 is replaced by a draw from p
        ("relaxed", [0.7, 0.26, 0.04], 0.2),
        # and after the draft's token comes the target's argmax
        ("forced", [0.6, 0.2, 0.2], 0.5),
    ],
)
def test_a_lossy_policy_has_another_law(name: str, first: list[float], off: float) -> None:
    """As its docstring says, and by how much; drafts are drawn from q here."""
    made = enumerated(LOSSY[name], (3, 2, P, Q))
    law = law_of(made, P, vocab=3, size=2)
    assert law.sum(axis=1) == pytest.approx(first, abs=EXACT)
    assert tv(law, target_law(P, vocab=3, size=2)) == pytest.approx(off, abs=EXACT)
    assert not LOSSY[name].lossless


@pytest.mark.parametrize("name", ["typical", "relaxed", "forced"])
def test_a_lossy_policy_follows_a_certain_draft(name: str) -> None:
    """With the draft's argmax, which these take, the first token is always the draft's."""
    made = enumerated(LOSSY[name], (3, 2, P, fixed(1, 0, 0)))
    assert law_of(made, P, vocab=3, size=2).sum(axis=1) == pytest.approx([1, 0, 0], abs=EXACT)
