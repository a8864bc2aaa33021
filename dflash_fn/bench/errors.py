"""How far every installed port is from jax in float64, next to the bound that the tests use.

The same tokens go through each port and dtype in verifications of 16, and through the draft in blocks. Every port
computes with the cos and sin of `dflash_fn.rope`, so that these count as exact. Weights that the dtype cannot hold are
rounded to it, for which the bound, made for programs that hold the same weights, has no allowance.

`relative` is to the largest magnitude in a token's row of a layer; it and the bound are those of the row that takes
the largest share of its bound. A layer's keys and values have the bound of the hidden state that it leaves.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn import errors, zoo
from dflash_fn.bench.common import markdown
from dflash_fn.load import load_pair
from dflash_fn.port import Port
from dflash_fn.records import Model, Pair
from dflash_fn.registry import get_port, port_names
from dflash_fn.tolerances import UNIT, bound

__all__ = ["Part", "compare", "main", "measured"]

CHUNK = 16
HEAD = ["quantity", "port", "dtype", "largest error", "rms error", "relative", "bound", "share of the bound"]

TEXT = '''"""Queues whose items leave in the order of their priority."""

import heapq
from dataclasses import dataclass, field


@dataclass(order=True)
class Item:
    priority: int
    name: str = field(compare=False)


class Queue:
    def __init__(self, items=()):
        self.heap = [Item(priority, name) for name, priority in items]
        heapq.heapify(self.heap)

    def push(self, name, priority=0):
        heapq.heappush(self.heap, Item(priority, name))

    def pop(self):
        """Return the name of the first item, and forget it."""
        if not self.heap:
            raise IndexError("pop from an empty queue")
        return heapq.heappop(self.heap).name


def test_the_first_comes_first():
    queue = Queue([("b", 2), ("a", 1)])
    queue.push("c", 3)
    assert [queue.pop() for _ in range(3)] == ["a", "b", "c"]
'''


@dataclass(frozen=True, slots=True)
class Part:
    """What is compared, one layer's worth of it.

    Attributes:
        quantity: its name in the table.
        values: [tokens, size].
        bound: of the error, relative to a row's largest magnitude; by dtype.
    """

    quantity: str
    values: np.ndarray
    bound: dict[str, float]


def measured(pair: Pair, ids: list[int]) -> list[Part]:
    """Run whole chunks of these tokens through a pair and return everything that it computes on the way."""
    port, spec = pair.port, pair.target.spec
    ids = ids[: (len(ids) - 1) // CHUNK * CHUNK + 1]
    taps = pair.draft.spec.target_layer_ids if pair.draft else tuple(range(spec.num_layers))
    cache, draft_cache = port.new_cache(pair.target, len(ids)), None
    if pair.draft:
        draft_cache = port.new_cache(pair.draft, len(ids) + pair.block_size)
    features, logits, drafted = [], [], []
    for start in range(0, len(ids) - 1, CHUNK):
        tokens = _sent(pair, ids[start : start + CHUNK])
        made = port.target_pass(pair.target, cache, tokens, taps=taps, head=True, exact_rows=False)
        cache = port.select(made.family, (CHUNK,))
        features.append(port.to_numpy(made.features)[0])
        logits.append(port.to_numpy(made.logits)[0])
        if pair.draft:
            draft_cache = port.draft_context(pair.draft, draft_cache, made.features, (CHUNK,), exact_rows=False)
            block = _sent(pair, [ids[start + CHUNK]] + [pair.draft.spec.mask_token_id] * (pair.block_size - 1))
            drafted.append(
                port.to_numpy(port.draft_pass(pair.draft, pair.target, draft_cache, block, exact_rows=False))[0]
            )
    parts = [*_hidden(np.concatenate(features), taps, pair.target), *_stored(pair, pair.target, cache, "target", 0)]
    parts.append(Part("logits", np.concatenate(logits), _bounds("logits", pair.target, 0)))
    if pair.draft:
        below = max(taps) + 1
        parts += _stored(pair, pair.draft, draft_cache, "draft", below)
        parts.append(
            Part("draft logits", np.concatenate(drafted), _bounds("draft_logits", pair.draft, below, whole=True))
        )
    return parts


def _sent(pair: Pair, ids: list[int]) -> Any:
    return pair.port.asarray(np.array([ids], dtype=np.int64), pair.target.device)


def _bounds(quantity: Any, model: Model[Any], layers: int, *, whole: bool = False) -> dict[str, float]:
    depth = layers + model.spec.num_layers if whole or quantity == "logits" else layers
    return {dtype: bound(dtype, quantity, model.spec, layers=depth) for dtype in UNIT}


def _hidden(features: np.ndarray, taps: tuple[int, ...], target: Model[Any]) -> Iterator[Part]:
    for layer, values in zip(taps, np.split(features, len(taps), axis=-1), strict=True):
        yield Part("hidden states", values, _bounds("hidden", target, layer + 1))


def _stored(pair: Pair, model: Model[Any], cache: Any, role: str, below: int) -> Iterator[Part]:
    """Yield keys, values and states; each is half a sublayer beyond the hidden state that it is made of."""
    for name, bits in sorted(pair.port.export_cache(cache).items()):
        layer, _, kind = name.split(".")
        if kind.startswith("marked_"):
            continue
        values = bits.values
        if bits.dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        depth = below + (int(layer) + 1 if role == "target" else 1)
        yield Part(f"{role} {kind}", values.reshape(len(values), -1), _bounds("hidden", model, depth))


def compare(parts: list[Part], exact: list[Part], dtype: str) -> Iterator[list[str]]:
    """Yield a line of the table for each quantity; relative error and bound are of the row that comes closest."""
    for quantity in dict.fromkeys(part.quantity for part in parts):
        pairs = [(a, b) for a, b in zip(parts, exact, strict=True) if a.quantity == quantity]
        off = [np.abs(a.values.astype(np.float64) - b.values) for a, b in pairs]
        relative = [gap.max(-1) / np.abs(b.values).max(-1) for gap, (_, b) in zip(off, pairs, strict=True)]
        limits = [part.bound.get(dtype, np.nan) for part, _ in pairs]
        share, row, limit = max((r.max() / n, r.max(), n) for r, n in zip(relative, limits, strict=True))
        largest = max(gap.max() for gap in off)
        rms = np.sqrt(np.mean([np.mean(np.square(gap)) for gap in off]))
        yield [quantity, *(f"{value:.1e}" for value in (largest, rms, row, limit)), f"{share:.0%}"]


def _installed() -> Iterator[Port]:
    for name in port_names():
        try:
            yield get_port(name)
        except errors.BackendMissing as error:
            print(error, file=sys.stderr)  # noqa: T201


def table(name: str, length: int) -> str:
    """Measure a zoo pair on every port and return a table."""
    files = zoo.fetch(name)
    exact_pair = load_pair(files.target, files.draft, port="jax", dtype="float64")
    ids = exact_pair.tokenizer.encode(TEXT)[:length]
    exact, lines = measured(exact_pair, ids), []
    for port in _installed():
        for dtype in (dtype for dtype in port.info().dtypes if dtype in UNIT):
            pair = load_pair(files.target, files.draft, port=port, dtype=dtype)
            for quantity, *numbers in compare(measured(pair, ids), exact, dtype):
                lines.append([quantity, port.name, dtype, *numbers])
    order = list(dict.fromkeys(line[0] for line in lines))
    lines.sort(key=lambda line: (order.index(line[0]), list(UNIT).index(line[2])))
    return f"## {name}, {len(ids)} tokens\n\n{markdown(HEAD, lines)}\n"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, or write them to a file."""
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.errors", description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["tiny-code"], help="zoo names, such as smollm2-135m")
    parser.add_argument("--tokens", type=int, default=129, help="of the text, whose first they are")
    parser.add_argument("--out", type=Path, help="a Markdown file, in place of standard output")
    options = parser.parse_args(arguments)
    backends = ", ".join(f"{port.info().backend} ({port.info().devices[0]})" for port in _installed())
    command = f"python -m dflash_fn.bench.errors --pairs {' '.join(options.pairs)} --tokens {options.tokens}"
    head = f"# Errors against float64\n\n{__doc__}\nMade by `{command}` with {backends}, on {platform.machine()}.\n"
    text = "\n".join([head, *(table(name, options.tokens) for name in options.pairs)])
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
