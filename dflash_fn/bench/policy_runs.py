"""Several policies on the same prompts and seeds: what each text came to, and what the policies came to over all."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dflash_fn.bench.estimates import NORMAL, Estimate, difference, ratio, units
from dflash_fn.bench.path_laws import Seen, divergences, law_is_known, surprises
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.policies import Policy
from dflash_fn.records import Array, Pair, StepInfo, Verdict
from dflash_fn.sampling import probabilities

__all__ = ["Contender", "Result", "Text", "results_of", "run_text"]


@dataclass(slots=True)
class Text:
    """What a policy made of one prompt and seed.

    A block that the budget or a stop token cut says nothing of how much a rule keeps, and counts in the laws alone.

    Attributes:
        tokens: emitted in whole blocks.
        steps: whole blocks.
        kept: `kept[i]` of them kept their first i + 1 drafted tokens.
        had: `had[i]` of them had so many.
        divergence: sum and number of what `path_laws.divergences` said; None where it could not.
        surprise: sum, variance and number of `path_laws.surprises`.
        impossible: emitted tokens of p = 0.
        seconds: of the whole blocks' share of the time, without that of looking.
        prompt: its tokens.
    """

    tokens: int = 0
    steps: int = 0
    kept: list[int] = field(default_factory=list)
    had: list[int] = field(default_factory=list)
    divergence: tuple[float, int] | None = (0.0, 0)
    surprise: tuple[float, float, int] = (0.0, 0.0, 0)
    impossible: int = 0
    seconds: float = 0.0
    prompt: tuple[int, ...] = ()


@dataclass(slots=True)
class Contender:
    """A policy that is compared, and its texts so far, in the order of prompts and seeds.

    Attributes:
        name: as it was asked for.
        policy: itself.
        texts: one a prompt and seed.
    """

    name: str
    policy: Policy
    texts: list[Text] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """What a policy came to; None is what cannot be known.

    Attributes:
        contender: whose.
        tau: mean tokens emitted a step.
        tau_gain: that less the first contender's; None for itself.
        by_slot: share of blocks that kept their first 1, 2 ... drafted tokens.
        divergence: mean total variation from the target's law.
        divergence_known: why: `proven`, `exact` along the path, or `unknown`.
        surprise: mean of -log p(x) - H(p) in nats; 0 where the law is the target's.
        impossible: emitted tokens that the target would never emit.
        seconds: of a step.
    """

    contender: Contender
    tau: Estimate | None
    tau_gain: Estimate | None
    by_slot: tuple[Estimate | None, ...]
    divergence: Estimate | None
    divergence_known: str
    surprise: Estimate | None
    impossible: int
    seconds: Estimate | None


@dataclass(slots=True)
class _Looking:
    """A policy that notes what it sees, and how long that took."""

    policy: Policy
    pair: Pair
    seen: Seen | None = None
    seconds: float = 0.0

    def watched(self) -> Policy:
        """Return a policy that says the same."""

        def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
            verdict = self.policy.rule(xp, drafted, logits, q, uniforms)
            fetched = [self.pair.port.to_numpy(one) for one in (verdict.num_accepted, verdict.next_token)]
            begun = time.perf_counter()
            self.seen = self._look(xp, drafted, logits, q, uniforms, (int(fetched[0][0]), int(fetched[1][0])))
            self.seconds += time.perf_counter() - begun
            return verdict

        return replace(self.policy, rule=rule)

    def _look(
        self,
        xp: Any,
        drafted: Array,
        logits: Array,
        q: Array | None,
        uniforms: Mapping[str, Array],
        said: tuple[int, int],
    ) -> Seen:
        port, steady = self.pair.port, None
        if not self.policy.lossless and law_is_known(self.policy):
            others = {name: xp.astype(values, values.dtype) * 0.5 for name, values in uniforms.items()}
            again = self.policy.rule(xp, drafted, logits, q, others)
            steady = int(port.to_numpy(again.num_accepted)[0]) == said[0]
        p = port.to_numpy(probabilities(xp, logits, self.policy.sampling))[0].astype(np.float64)
        numbers = {name: port.to_numpy(values)[0] for name, values in uniforms.items()}
        return Seen(port.to_numpy(drafted)[0].tolist(), p, *said, numbers, steady)


def run_text(
    contender: Contender, pair: Pair, ids: Sequence[int], *, seed: int, width: int | None, **options: Any
) -> Text:
    """Decode a prompt, and add what came of it to the contender's texts.

    Args:
        contender: who decides.
        pair: target, draft and port.
        ids: the prompt.
        seed: its seed.
        width: W; None takes the pair's.
        options: those of `rounds`.
    """
    looking, text = _Looking(contender.policy, pair), Text(prompt=tuple(ids))
    state, begun, total = prefill(pair, ids, seed=seed, width=width), time.perf_counter(), 0
    for _, info in rounds(state, pair, policy=looking.watched(), **options):
        if looking.seen is not None:
            _count(text, contender.policy, looking.seen, info)
        total += 1
    spent = time.perf_counter() - begun - looking.seconds
    text.seconds = spent * text.steps / total if total else 0.0
    contender.texts.append(text)
    return text


def _count(text: Text, policy: Policy, seen: Seen, info: StepInfo) -> None:
    count = len(info.emitted[0])
    found, impossible = surprises(seen, count)
    total, variance, number = text.surprise
    text.surprise = (total + sum(one for one, _ in found), variance + sum(one for _, one in found), number + len(found))
    text.impossible += impossible
    if not seen.drafted:
        return
    far = divergences(policy, seen, count) if law_is_known(policy) else None
    if text.divergence is not None:
        sums = text.divergence
        text.divergence = None if far is None else (sums[0] + sum(far), sums[1] + len(far))
    if count == len(seen.kept):
        text.tokens, text.steps = text.tokens + count, text.steps + 1
        for counts, most in ((text.kept, seen.num_accepted), (text.had, len(seen.drafted))):
            counts.extend([0] * (len(seen.drafted) - len(counts)))
            for slot in range(most):
                counts[slot] += 1


def results_of(contenders: Sequence[Contender]) -> list[Result]:
    """Return what each came to, the first being what the others' tau is compared with."""
    return [_result(one, None if index == 0 else contenders[0]) for index, one in enumerate(contenders)]


