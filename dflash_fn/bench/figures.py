"""What replies come to, way by way. The definitions are those of docs/how-to/benchmark.md.

Replies with an error count in `failed` alone. Intervals are those of `dflash_fn.bench.estimates`, over questions with
all their turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from dflash_fn.bench.asking import Record
from dflash_fn.bench.clock import PARTS
from dflash_fn.bench.contenders import ENGINES, LEAD
from dflash_fn.bench.estimates import Estimate, quotient, ratio, units
from dflash_fn.bench.replies import Reply

__all__ = ["Figures", "accepted_by_slot", "figures_of"]


@dataclass(frozen=True, slots=True)
class Figures:
    """One way over all questions; None is what is not known.

    Attributes:
        name: the way.
        replies: whole ones.
        failed: those with an error.
        tokens: emitted by the whole ones.
        steps: after the first tokens.
        tau: mean tokens emitted a step.
        tau_told_by: None where tau was counted from steps, `server` where it is the server's own mean over all that it
            was asked.
        histogram: `histogram[n]` steps accepted n drafted tokens; () where only their number is known.
        by_slot: of the steps that drafted so many tokens, the share that accepted the 1st, 2nd ...
        rate: tokens per second after the first token.
        whole_rate: tokens per second of whole replies, prompt included.
        throughput: tokens per second of wall time; more than `whole_rate` where several are answered at once.
        first_median: seconds to the first token, the median.
        first_p90: seconds within which nine of ten first tokens came.
        speedup: `rate` over that of `plain`, on the questions that both answered.
        over_engine: the same over `generate` or `mlx-lm`.
        efficiency: `speedup` over tau.
        shares: of a step's time, by part.
        memory: most memory held, in GB.
        same: replies whose text and length are those of `plain`.
        compared: replies that both gave.
    """

    name: str
    replies: int
    failed: int
    tokens: int
    steps: int
    tau: Estimate | None = None
    tau_told_by: str | None = None
    histogram: tuple[int, ...] = ()
    by_slot: tuple[Estimate | None, ...] = ()
    rate: Estimate | None = None
    whole_rate: Estimate | None = None
    throughput: float | None = None
    first_median: float | None = None
    first_p90: float | None = None
    speedup: Estimate | None = None
    over_engine: Estimate | None = None
    efficiency: Estimate | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    same: int | None = None
    compared: int | None = None


def figures_of(
    records: Sequence[Record],
    ways: Sequence[str],
    *,
    blocks: Mapping[str, int] | None = None,
    told: Mapping[str, float | None] | None = None,
) -> list[Figures]:
    """Sum up records, a row a way.

    Args:
        records: in any order.
        ways: the rows, in their order; one without records has a row of zeros.
        blocks: block sizes of ways, for histograms as long as they are; others reach as far as was accepted.
        told: tau by servers that tell no steps of their replies.
    """
    by_way = {way: {record.key[:2]: record for record in records if record.way == way} for way in ways}
    engine = next((name for name in ENGINES.values() if name in by_way), None)
    made = []
    for way, mine in by_way.items():
        one = _alone(way, mine, (blocks or {}).get(way, 0), (told or {}).get(way))
        plain = _whole(by_way[LEAD]) if LEAD in by_way else {}
        one = replace(one, speedup=_speedup(_whole(mine), plain))
        if engine is not None:
            one = replace(one, over_engine=_speedup(_whole(mine), _whole(by_way[engine])))
        if plain:
            both = [(record.reply, plain[key].reply) for key, record in _whole(mine).items() if key in plain]
            same = sum((a.text, a.tokens) == (b.text, b.tokens) for a, b in both)
            one = replace(one, same=same, compared=len(both))
        made.append(replace(one, efficiency=_efficiency(one)))
    return made


Turn = tuple[str, int]


def _whole(mine: Mapping[Turn, Record]) -> dict[Turn, Record]:
    return {key: record for key, record in sorted(mine.items()) if record.reply.error is None}


def _alone(way: str, mine: Mapping[Turn, Record], block: int, told: float | None) -> Figures:
    whole = list(_whole(mine).values())
    replies = [record.reply for record in whole]
    tau = _over(whole, _steps)
    firsts = [reply.first for reply in replies if reply.first is not None]
    emitted = Counter(count - 1 for reply in replies for count in reply.emitted)
    longest = max(max(emitted) + 1, block) if emitted else 0
    histogram = tuple(emitted[count] for count in range(longest))
    return Figures(
        name=way,
        replies=len(whole),
        failed=len(mine) - len(whole),
        tokens=sum(reply.tokens for reply in replies),
        steps=sum(int(_steps(reply)[1]) for reply in replies),
        tau=tau if tau is not None or told is None else Estimate(told, None),
        tau_told_by="server" if tau is None and told is not None else None,
        histogram=histogram,
        by_slot=accepted_by_slot(whole, len(histogram) - 1),
        rate=_over(whole, _after_first),
        whole_rate=_over(whole, lambda reply: (reply.tokens, reply.seconds)),
        throughput=_throughput(whole),
        first_median=float(np.median(firsts)) if firsts else None,
        first_p90=float(np.quantile(firsts, 0.9)) if firsts else None,
        shares=_shares(replies),
        memory=max((record.memory for record in whole if record.memory is not None), default=None),
    )


def _steps(reply: Reply) -> tuple[float, float]:
    """Return tokens emitted by steps, and the number of steps."""
    if reply.emitted:
        return sum(reply.emitted), len(reply.emitted)
    return (reply.tokens - 1, reply.steps) if reply.steps else (0, 0)


def _after_first(reply: Reply) -> tuple[float, float]:
    """Return the tokens after the first, and their seconds."""
    if reply.first is None or reply.tokens < 2:
        return 0, 0
    return reply.tokens - 1, reply.seconds - reply.first


def _over(records: Sequence[Record], what: Callable[[Reply], tuple[float, float]]) -> Estimate | None:
    pairs, names = [what(record.reply) for record in records], [record.question for record in records]
    return ratio(units(pairs, names))


def accepted_by_slot(records: Sequence[Record], slots: int) -> tuple[Estimate | None, ...]:
    """Return the share of steps that accepted their first 1, 2 ... `slots` tokens, of those that drafted so many.

    A step whose block size is not known counts as one that drafted them all. None where no step drafted so many.
    """
    made = []
    for slot in range(1, slots + 1):
        share = _over(records, partial(_at_slot, slot))
        made.append(share and replace(share, least=0.0, most=1.0))
    return tuple(made)


def _at_slot(slot: int, reply: Reply) -> tuple[float, float]:
    """Return how many steps accepted so many drafted tokens, and how many drafted them."""
    if not reply.blocks:
        return sum(count > slot for count in reply.emitted), len(reply.emitted)
    steps = [count for count, block in zip(reply.emitted, reply.blocks, strict=True) if block > slot]
    return sum(count > slot for count in steps), len(steps)


def _speedup(mine: Mapping[Turn, Record], others: Mapping[Turn, Record]) -> Estimate | None:
    both = [(record, others[key]) for key, record in mine.items() if key in others]
    if both and all(one is other for one, other in both):
        return Estimate(1.0, None)
    names = [one.question for one, _ in both]
    sides = ([_after_first(pair[side].reply) for pair in both] for side in (0, 1))
    first, second = (units(pairs, names) for pairs in sides)
    return quotient(first, second)


def _efficiency(one: Figures) -> Estimate | None:
    """Divide by tau as it is; of the two the speed-up varies with the machine, and its interval is kept."""
    if one.speedup is None or one.tau is None:
        return None
    half = one.speedup.half
    return Estimate(one.speedup.value / one.tau.value, None if half is None else half / one.tau.value)


def _shares(replies: Sequence[Reply]) -> dict[str, float]:
    sums = {part: sum(reply.parts.get(part, 0.0) for reply in replies) for part in PARTS}
    total = sum(sums.values())
    return {part: value / total for part, value in sums.items()} if total else {}


def _throughput(records: Sequence[Record]) -> float | None:
    """Return tokens over the time in which at least one reply was under way: a pause of the run does not count."""
    spans = sorted((record.begun, record.begun + record.reply.seconds) for record in records)
    if not spans:
        return None
    ends = np.maximum.accumulate([end for _, end in spans])
    idle = sum(max(0.0, later[0] - end) for (_, later), end in zip(pairwise(spans), ends, strict=False))
    seconds = float(ends[-1]) - spans[0][0] - idle
    return sum(record.reply.tokens for record in records) / seconds if seconds > 0 else None
