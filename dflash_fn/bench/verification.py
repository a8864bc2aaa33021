"""One verification and one step of the torch port against their own matrix products alone.

A verification is a step without a draft, and its products are the target's, of W tokens. A step's are those and the
draft's: what it makes of the context features, its layers over the block, and the head over the B - 1 slots after the
anchor. They are taken as `linear(x, w)`, as `mm(w, x.T)`, packed by oneDNN, and with `--compile` by our own kernels.
A step without a draft at width 1 comes first: what it takes over what a step takes, times tau, is the speed-up. All
run in turn, in one process; each round gives a ratio, and the median of the ratios is what counts. Every step
starts from the same state.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_fn import zoo
from dflash_fn.bench.common import markdown
from dflash_fn.load import load_pair
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.records import DecodeState, Pair

__all__ = ["main"]

Shape = tuple[int, int, int]
"""Tokens, inputs and outputs of a product."""


def _target_products(pair: Pair, width: int) -> list[Shape]:
    target = pair.target.spec
    return _layers(target, width) * target.num_layers + [(width, target.hidden_size, target.vocab_size)]


def _draft_products(pair: Pair, width: int, size: int) -> list[Shape]:
    assert pair.draft is not None
    draft, hidden = pair.draft.spec, pair.draft.spec.hidden_size
    context = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim
    return [
        (width, len(draft.target_layer_ids) * hidden, hidden),
        (width, hidden, context),
        *_layers(draft, size) * draft.num_layers,
        (size - 1, hidden, draft.vocab_size),
    ]


def _layers(spec: Any, tokens: int) -> list[Shape]:
    """Return the products of a layer of attention and a gated MLP."""
    hidden, inner, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    qkv = heads + 2 * spec.num_kv_heads * spec.head_dim
    return [(tokens, hidden, qkv), (tokens, heads, hidden), (tokens, hidden, 2 * inner), (tokens, inner, hidden)]


def _ways(shapes: list[Shape], dtype: str, *, compiled: bool) -> dict[str, Callable[[], None]]:
    """Return functions that take all these products, a function a way; each product has a weight of its own."""
    import torch
    from dflash_fn_torch.ops import pack, product
    from dflash_fn_torch.panels import in_panels

    kind = getattr(torch, dtype)
    weights = [torch.randn(outputs, inputs, dtype=kind) for _, inputs, outputs in shapes]
    x = [torch.randn(tokens, inputs, dtype=kind) for tokens, inputs, _ in shapes]
    packed = [pack(weight) for weight in weights]
    panels = [in_panels(weight) for weight in weights] if compiled else []

    def every(take: Callable[[Any, Any], Any], matrices: list[Any]) -> Callable[[], None]:
        @torch.inference_mode()
        def run() -> None:
            for given, matrix in zip(x, matrices, strict=True):
                take(given, matrix)

        return run

    ways = {
        "linear(x, w)": every(torch.nn.functional.linear, weights),
        "mm(w, x.T)": every(lambda given, weight: torch.mm(weight, given.t()), weights),
        "packed by oneDNN": every(product, packed),
    }
    return ways | ({"our kernels": every(product, panels)} if compiled else {})


def _step(pair: Pair, state: DecodeState, size: int) -> Callable[[], Iterator[None]]:
    """Return what goes up to a step at its first `next`, and takes it at the second."""

    def begin() -> Iterator[None]:
        steps = rounds(state, pair, max_new_tokens=64, stop_token_ids=(), block_size=size)
        next(steps)  # the opening step drafts nothing
        yield
        next(steps)
        yield

    return begin


def _plain(run: Callable[[], None]) -> Callable[[], Iterator[None]]:
    def begin() -> Iterator[None]:
        yield
        run()
        yield

    return begin


def _seconds(begin: Callable[[], Iterator[None]]) -> float:
    going = begin()
    next(going)
    begun = time.perf_counter()
    next(going)
    return time.perf_counter() - begun


def _timed(ways: dict[str, Callable[[], Iterator[None]]], count: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(count + 2):
        for name, begin in ways.items():
            taken = _seconds(begin)
            if turn >= 2:
                times[name].append(taken)
    return times


def _state(pair: Pair, context: int, width: int) -> DecodeState:
    ids = np.random.default_rng(0).integers(0, pair.target.spec.vocab_size, context + 1)
    return prefill(pair, ids.tolist(), width=width)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print two or three tables; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.verification", description=__doc__)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--draft", help="a draft's folder or hub id, in place of the pair's own")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true", help="run on kernels compiled for this machine")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    files = zoo.fetch(options.pair)
    draft = options.draft or files.draft
    pair = load_pair(files.target, draft, dtype=options.dtype, device="cpu", compile=options.compile)
    width, lone = options.width, replace(pair, draft=None)
    if width > 1:
        state = _state(lone, options.context, 1)
        _measure("one token, width 1", _step(lone, state, 1), _target_products(pair, 1), options)
    shapes = _target_products(pair, width)
    _measure("one verification", _step(lone, _state(lone, options.context, width), 1), shapes, options)
    if pair.draft:
        shapes += _draft_products(pair, width, width)
        state = _state(pair, options.context, width)
        _measure(f"one step, block {width}", _step(pair, state, width), shapes, options)
    return 0


def _measure(name: str, begin: Callable[[], Iterator[None]], shapes: list[Shape], options: argparse.Namespace) -> None:
    ways = {name: begin}
    for way, run in _ways(shapes, options.dtype, compiled=options.compile).items():
        ways[way] = _plain(run)
    _report(name, _timed(ways, options.rounds))


def _report(first: str, times: dict[str, list[float]]) -> None:
    whole = times[first]
    rows = []
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(whole, taken, strict=True))
        rows.append([name, f"{statistics.median(taken) * 1e3:.2f}", f"{ratio:.2f}"])
    print(markdown(["what", "median, ms", f"{first} / this, median ratio"], rows))  # noqa: T201
    print()  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