def _result(one: Contender, first: Contender | None) -> Result:
    texts = one.texts
    divergence, known = _divergence(one)
    return Result(
        contender=one,
        tau=ratio(_tau(texts)),
        tau_gain=difference(_tau(texts), _tau(first.texts)) if first else None,
        by_slot=tuple(
            _share([text for text in texts if slot < len(text.had)], slot)
            for slot in range(max((len(text.had) for text in texts), default=0))
        ),
        divergence=divergence,
        divergence_known=known,
        surprise=_surprise(texts),
        impossible=sum(text.impossible for text in texts),
        seconds=ratio(_units([(text.seconds, text.steps) for text in texts], texts)),
    )


def _units(pairs: Sequence[tuple[float, float]], texts: Sequence[Text]) -> list[tuple[float, float]]:
    return units(pairs, [text.prompt for text in texts])


def _tau(texts: Sequence[Text]) -> list[tuple[float, float]]:
    return _units([(text.tokens, text.steps) for text in texts], texts)


def _share(texts: Sequence[Text], slot: int) -> Estimate | None:
    made = ratio(_units([(text.kept[slot], text.had[slot]) for text in texts], texts))
    return None if made is None else replace(made, least=0.0, most=1.0)


def _surprise(texts: Sequence[Text]) -> Estimate | None:
    total, variance, count = (sum(text.surprise[part] for text in texts) for part in range(3))
    return Estimate(total / count, NORMAL * math.sqrt(max(variance, 0.0)) / count) if count else None


def _divergence(one: Contender) -> tuple[Estimate | None, str]:
    if one.policy.lossless:
        return Estimate(0.0, None), "proven" if ":" not in one.name else "as it says"
    sums = [text.divergence for text in one.texts]
    known = [pair for pair in sums if pair is not None]
    if not law_is_known(one.policy) or len(known) < len(sums):
        return None, "unknown"
    made = ratio(_units(known, one.texts))
    return None if made is None else replace(made, least=0.0, most=1.0), "exact"
