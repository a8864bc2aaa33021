"""Constraints along drafted paths, on every port: speculation changes nothing; rejected tokens are never seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors, policies
from dflash_fn.constraints import ban, force, frequency, presence, repetition
from dflash_fn.policies import Constraint, constrained, match
from dflash_fn.port import Port
from dflash_fn.records import Pair
from dflash_fn.sampling import Sampling
from tests.helpers import proposers
from tests.helpers.runs import decode_plainly, run
from tests.helpers.tiny import Checkpoints, DraftDesign

PROMPT = [5, 9, 2, 7]

CONSTRAINTS: dict[str, tuple[Constraint, ...]] = {
    "presence": (presence(2.0, skip=4),),
    "frequency": (frequency(3.0),),
    "repetition": (repetition(1.5),),
    "several": (repetition(1.2), frequency(0.5, skip=4), ban([1, 2, 3])),
    "forced": (force([6, 6, 8], begin=6), ban([5])),
    "own": (lambda logits, tokens, row: np.where(np.arange(len(logits)) % 2 == len(tokens) % 2, logits, -np.inf),),
}


@pytest.fixture
def pair(port: Port, checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(port, DraftDesign())


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=str)
def test_p16_speculation_changes_nothing(pair: Pair, name: str, sampling: Sampling) -> None:
    """P16: text and log probabilities are those of plain decoding under the same constraint."""
    policy = constrained(match(sampling), *CONSTRAINTS[name])
    state = dflash_fn.prefill(pair, PROMPT, seed=7, width=8)
    plain = decode_plainly(state, pair, 14, policy=policy, logprobs=True)
    unconstrained = decode_plainly(state, pair, 14, policy=match(sampling))
    assert plain.emitted != unconstrained.emitted
    text = [*PROMPT, *plain.emitted[0]]
    for proposer in (None, proposers.right([text]), proposers.wrong([text]), proposers.corrupted([text], 1, 0.3)):
        found = run(state, pair, max_new_tokens=14, policy=policy, block_size=4, proposer=proposer, logprobs=True)
        assert found.emitted == plain.emitted
        assert flat(found) == flat(plain)


class DeadError(Exception):
    """What a constraint raises that knows the text to be over."""


def _bans_all(logits: np.ndarray) -> np.ndarray:
    return np.full_like(logits, -np.inf)


def _raises(logits: np.ndarray) -> np.ndarray:
    raise DeadError("asked after the end")


AFTER = {"bans all": _bans_all, "raises": _raises, "wrong shape": lambda logits: logits[:3]}
"""What a constraint may do once the text is over, where plain decoding never asks it."""


@pytest.mark.parametrize(("kind", "size"), list(zip(AFTER, (4, 8, 2), strict=True)))
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=str)
def test_p16_slots_behind_a_stop_token_or_a_budget_do_not_matter(
    pair: Pair, kind: str, size: int, sampling: Sampling
) -> None:
    """P16: a constraint may fail behind what is emitted, where the end is at any offset of a block."""
    state = dflash_fn.prefill(pair, PROMPT, seed=7, width=8)
    text = decode_plainly(state, pair, 10, policy=match(sampling)).emitted[0]
    proposer = proposers.right([[*PROMPT, *text]])
    for end in (1, 2, 4, 5, 8):
        for stop_ids in ((), (text[end - 1],)):
            last = text.index(text[end - 1]) + 1 if stop_ids else end

            def constraint(
                logits: np.ndarray, tokens: tuple[int, ...], row: int, last: int = last + len(PROMPT)
            ) -> np.ndarray:
                return AFTER[kind](logits) if len(tokens) >= last else logits

            policy, budget = constrained(match(sampling), constraint), 10 if stop_ids else end
            options: dict[str, Any] = {"policy": policy, "stop_token_ids": stop_ids, "logprobs": True}
            plain = run(state, pair, max_new_tokens=budget, block_size=1, **options)
            found = run(state, pair, max_new_tokens=budget, block_size=size, proposer=proposer, **options)
            assert found.emitted == plain.emitted == (text[:last],)
            assert found.last.stop == plain.last.stop
            assert flat(found) == flat(plain)


@pytest.mark.parametrize("size", [1, 4])
def test_what_a_constraint_raises_is_raised_where_it_matters(pair: Pair, size: int) -> None:
    """The error is the constraint's own, with a note of the place, at the position where plain decoding has it."""
    state = dflash_fn.prefill(pair, PROMPT, width=8)
    text = decode_plainly(state, pair, 10).emitted[0]

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        return _raises(logits) if len(tokens) >= len(PROMPT) + 3 else logits

    options: dict[str, Any] = {"block_size": size, "proposer": proposers.right([[*PROMPT, *text]])}
    policy = constrained(match(), constraint)
    assert run(state, pair, max_new_tokens=3, policy=policy, **options).emitted == (text[:3],)
    with pytest.raises(DeadError, match="asked after the end") as caught:
        run(state, pair, max_new_tokens=4, policy=policy, **options)
    assert caught.value.__notes__ == ["row 0, position 7: raised by the policy's constraint"]


