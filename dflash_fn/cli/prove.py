"""`dflash-fn doctor --prove`: whether the contract (P01) holds on the machine at hand.

At a given width and port, decoding with a draft emits the tokens and bit-identical logits of decoding without one.
What can break that is a kernel whose order of summation depends on the shape, so the lengths that are tried cross
the borders at which kernels change their blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dflash_fn.cli.answer import decode_answer, opened
from dflash_fn.cli.check import check_against_plain

if TYPE_CHECKING:
    from dflash_fn.records import Pair

__all__ = ["DTYPES", "Proof", "proofs"]

DTYPES = ("float32", "bfloat16")
WIDTHS = (8, 16)
STARTS = (240, 368, 496)
NUM_TOKENS = 32
"""From each start, past 256, 384 and 512."""

SAMPLE = '''def fibonacci(n):
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


class Stack:
    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)

'''


@dataclass(frozen=True, slots=True)
class Proof:
    """One comparison with and without the draft.

    Attributes:
        dtype: of the weights.
        width: W.
        start: tokens of the prompt.
        end: tokens at the end of the answer.
        tau: of the run with the draft: at 1.0 nothing was accepted, and little was tried.
        tokens_identical: whether the token ids are.
        logits_identical: whether the logits are, bit for bit.
        first_difference: position of the first token that differs, counted from the start of the prompt; or None.
    """

    dtype: str
    width: int
    start: int
    end: int
    tau: float | None
    tokens_identical: bool
    logits_identical: bool
    first_difference: int | None

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return self.tokens_identical and self.logits_identical

    def as_object(self) -> dict[str, Any]:
        """Return the proof for JSON."""
        return asdict(self)


def proofs(pair: Pair) -> Iterator[Proof]:
    """Compare at every width and start, in the dtype that the pair was loaded in."""
    ids = prompt_ids(pair, max(STARTS))
    for width in WIDTHS:
        for start in STARTS:
            yield prove(pair, ids[:start], width)


def prompt_ids(pair: Pair, length: int) -> list[int]:
    """Return this many tokens of the sample text, over and over."""
    ids: list[int] = pair.tokenizer.encode(SAMPLE, add_special_tokens=False)
    return (ids * (length // len(ids) + 1))[:length]


def prove(pair: Pair, ids: list[int], width: int) -> Proof:
    """Decode with and without the draft, and compare."""
    block_size = min(width, pair.block_size)
    state, seconds = opened(pair, ids, seed=0, width=width)
    answer = decode_answer(
        state, pair, max_new_tokens=NUM_TOKENS, block_size=block_size, seconds=seconds, digests=True, stop_token_ids=()
    )
    if answer.interrupted:
        raise KeyboardInterrupt
    check = check_against_plain(pair, ids, answer, max_new_tokens=NUM_TOKENS, stop_token_ids=())
    where = check.first_difference
    return Proof(
        dtype=pair.target.dtype,
        width=width,
        start=len(ids),
        end=len(answer.state.tokens[0]),
        tau=answer.summary.tau,
        tokens_identical=check.tokens_identical,
        logits_identical=check.logits_identical,
        first_difference=None if where is None else len(ids) + where,
    )
