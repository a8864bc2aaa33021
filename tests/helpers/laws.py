"""The exact law of a policy's output, by enumerating every draft and every outcome of every draw.

A model here is a table: for each prefix of a block, a distribution over a small vocabulary. A rule is piecewise
constant in each of its uniforms, so its law is a finite sum: over all drafted blocks, weighed by q, and over the cells
between the points where its uniforms' comparisons turn. A cell counts with its size, the rule is asked at its middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_fn.policies import Policy
from dflash_fn.records import Verdict

__all__ = [
    "Branch",
    "Cells",
    "Table",
    "branches",
    "cells",
    "law_of",
    "mean_accepted",
    "policy_cells",
    "sums",
    "target_law",
    "tv",
    "verdict",
]

Table = Callable[[tuple[int, ...]], np.ndarray]
"""A function from the tokens since the anchor to the next token's probabilities, [V] float64."""

Numbers = dict[str, np.ndarray]
Cells = Callable[[np.ndarray, np.ndarray, np.ndarray], list[tuple[float, Numbers]]]
"""A function (drafted [B - 1], p [B, V], q [B - 1, V]) -> (weight, uniforms by stream [B]) of all cells."""


@dataclass(frozen=True)
class Branch:
    """One outcome of one block: its probability, what was emitted, and how many drafted tokens were kept."""

    weight: float
    emitted: tuple[int, ...]
    num_accepted: int


@dataclass
class _Batch:
    drafted: list[np.ndarray] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    q: list[np.ndarray] = field(default_factory=list)
    uniforms: list[Numbers] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def along(table: Table, path: Sequence[int], size: int) -> np.ndarray:
    """Return [size, V], the table's distributions along a path."""
    return np.stack([table(tuple(path[:slot])) for slot in range(size)])


def branches(
    policy: Policy, p: Table, q: Table, *, vocab: int, size: int, cells: Cells, xp: Any = np, certain: bool = False
) -> list[Branch]:
    """Return every outcome of a block of B = `size`.

    Args:
        policy: the rule is asked once, with one row an outcome.
        p: the target.
        q: the draft; its tokens are drawn from it one by one.
        vocab: V.
        size: B.
        cells: what cells the uniforms fall in.
        xp: the namespace to ask the rule in.
        certain: whether the rule is told a q that is 1 at the drafted tokens, as for a proposer's.
    """
    batch = _Batch()
    for drafted in itertools.product(range(vocab), repeat=size - 1):
        path = np.array(drafted, dtype=np.int64)
        target, draft = along(p, drafted, size), along(q, drafted, size - 1) if size > 1 else np.zeros((0, vocab))
        weight = float(np.prod(draft[np.arange(size - 1), path]))
        if weight == 0:
            continue
        told = np.eye(vocab)[path] if certain else draft
        for share, numbers in cells(path, target, told):
            batch.drafted.append(path)
            with np.errstate(divide="ignore"):
                batch.logits.append(np.log(target))
            batch.q.append(told.reshape(size - 1, vocab))
            batch.uniforms.append(numbers)
            batch.weights.append(weight * share)
    return _asked(policy, batch, xp)


def _asked(policy: Policy, batch: _Batch, xp: Any) -> list[Branch]:
    uniforms = {name: np.stack([numbers[name] for numbers in batch.uniforms]) for name in batch.uniforms[0]}
    verdict = policy.rule(
        xp,
        xp.asarray(np.stack(batch.drafted)),
        xp.asarray(np.stack(batch.logits)),
        xp.asarray(np.stack(batch.q)) if policy.needs_q else None,
        {name: xp.asarray(values) for name, values in uniforms.items()},
    )
    counts, tokens = np.asarray(verdict.num_accepted).tolist(), np.asarray(verdict.next_token).tolist()
    return [
        Branch(weight, (*drafted[:count].tolist(), token), count)
        for weight, drafted, count, token in zip(batch.weights, batch.drafted, counts, tokens, strict=True)
    ]


def cells(points: Mapping[str, Sequence[Sequence[float]]], size: int, side: float = 0.5) -> list[tuple[float, Numbers]]:
    """Return all cells of uniforms whose comparisons turn at `points[stream][slot]`; other slots have one cell.

    `side` says where in a cell its uniforms are taken, from 0 (its low end) to 1.
    """
    axes = []
    for name, slots in points.items():
        for slot, turns in enumerate(slots):
            inner = [float(turn) for turn in turns if 0 < turn < 1]
            edges = [0.0, *sorted(set(inner)), 1.0]
            axes.append([(name, slot, low, high) for low, high in itertools.pairwise(edges)])
    made = []
    for cell in itertools.product(*axes):
        numbers = {name: np.full(size, 0.5) for name in points}
        weight = 1.0
        for name, slot, low, high in cell:
            numbers[name][slot] = low + side * (high - low)
            weight *= high - low
        made.append((weight, numbers))
    return made


