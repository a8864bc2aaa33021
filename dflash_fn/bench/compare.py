"""Two ways of decoding the same prompts: where they part first, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_fn import errors
from dflash_fn.bench.noise import Noise, distances, measure
from dflash_fn.bench.ways import Answer, Way
from dflash_fn.divergence import Divergence, Top2, first_difference
from dflash_fn.glimpses import Glimpse, Row, explain_rows

__all__ = ["Compared", "Comparison", "check_comparable", "compare"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt.

    Attributes:
        name: the prompt's.
        tokens: how many tokens agree.
        divergence: the first that does not; None where all agree.
        slots: in which slot of its block each way chose it; None where it has no blocks.
        bits_identical: whether all logits up to there are known and agree bit for bit.
        same_steps: whether both took the same steps up to there, with the same numbers of accepted tokens; None where
            one of them has no blocks.
        promised: whether the contract promises the same bits.
    """

    name: str
    tokens: int
    divergence: Divergence | None
    slots: tuple[int | None, int | None]
    bits_identical: bool
    same_steps: bool | None = None
    promised: bool = False

    @property
    def explained(self) -> bool:
        """Whether the ways agree, in their bits where those are promised, or part where rounding may decide."""
        if self.divergence is None:
            return self.bits_identical or not self.promised
        return self.divergence.near_tie


@dataclass(frozen=True, slots=True)
class Comparison:
    """All prompts.

    Attributes:
        prompts: one result each.
        noise: what they were judged by.
    """

    prompts: tuple[Compared, ...]
    noise: Noise


@dataclass(frozen=True, slots=True)
class _Parted:
    """What is left of two answers until all prompts are there: the rows at which they part, and distances before."""

    name: str
    tokens: int
    position: int
    slots: tuple[int | None, int | None]
    bits: bool
    steps: bool | None
    apart: Sequence[float]
    rows: tuple[Row, Row] | None = None
    chosen: tuple[int, int] = (0, 0)
    stopped: Divergence | None = None


def check_comparable(first: Way, second: Way) -> None:
    """Raise InputError for ways whose token ids do not mean the same."""
    sizes = first.spec.vocab_size, second.spec.vocab_size
    if sizes[0] != sizes[1]:
        raise errors.InputError(
            f"ways {first.name!r} and {second.name!r}: got vocabularies of {sizes[0]} and {sizes[1]}, expected the same"
        )


def compare(
    first: Way,
    second: Way,
    prompts: Iterable[tuple[str, Sequence[int]]],
    count: int,
    advance: Callable[[], object] = lambda: None,
) -> Comparison:
    """Decode each prompt both ways, `count` tokens, and compare.

    How far rounding reaches is measured on all prompts together, where the ways agree (`dflash_fn.bench.noise`), so
    nothing is judged before the last. Where a server tells neither tokens nor log probabilities, both ways' texts are
    tokenized alike, and positions are those of that.

    Args:
        first: a way.
        second: another.
        prompts: names and token ids.
        count: tokens to emit.
        advance: called after each prompt.

    Raises:
        InputError: vocabularies of different sizes.
        ServerError: a server does not answer.
    """
    check_comparable(first, second)
    peak = max(first.peak, second.peak)
    parted: list[_Parted] = []
    for name, ids in prompts:
        answers = first.answer(ids, count), second.answer(ids, count)
        if any(answer.text is not None for answer in answers):
            answers = _reread(first, answers[0]), _reread(second, answers[1])
        parted.append(_part(name, len(ids), answers[0], answers[1], peak, first.spec.eos_token_ids))
        advance()
    noise = measure(first, second, [apart for one in parted for apart in one.apart])
    return Comparison(tuple(_judged(one, noise, peak) for one in parted), noise)


def _reread(way: Way, answer: Answer) -> Answer:
    """Tokenize an answer's text, up to its first stop token, as any text is; of its logits nothing remains."""
    text, ended = answer.text, answer.ended
    if text is None:
        tokens = list(answer.tokens)
        stop = next((at for at, token in enumerate(tokens) if token in way.spec.eos_token_ids), None)
        text, ended = way.tokenizer.decode(tokens[:stop], skip_special_tokens=True), ended or stop is not None
    tokens = list(way.tokenizer.encode(text, add_special_tokens=False))
    return Answer(tokens, [Glimpse(token) for token in tokens], ended=ended)


def _part(name: str, begun: int, first: Answer, second: Answer, peak: float, stops: tuple[int, ...]) -> _Parted:
    index = first_difference(first.tokens, second.tokens)
    agreed = min(len(first.tokens), len(second.tokens)) if index is None else index
    steps = list(first.slots[:agreed]) == list(second.slots[:agreed]) if first.slots and second.slots else None
    known = _same_bits(first, second, agreed), steps, distances(first, second, agreed, peak)
    if index is None:
        gone = _stopped(name, begun + agreed, first, second, stops)
        return _Parted(name, agreed, begun + agreed, (None, None), *known, stopped=gone)
    slots = tuple(answer.slots[index] if answer.slots else None for answer in (first, second))
    rows, chosen = (first.logits[index], second.logits[index]), (first.tokens[index], second.tokens[index])
    return _Parted(name, agreed, begun + index, (slots[0], slots[1]), *known, rows, chosen)


def _judged(one: _Parted, noise: Noise, peak: float) -> Compared:
    gone = one.stopped
    if one.rows is not None:
        gone = explain_rows(
            one.name,
            one.position,
            *one.rows,
            one.chosen,
            relative_bound=noise.reach,
            peak=peak,
            reason=noise.reason(),
        )
    return Compared(one.name, one.tokens, gone, one.slots, one.bits, one.steps, noise.promised)


def _same_bits(first: Answer, second: Answer, agreed: int) -> bool:
    pairs = zip(first.logits[:agreed], second.logits[:agreed], strict=True)
    return all(isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.tobytes() == b.tobytes() for a, b in pairs)


def _stopped(name: str, at: int, first: Answer, second: Answer, stops: tuple[int, ...]) -> Divergence | None:
    """Return the divergence of a way that stopped where the other went on with a token that stops nothing."""
    lengths = len(first.tokens), len(second.tokens)
    shorter = lengths.index(min(lengths))
    answers = first, second
    if lengths[0] == lengths[1] or not answers[shorter].ended or not stops:
        return None
    went_on = answers[1 - shorter].tokens[min(lengths)]
    last = answers[shorter].tokens[-1] if answers[shorter].tokens else None  # a stop token that the server shows
    if went_on in stops or last in stops:
        return None
    tops = [Top2(went_on, None, None, None)] * 2
    tops[shorter] = Top2(stops[0], None, None, None)
    return Divergence(name, at, tops[0], tops[1], None, None, "the server stopped there, and gave no log probabilities")
