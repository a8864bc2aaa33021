"""The rows of a benchmark's table: ways to decode with one pair, or on one server, as they are named.

| name | what decodes |
| --- | --- |
| `generate`, `mlx-lm` | transformers' `generate` on torch, mlx-lm's `generate_step` on mlx |
| `upstream` | `dflash_generate` of the package `dflash`, on torch |
| `plain` | ours without a draft, one token a step |
| `ngram` | ours, guessing from the n-grams of the text so far |
| `draft` | ours, with the draft |
| `both` | ours, the n-grams' guess where they have one, else the draft's |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dflash_fn import errors
from dflash_fn.proposers import own_block
from dflash_fn.records import Pair

__all__ = ["AUTO", "ENGINES", "KINDS", "LEAD", "Contender", "check_blocks", "contenders", "parse_blocks", "parse_ways"]

AUTO = "auto"
"""In place of a block size: chosen for each step by `dflash_fn.pacing`."""

LEAD = "plain"
"""The way whose answers a conversation goes on from, and whose speed and text others are compared with."""

ENGINES = {"torch": "generate", "mlx": "mlx-lm"}
"""The engine of each port's library, which decodes one token a step."""

KINDS = (*ENGINES.values(), "upstream", "plain", "ngram", "draft", "both")
"""What may be named."""

Block: TypeAlias = int | Literal["auto"]

SIZED = ("upstream", "plain", "ngram", "draft", "both")
DRAFTED = ("upstream", "draft", "both")
GUESSING = ("ngram", "draft", "both")


@dataclass(frozen=True, slots=True)
class Contender:
    """A row of the table.

    Attributes:
        kind: one of `KINDS`.
        block: block size; of `plain`, the width that it verifies.
        named: whether the block stands in the name.
        paced: whether the block is the largest of those that are chosen from.
    """

    kind: str
    block: int = 1
    named: bool = False
    paced: bool = False

    @property
    def name(self) -> str:
        """As it is written and shown, such as `draft:8`."""
        return f"{self.kind}:{AUTO if self.paced else self.block}" if self.named else self.kind


def parse_ways(text: str) -> list[tuple[str, Block | None]]:
    """Read `KIND` or `KIND:BLOCK`, with commas between them.

    Raises:
        InputError: a kind that is none, a block that is no number, or the same twice.

    Example:
        >>> parse_ways("plain,draft:8")
        [('plain', None), ('draft', 8)]
    """
    found: list[tuple[str, Block | None]] = []
    for word in text.split(","):
        kind, sized, block = word.strip().partition(":")
        if kind not in KINDS or (sized and kind not in SIZED):
            expected = ", ".join(kind + (":B" if kind in SIZED else "") for kind in KINDS)
            raise errors.InputError(f"--ways: got {word.strip()!r}, expected some of: {expected}")
        one = kind, _block("--ways", block, least=1 if kind == LEAD else 2, auto=kind in GUESSING) if sized else None
        if one in found:
            raise errors.InputError(f"--ways: names {word.strip()} twice")
        found.append(one)
    return found


def parse_blocks(text: str) -> list[Block]:
    """Read block sizes with commas between them.

    Raises:
        InputError: what is neither a number of at least 2 nor `auto`, or the same twice.

    Example:
        >>> parse_blocks("4,auto")
        [4, 'auto']
    """
    found: list[Block] = [_block("--blocks", part.strip(), least=2, auto=True) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise errors.InputError(f"--blocks {text}: names one of them twice")
    return found


def _block(flag: str, text: str, *, least: int, auto: bool) -> Block:
    if auto and text == AUTO:
        return AUTO
    also = f", or {AUTO}" if auto else ""
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise errors.InputError(f"{flag}: got a block of {text!r}, expected a number of at least {least}{also}")
    return int(text)


def check_blocks(ways: Sequence[tuple[str, Block | None]], blocks: Sequence[Block], word: str = "") -> None:
    """Refuse block sizes that no way would take: they are for `draft`, and for `ngram` or `both` as the word.

    Raises:
        InputError: there are block sizes, and every way that could take them has its own, or there is none.
    """
    takers = ["draft", *([word] if word else [])]
    if blocks and not any(kind in takers and block is None for kind, block in ways):
        sizes, example = ",".join(map(str, blocks)), f"{word or 'ngram'}:{blocks[0]}"
        raise errors.InputError(
            f"--blocks {sizes}: is for {' and '.join(takers)} without a block of its own, and no such way is measured; "
            f"leave --blocks out, or write a block with its way, as in --ways plain,{example}"
        )


def contenders(
    pair: Pair, ways: Sequence[tuple[str, Block | None]] | None = None, blocks: Sequence[Block] = (), *, word: str = ""
) -> list[Contender]:
    """Return the rows that a pair can have, or those that are asked for.

    Args:
        pair: whose.
        ways: as `parse_ways` returns them; None takes all that make sense for the pair and its port.
        blocks: of `draft`, and of the way that is the word; none takes the draft's own, which `ngram` and `both` take
            too (without a draft, 8).
        word: `ngram` or `both`, to take of our own ways but that one and `plain`.

    Raises:
        InputError: a way that this pair or port cannot have, a block wider than the port verifies, or blocks that no
            way takes.
    """
    own = own_block(pair, proposes=True)
    asked: Sequence[tuple[str, Block | None]] = [(kind, None) for kind in _usual(pair, word)] if ways is None else ways
    check_blocks(asked, blocks, word)
    found: list[Contender] = []
    for kind, block in asked:
        _check_kind(pair, kind)
        sizes: list[Block | None] = (
            [block] if block is not None else list(blocks) if kind in ("draft", word) and blocks else [None]
        )
        found += [_contender(kind, size, own) for size in sizes]
    for one in found:
        if one.kind != "upstream" and one.block > pair.port.max_width:
            raise errors.InputError(
                f"way {one.name}: port {pair.port.name} verifies {pair.port.max_width} tokens at most"
            )
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise errors.InputError(f"way {twice} is named twice, by --ways and --blocks; leave it out of one")
    return found


def _contender(kind: str, block: Block | None, own: int) -> Contender:
    if block == AUTO:
        return Contender(kind, own, named=True, paced=True)
    if kind in GUESSING:
        return Contender(kind, block or own, named=True)
    return Contender(kind, block or (own if kind == "upstream" else 1), named=block is not None)


def _usual(pair: Pair, word: str) -> list[str]:
    engine = [ENGINES[pair.port.name]] if pair.port.name in ENGINES else []
    if word:
        return [*engine, LEAD, word]
    upstream = ["upstream"] if pair.port.name == "torch" and pair.draft else []
    return [*engine, *upstream, LEAD, "ngram", *(["draft", "both"] if pair.draft else [])]


def _check_kind(pair: Pair, kind: str) -> None:
    port = pair.port.name
    if kind in ENGINES.values() and ENGINES.get(port) != kind:
        other = next(name for name, engine in ENGINES.items() if engine == kind)
        raise errors.InputError(f"way {kind} runs beside port {other}, got port {port}; leave it out")
    if kind == "upstream" and port != "torch":
        raise errors.InputError(f"way upstream runs beside port torch, got port {port}; leave it out")
    if kind in DRAFTED and pair.draft is None:
        raise errors.InputError(f"way {kind} needs a draft, and {pair.name} has none; give one by --draft")
