"""Two ways of decoding the same prompts: where they part first, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dflash_fn import errors
from dflash_fn.bench.ways import Answer, Way
from dflash_fn.divergence import Divergence, explain_divergence, first_difference
from dflash_fn.tolerances import UNIT, bound

__all__ = ["Compared", "check_comparable", "compare"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt.

    Attributes:
        name: the prompt's.
        tokens: how many tokens agree.
        divergence: the first that does not; None where all agree.
        slots: in which slot of its block each way chose it; None where it has no blocks.
        bits_identical: whether all logits up to there agree bit for bit.
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

    Both bounds are relative to the logits' peak and derived for the coarser of the two dtypes.
    """
    check_comparable(first, second)
    coarser = max(first.dtype, second.dtype, key=UNIT.__getitem__)
    limit = bound(coarser, "logits", first.spec)
    for name, ids in prompts:
        yield _compared(name, len(ids), first.answer(ids, count), second.answer(ids, count), limit)


def _compared(name: str, begun: int, first: Answer, second: Answer, limit: float) -> Compared:
    index = first_difference(first.tokens, second.tokens)
    agreed = min(len(first.tokens), len(second.tokens)) if index is None else index
    same = all(a.tobytes() == b.tobytes() for a, b in zip(first.logits[:agreed], second.logits[:agreed], strict=True))
    steps = list(first.slots[:agreed]) == list(second.slots[:agreed]) if first.slots and second.slots else None
    if index is None:
        return Compared(name, agreed, None, (None, None), same, steps)
    rows = first.logits[index], second.logits[index]
    found = explain_divergence(name, begun + index, *rows, relative_bound=limit)
    slots = tuple(answer.slots[index] if answer.slots else None for answer in (first, second))
    return Compared(name, agreed, found, (slots[0], slots[1]), same, steps)
