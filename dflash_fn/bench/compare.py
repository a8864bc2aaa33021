"""Two ways of decoding the same prompts: where they part first, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_fn import errors
from dflash_fn.bench.ways import Answer, Way
from dflash_fn.divergence import Divergence, Top2, first_difference
from dflash_fn.glimpses import Glimpse, explain_rows
from dflash_fn.tolerances import UNIT, bound

__all__ = ["Compared", "check_comparable", "compare"]


@dataclass(frozen=True, slots=True)
class Limit:
    """How far rounding reaches: relative to a row's peak, and the peak where a row does not show it."""

    relative: float
    peak: float


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
    """

    name: str
    tokens: int
    divergence: Divergence | None
    slots: tuple[int | None, int | None]
    bits_identical: bool
    same_steps: bool | None = None

    @property
    def explained(self) -> bool:
        """Whether the ways agree, or part where rounding may decide."""
        return self.divergence is None or self.divergence.near_tie


def check_comparable(first: Way, second: Way) -> None:
    """Raise InputError for ways whose token ids do not mean the same."""
    sizes = first.spec.vocab_size, second.spec.vocab_size
    if sizes[0] != sizes[1]:
        raise errors.InputError(
            f"ways {first.name!r} and {second.name!r}: got vocabularies of {sizes[0]} and {sizes[1]}, expected the same"
        )


def compare(first: Way, second: Way, prompts: Iterable[tuple[str, Sequence[int]]], count: int) -> Iterator[Compared]:
    """Decode each prompt both ways, `count` tokens, and compare; one result at a time.

    Both bounds are relative to the logits' peak and derived for the coarser of the two dtypes. Where a server tells
    neither tokens nor log probabilities, both ways' texts are tokenized alike, and positions are those of that.

    Raises:
        InputError: vocabularies of different sizes.
        ServerError: a server does not answer.
    """
    check_comparable(first, second)
    coarser = max(first.dtype, second.dtype, key=UNIT.__getitem__)
    limit = Limit(bound(coarser, "logits", first.spec), max(first.peak, second.peak))
    for name, ids in prompts:
        answers = first.answer(ids, count), second.answer(ids, count)
        if any(answer.text is not None for answer in answers):
            answers = tuple(_reread(way, answer) for way, answer in zip((first, second), answers, strict=True))
        yield _compared(name, len(ids), answers[0], answers[1], limit, first.spec.eos_token_ids)


def _reread(way: Way, answer: Answer) -> Answer:
    """Tokenize an answer's text, up to its first stop token, as any text is; of its logits nothing remains."""
    text, ended = answer.text, answer.ended
    if text is None:
        tokens = list(answer.tokens)
        stop = next((at for at, token in enumerate(tokens) if token in way.spec.eos_token_ids), None)
        text, ended = way.tokenizer.decode(tokens[:stop], skip_special_tokens=True), ended or stop is not None
    tokens = list(way.tokenizer.encode(text, add_special_tokens=False))
    return Answer(tokens, [Glimpse(token) for token in tokens], ended=ended)


def _compared(name: str, begun: int, first: Answer, second: Answer, limit: Limit, stops: tuple[int, ...]) -> Compared:
    index = first_difference(first.tokens, second.tokens)
    agreed = min(len(first.tokens), len(second.tokens)) if index is None else index
    same = _same_bits(first, second, agreed)
    steps = list(first.slots[:agreed]) == list(second.slots[:agreed]) if first.slots and second.slots else None
    if index is None:
        gone = _stopped(name, begun + agreed, first, second, stops)
        return Compared(name, agreed, gone, (None, None), same, steps)
    rows, chosen = (first.logits[index], second.logits[index]), (first.tokens[index], second.tokens[index])
    found = explain_rows(name, begun + index, *rows, chosen, relative_bound=limit.relative, peak=limit.peak)
    slots = tuple(answer.slots[index] if answer.slots else None for answer in (first, second))
    return Compared(name, agreed, found, (slots[0], slots[1]), same, steps)


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