def test_rows_that_have_stopped_are_not_asked_about(pair: Pair) -> None:
    state = dflash_fn.prefill(pair, [PROMPT, [9, 8, 7]], width=4)
    first = decode_plainly(state, pair, 6).emitted
    asked: list[tuple[int, int]] = []

    def constraint(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        asked.append((row, len(tokens)))
        return logits

    stop = first[0][0]
    found = run(state, pair, max_new_tokens=6, policy=constrained(match(), constraint), stop_token_ids=(stop,))
    assert found.emitted[0] == (stop,)
    assert [place for place in asked if place[0] == 0] == [(0, len(PROMPT))]


def flat(found: Any) -> list[Any]:
    return [number for info in found.infos for number in info.logprobs[0]]


def test_rejected_drafts_are_never_seen(pair: Pair) -> None:
    """The same token four times in a row: the penalty of slot i counts it i times, and 0 times after a rejection."""
    seen: list[tuple[int, ...]] = []

    def watching(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        seen.append(tokens)
        return presence(1.0, skip=4)(logits, tokens, row)

    def same(state: Any, pair: Pair, size: int) -> Any:
        return pair.port.asarray(np.full((1, size - 1), 11, dtype=np.int64), pair.target.device)

    policy = constrained(match(), watching)
    state = dflash_fn.prefill(pair, PROMPT, width=5)
    found = run(state, pair, max_new_tokens=6, policy=policy, block_size=5, proposer=same)
    assert found.emitted == decode_plainly(state, pair, 6, policy=constrained(match(), presence(1.0, skip=4))).emitted
    assert seen[0] == tuple(PROMPT)
    after = seen[1:6]
    assert after == [(*PROMPT, found.emitted[0][0], *[11] * slot) for slot in range(5)]
    assert all(len(tokens) <= len(PROMPT) + 6 + 4 for tokens in seen)


def test_a_token_that_is_banned_is_not_kept_by_lossy_rules_either(pair: Pair) -> None:
    state = dflash_fn.prefill(pair, PROMPT, width=4)
    for policy in (policies.typical(Sampling(1.0)), policies.relaxed(delta=1.0, top_k=48), policies.token_rejection()):
        found = run(state, pair, max_new_tokens=12, policy=constrained(policy, ban(range(24))), block_size=4)
        assert min(found.emitted[0]) >= 24


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda logits: logits[:-1], r"returned logits of shape \(47,\), expected \(48,\)"),
        (lambda logits: logits * np.nan, "returned NaN or infinity; expected numbers, and -infinity for what it bans"),
        (lambda logits: logits + np.inf, "returned NaN or infinity"),
        (lambda logits: np.full_like(logits, -np.inf), "leaves no token to emit; it must allow at least one"),
    ],
)
def test_a_constraint_that_cannot_be_used(pair: Pair, wrong: Any, message: str) -> None:
    state = dflash_fn.prefill(pair, PROMPT, width=4)
    policy = constrained(match(), lambda logits, tokens, row: wrong(logits) if len(tokens) == 6 else logits)
    with pytest.raises(errors.InputError, match=f"row 0, position 6: the constraint {message}"):
        dflash_fn.decode(state, pair, policy=policy, max_new_tokens=8, stop_token_ids=())


def test_a_problem_on_a_path_that_is_not_taken_is_none(pair: Pair) -> None:
    state = dflash_fn.prefill(pair, PROMPT, width=4)
    plain = decode_plainly(state, pair, 8)
    text = [*PROMPT, *plain.emitted[0]]

    def off_the_path(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        return logits if list(tokens) == text[: len(tokens)] else np.full_like(logits, -np.inf)

    for proposer in (proposers.wrong([text]), proposers.corrupted([text], 0, 0.5)):
        policy = constrained(match(), off_the_path)
        assert (
            run(state, pair, max_new_tokens=8, policy=policy, block_size=4, proposer=proposer).emitted == plain.emitted
        )


def test_the_logits_that_a_constraint_gets_are_not_its_to_change(pair: Pair) -> None:
    def rude(logits: np.ndarray, tokens: tuple[int, ...], row: int) -> np.ndarray:
        logits[0] = 0.0
        return logits

    with pytest.raises(ValueError, match="read-only"):
        dflash_fn.decode(dflash_fn.prefill(pair, PROMPT, width=4), pair, policy=constrained(match(), rude))


# --- log probabilities ---


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_p=0.8), Sampling(2.0, top_k=3)], ids=str)
def test_p17_log_probabilities_of_emitted_tokens(pair: Pair, sampling: Sampling) -> None:
    """P17: those of the model and of what is drawn from, in any block; checked against float64."""
    state, policy = dflash_fn.prefill(pair, PROMPT, width=8), match(sampling)
    plain = decode_plainly(state, pair, 10, policy=policy, logprobs=True)
    found = run(state, pair, max_new_tokens=10, policy=policy, block_size=4, logprobs=True)
    assert flat(found) == flat(plain)
    from dflash_fn.sampling import probabilities

    for token, logits, number in zip(plain.emitted[0], plain.logits[0].astype(np.float64), flat(plain), strict=True):
        assert number.model == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-5)
        law = probabilities(np, logits[None, None], sampling)[0, 0]
        assert number.sampled == pytest.approx(np.log(law[token]), abs=1e-5)


def test_log_probabilities_are_not_there_unless_asked_for(pair: Pair) -> None:
    state = dflash_fn.prefill(pair, PROMPT, width=4)
    assert all(info.logprobs is None for info in run(state, pair, max_new_tokens=3).infos)
