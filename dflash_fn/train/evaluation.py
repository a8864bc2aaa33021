"""What a pair is worth: tau with the splits that keep it honest, bits a byte, exactness, and speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash_fn.loop import decode, rounds
from dflash_fn.opening import prefill
from dflash_fn.proposers import ngram
from dflash_fn.records import Pair, Proposer
from dflash_fn.train.options import EvalOptions
from dflash_fn.train.texts import distinct_share

__all__ = ["Answered", "baseline", "bits_per_byte", "evaluate", "exactness", "samples", "speed", "summary"]

SPLITS = (0.2, 0.5)
"""Shares of distinct 4-grams between which answers are told apart as loops, repetitive, and other."""

TIMED = 8
"""Prompts that speed is measured on."""

SHOWN = 3
"""Answers of each set that are kept as text."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One greedy answer.

    Attributes:
        name: of the prompt.
        emitted: tokens of each step, the opening step left out, as it drafts nothing.
        first: how many of these steps began before `EvalOptions.first` tokens were there.
        distinct: share of distinct 4-grams in the answer.
        tokens: the answer.
    """

    name: str
    emitted: tuple[int, ...]
    first: int
    distinct: float
    tokens: tuple[int, ...]


def evaluate(
    pair: Pair,
    prompts: Iterable[tuple[str, Sequence[int]]],
    options: EvalOptions,
    *,
    proposer: Proposer | None = None,
    advance: Callable[[], None] | None = None,
) -> list[Answered]:
    """Answer prompts greedily, one after the other.

    Args:
        pair: target and draft.
        prompts: (name, token ids) of each.
        options: block size and budget.
        proposer: to ask in place of the draft.
        advance: is called after each.
    """
    made = []
    for name, ids in prompts:
        made.append(_answered(pair, name, ids, options, proposer))
        if advance:
            advance()
    return made


def _answered(pair: Pair, name: str, ids: Sequence[int], options: EvalOptions, proposer: Proposer | None) -> Answered:
    state = prefill(pair, ids, width=options.block_size)
    steps = rounds(state, pair, max_new_tokens=options.max_new_tokens, block_size=options.block_size, proposer=proposer)
    infos = [info for _, info in steps]
    answer = tuple(token for info in infos for token in info.emitted[0])
    emitted = [(info.num_accepted[0] or 0) + 1 for info in infos if info.step > 0]
    before = np.cumsum([1, *(len(info.emitted[0]) for info in infos if info.step > 0)])[:-1]
    return Answered(name, tuple(emitted), int((before < options.first).sum()), distinct_share(answer), answer)


def summary(answers: Sequence[Answered]) -> dict[str, Any]:
    """Return tau over all steps, over the first tokens, and by how repetitive the answers are; None where no step is.

    `distinct` is the mean share of distinct 4-grams in an answer, which loops lower.

    Example:
        >>> one = Answered("a", (4, 2), 1, 0.9, ())
        >>> found = summary([one])
        >>> found["tau"], found["tau_first"], found["by_distinct"]["above 0.5"]["tau"]
        (3.0, 4.0, 3.0)
    """
    low, high = SPLITS
    groups = {
        f"below {low}": [one for one in answers if one.distinct < low],
        f"{low} to {high}": [one for one in answers if low <= one.distinct <= high],
        f"above {high}": [one for one in answers if one.distinct > high],
    }
    return {
        "prompts": len(answers),
        "steps": sum(len(one.emitted) for one in answers),
        "tau": _mean([n for one in answers for n in one.emitted]),
        "tau_first": _mean([n for one in answers for n in one.emitted[: one.first]]),
        "distinct": _mean([one.distinct for one in answers]),
        "first_slot": _mean([float(n > 1) for one in answers for n in one.emitted]),
        "by_distinct": {
            name: {"prompts": len(group), "tau": _mean([n for one in group for n in one.emitted])}
            for name, group in groups.items()
        },
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(float(np.mean(values)), 4) if values else None


def baseline(pair: Pair, prompts: Sequence[tuple[str, Sequence[int]]], options: EvalOptions) -> dict[str, Any]:
    """Return the summary of guessing by n-grams of the text so far, which costs nothing: what a draft has to beat."""
    return summary(evaluate(replace(pair, draft=None), prompts, options, proposer=ngram()))


def exactness(pair: Pair, prompts: Sequence[tuple[str, Sequence[int]]], answers: Sequence[Answered]) -> bool:
    """Whether decoding without the draft, at the same width, gives the very same answers."""
    same = []
    for (_, ids), one in zip(prompts, answers, strict=False):
        state = prefill(pair, ids)
        plain = decode(state, pair, max_new_tokens=len(one.tokens), block_size=1)
        same.append(plain.tokens[0][len(ids) :] == one.tokens)
    return all(same)


def speed(pair: Pair, prompts: Sequence[tuple[str, Sequence[int]]], options: EvalOptions) -> dict[str, float]:
    """Return tokens a second with the draft, and of plain decoding at width 1, taken in turns in one run."""
    spent, made = {"draft": 0.0, "plain": 0.0}, {"draft": 0, "plain": 0}
    for _, ids in prompts[:TIMED]:
        for way, size in (("draft", options.block_size), ("plain", 1)):
            state = prefill(pair, ids, width=size)
            began = time.perf_counter()
            after = decode(state, pair, max_new_tokens=options.max_new_tokens, block_size=size)
            spent[way] += time.perf_counter() - began
            made[way] += len(after.tokens[0]) - len(ids)
    rates = {way: made[way] / spent[way] for way in spent if spent[way]}
    return {f"{way}_tokens_per_second": round(rate, 1) for way, rate in rates.items()} | (
        {"times": round(rates["draft"] / rates["plain"], 3)} if len(rates) == 2 else {}
    )


def samples(pair: Pair, prompts: Sequence[tuple[str, Sequence[int]]], answers: Sequence[Answered]) -> list[Any]:
    """Return the text of the first `SHOWN` prompts and answers, for people to look at."""
    return [
        {"name": name, "prompt": pair.tokenizer.decode(list(ids)), "answer": pair.tokenizer.decode(list(one.tokens))}
        for (name, ids), one in zip(prompts[:SHOWN], answers, strict=False)
    ]


def bits_per_byte(pair: Pair, texts: Iterable[str], head_bytes: int) -> float | None:
    """Return the target's cross-entropy in bits a byte over the heads of texts; None where there is no text.

    Each head begins after an end-of-text token, so that its first token is predicted too.
    """
    bits, size = 0.0, 0
    for text in texts:
        head = text.encode()[:head_bytes].decode(errors="ignore")
        ids = [pair.target.spec.eos_token_ids[0] if pair.target.spec.eos_token_ids else 0, *pair.tokenizer.encode(head)]
        ids = ids[: pair.target.spec.max_context]
        bits += _bits(pair, ids)
        size += len(pair.tokenizer.decode(ids[1:]).encode())
    return round(bits / size, 4) if size else None


def _bits(pair: Pair, ids: Sequence[int]) -> float:
    """Return the bits of `ids[1:]`, in chunks of the port's prefill width."""
    port, cache, total = pair.port, pair.port.new_cache(pair.target, len(ids)), 0.0
    for first in range(0, len(ids) - 1, port.prefill_width):
        chunk = list(ids[first : min(first + port.prefill_width, len(ids) - 1)])
        known = port.asarray(np.array([chunk], dtype=np.int64), pair.target.device)
        made = port.target_pass(pair.target, cache, known, taps=(), head=True, exact_rows=False)
        cache = port.select(made.family, (len(chunk),))
        logits = port.to_numpy(made.logits)[0].astype(np.float64)
        highest = logits.max(axis=-1, keepdims=True)
        log_mass = np.log(np.exp(logits - highest).sum(axis=-1)) + highest[:, 0]
        nexts = np.array(ids[first + 1 : first + 1 + len(chunk)])
        total += float((log_mass - logits[np.arange(len(chunk)), nexts]).sum()) / np.log(2)
    return total
