"""One verification of the torch port against its own matrix products alone.

All run in turn, in one process; each round gives a ratio, and the median of the ratios is what counts. The products
are taken in both orientations, `linear(x, w)` and `mm(w, x.T).T`, and in the layout in which the port keeps weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_fn import zoo
from dflash_fn.bench.common import markdown
from dflash_fn.load import load_pair
from dflash_fn.opening import prefill
from dflash_fn.records import DecodeState, Pair
from dflash_fn.steps import propose, verify

__all__ = ["main"]


def _seconds(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _products(pair: Pair, width: int) -> dict[str, Callable[[], None]]:
    """Return functions that take every matrix product of one verification, a function an orientation."""
    import torch
    from dflash_fn_torch.ops import product

    packed = [
        matrix
        for layer in pair.target.weights.layers
        for projection in (layer.qkv, layer.out, layer.gate_up, layer.down)
        for matrix in projection.weights
    ] + [pair.target.weights.head]
    weights = [matrix.to_dense() if matrix.is_mkldnn else matrix for matrix in packed]
    inputs = {size: torch.randn(width, size, dtype=weights[0].dtype) for size in {w.shape[1] for w in weights}}

    @torch.inference_mode()
    def as_loaded() -> None:
        for matrix in packed:
            product(inputs[matrix.shape[1]], matrix)

    @torch.inference_mode()
    def linear() -> None:
        for matrix in weights:
            torch.nn.functional.linear(inputs[matrix.shape[1]], matrix)

    @torch.inference_mode()
    def turned() -> None:
        for matrix in weights:
            torch.mm(matrix, inputs[matrix.shape[1]].t())

    return {"linear(x, w)": linear, "mm(w, x.T)": turned, "packed by oneDNN": as_loaded}


def _state(pair: Pair, context: int, width: int) -> DecodeState:
    ids = np.random.default_rng(0).integers(0, pair.target.spec.vocab_size, context + 1)
    return prefill(pair, ids.tolist(), width=width)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.verification", description=__doc__)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    pair = load_pair(zoo.fetch(options.pair).target, dtype=options.dtype)
    state = _state(pair, options.context, options.width)
    proposal = propose(state, pair, block_size=1)
    ways: dict[str, Callable[[], Any]] = {"one verification": lambda: verify(state, pair, proposal)}
    ways |= _products(pair, options.width)
    times = {name: [] for name in ways}
    for turn in range(options.rounds + 2):
        for name, run in ways.items():
            taken = _seconds(run)
            if turn >= 2:
                times[name].append(taken)
    _report(times)
    return 0


def _report(times: dict[str, list[float]]) -> None:
    whole = times["one verification"]
    rows = []
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(whole, taken, strict=True))
        rows.append([name, f"{statistics.median(taken) * 1e3:.1f}", f"{ratio:.2f}"])
    print(markdown(["what", "median, ms", "verification / this, median ratio"], rows))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