def sums(values: np.ndarray) -> list[float]:
    """Return where an inverse transform turns from one token to the next."""
    mass = values.sum()
    return (np.cumsum(values) / mass).tolist() if mass > 0 else []


def policy_cells(policy: Policy, *, size: int) -> Any:
    """Return the cells of our own lossless policies, and of all rules that turn at p / q, at h, or at sums of p.

    A rule that recovers draws one number, that of the slot at which it recovers; which slot that is, the accept cell
    says. To keep the number of cells small, all slots of `recover` get the same number here, cut at every slot's sums;
    that no rule reads two of them is tested apart.
    """

    def made(drafted: np.ndarray, p: np.ndarray, q: np.ndarray, side: float = 0.5) -> list[tuple[float, Numbers]]:
        own = np.arange(size - 1)
        points: dict[str, list[list[float]]] = {}
        if "target" in policy.streams:
            points["target"] = [sums(slot) for slot in p]
        if "accept" in policy.streams:
            carry, bars = carried(drafted, p, q)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = p[own, drafted] / q[own, drafted]
            points["accept"] = [list(turns) for turns in zip(ratios, bars, carry[1:], strict=True)] + [[]]
        else:
            carry = np.ones(size)
        rows = cells(points, size, side)
        if "recover" not in policy.streams:
            return rows
        padded = np.concatenate([q, np.zeros((1, p.shape[1]))])
        factors = [*carry[:-1], 1.0]
        turns = {turn for slot in range(size) for turn in sums(np.maximum(p[slot] - padded[slot], 0))}
        turns |= {turn for slot in range(size) for turn in sums(np.maximum(factors[slot] * p[slot] - padded[slot], 0))}
        turns |= {turn for slot in p for turn in sums(slot)}
        last = cells({"recover": [sorted(turns)]}, 1, side)
        return [
            (weight * share, {**numbers, "recover": np.full(size, drawn["recover"][0])})
            for weight, numbers in rows
            for share, drawn in last
        ]

    return made


def carried(drafted: np.ndarray, p: np.ndarray, q: np.ndarray) -> tuple[list[float], list[float]]:
    """Return c[0 .. B - 1] and h[1 .. B - 1] of block verification, from the paper and one number at a time."""
    carry, bars = [1.0], []
    for slot, token in enumerate(drafted):
        ratio = p[slot, token] / q[slot, token] if q[slot, token] > 0 else 0.0
        carry.append(min(1.0, carry[-1] * ratio))
    for count in range(1, len(drafted) + 1):
        if count == len(drafted):
            bars.append(carry[count])
            continue
        mass = sum(max(carry[count] * a - b, 0.0) for a, b in zip(p[count], q[count], strict=True))
        slack = mass + 1 - carry[count]
        bars.append(mass / slack if slack > 0 else 1.0)
    return carry, bars


def law_of(made: Sequence[Branch], p: Table, *, vocab: int, size: int) -> np.ndarray:
    """Return [V] * B, the law of the block's B tokens, those after the emitted ones drawn from the target."""
    law = np.zeros((vocab,) * size)
    for branch in made:
        rest = size - len(branch.emitted)
        law[branch.emitted] += branch.weight * (_law(p, branch.emitted, vocab, rest) if rest else 1.0)
    return law


def target_law(p: Table, *, vocab: int, size: int) -> np.ndarray:
    """Return [V] * B, what the law must be."""
    return _law(p, (), vocab, size)


def _law(p: Table, prefix: tuple[int, ...], vocab: int, size: int) -> np.ndarray:
    if size == 1:
        return p(prefix)
    return np.stack([p(prefix)[token] * _law(p, (*prefix, token), vocab, size - 1) for token in range(vocab)])


def mean_accepted(made: Sequence[Branch]) -> float:
    """Return the expectation of num_accepted."""
    return sum(branch.weight * branch.num_accepted for branch in made)


def tv(left: np.ndarray, right: np.ndarray) -> float:
    """Return the total variation of two laws."""
    return float(np.abs(left - right).sum() / 2)


def verdict(num_accepted: np.ndarray, next_token: np.ndarray) -> Verdict:
    """Make a verdict of integers."""
    return Verdict(num_accepted.astype(np.int64), next_token.astype(np.int64))
