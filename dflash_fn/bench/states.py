"""Hybrids and windows: what selecting a state costs, how a step grows with the context, and how states grow.

    python -m dflash_fn.bench.states select      two ways to select a recurrent state, at the size of a real layer
    python -m dflash_fn.bench.states share       what `select` takes of a step of a hybrid
    python -m dflash_fn.bench.states contexts    cost of a step and size of a state, by kind of layer and context

`select` measures the torch port; the others take any. Times that are compared are taken in turn. Those of `select` and
`share` are medians. Those of `contexts` are first deciles, which other work on the machine hardly moves, with the
median beside them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dflash_fn import errors
from dflash_fn.bench.common import markdown
from dflash_fn.bench.holdings import bytes_held
from dflash_fn.bench.models import KINDS, SIZES, random_pair
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.records import Pair
from dflash_fn.registry import get_port

__all__ = ["main"]

Key = TypeVar("Key", bound=Hashable)

LAYERS = 48
"""Gated delta nets of Qwen3.6-27B."""


def _seconds(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _times(ways: Mapping[Key, Callable[[], Any]], turns: int) -> dict[Key, list[float]]:
    """Run everything in turn; return the seconds that each took, the first turn left out."""
    times: dict[Key, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, run in ways.items():
            taken = _seconds(run)
            if turn:
                times[name].append(taken)
    return times


def _medians(ways: Mapping[Key, Callable[[], Any]], turns: int) -> dict[Key, float]:
    return {name: statistics.median(taken) for name, taken in _times(ways, turns).items()}


# --- select ---


def _select(options: argparse.Namespace, _folder: Path) -> None:
    """Compare a tape that is replayed with states that are all kept."""
    import torch

    with torch.inference_mode():
        rows = [row for width in options.blocks for row in _of_width(width, options.turns)]
    head = ["block", "what", f"ms, {LAYERS} layers", f"MB kept, {LAYERS} layers"]
    print(markdown(head, rows))  # noqa: T201


def _of_width(width: int, turns: int) -> Iterator[list[Any]]:
    import torch
    from dflash_fn_torch import gated_delta

    heads, dim = 48, 128
    state = torch.randn(heads, dim, dim) / dim**0.5
    q, k, v = (torch.nn.functional.normalize(torch.randn(width, heads, dim), dim=-1) for _ in range(3))
    decays, rates = -torch.rand(width, heads) / 10, torch.rand(width, heads)
    row = [part[None] for part in (q, k, v, decays, rates)]
    _, (deltas,), (end,) = gated_delta.stepped([state], *row)
    conv = torch.zeros(width + 3, 2 * 16 * dim + heads * dim)
    tape = gated_delta.Tape(gated_delta.State(conv[:3], state), conv, k, deltas, decays, end)
    all_states = torch.empty(width, heads, dim, dim)

    def stacked() -> None:
        state = tape.start.recurrent.clone()
        factors = torch.exp(decays)
        for slot in range(width):
            gated_delta.absorb(state, k[slot], deltas[slot], factors[slot])
            all_states[slot] = state

    def updated() -> None:
        grown = gated_delta.Tape(tape.start, conv, _grown(k), _grown(deltas), _grown(decays), end)
        gated_delta.replay(grown, width)

    counts = _counts(width)
    ways = {f"select {count} of {width}": _replayed(tape, count) for count in counts}
    ways |= {"pass with a tape": lambda: gated_delta.stepped([state], *row)}
    ways |= {"keep all states: added to the pass": stacked, "its updates alone": updated}
    taken = _medians(ways, turns)
    taken["keep all states: added to the pass"] -= taken.pop("its updates alone")
    kept = {"pass with a tape": sum(x.nbytes for x in (k, deltas, decays, conv, end))}
    kept["keep all states: added to the pass"] = all_states.nbytes
    for name, seconds in taken.items():
        size = f"{kept[name] * LAYERS / 1e6:.0f}" if name in kept else ""
        yield [width, name, f"{seconds * LAYERS * 1e3:.1f}", size]


def _counts(width: int) -> list[int]:
    return sorted({1, width // 2, width - 1, width} - {0})


def _replayed(tape: Any, count: int) -> Callable[[], Any]:
    from dflash_fn_torch import gated_delta

    return lambda: gated_delta.replay(tape, count)


def _grown(x: Any) -> Any:
    """Add a token, so that a replay of all the others is not answered from the state at the end."""
    import torch

    return torch.cat([x, x[:1]])


# --- share and contexts ---


def _share(options: argparse.Namespace, folder: Path) -> None:
    """Time target passes and selects of a hybrid of real layer sizes, as they follow each other in a step."""
    pair, rows = random_pair(options.port, "hybrid", folder, **SIZES), []
    ids = _ids(pair, options.context)
    for width in options.blocks:
        cache = prefill(pair, ids, width=width).target_cache
        block = pair.port.asarray(np.array([_ids(pair, width)]), pair.target.device)

        def verified(cache: Any = cache, block: Any = block) -> Any:
            made = pair.port.target_pass(pair.target, cache, block, taps=(), head=True, exact_rows=False)
            pair.port.to_numpy(made.logits)
            return made.family

        family = verified()
        ways: dict[str, Callable[[], Any]] = {"pass": verified}
        ways |= {str(count): _selected(pair, family, count) for count in _counts(width)}
        taken = _medians(ways, options.turns)
        whole = taken.pop("pass")
        rows += [
            [width, f"{whole * 1e3:.1f}", count, f"{seconds * 1e3:.2f}", f"{seconds / (whole + seconds):.1%}"]
            for count, seconds in taken.items()
        ]
    print(markdown(["block", "pass, ms", "tokens emitted", "select, ms", "share of both"], rows))  # noqa: T201


def _selected(pair: Pair, family: Any, count: int) -> Callable[[], Any]:
    return lambda: pair.port.select(family, (count,))


def _contexts(options: argparse.Namespace, folder: Path) -> None:
    """Time steps after longer and longer prompts, for models of one kind of layer each."""
    pairs = {kind: random_pair(options.port, kind, folder, window=options.window, **SIZES) for kind in options.kinds}
    states = {
        (kind, context): prefill(pair, _ids(pair, context), width=options.blocks[0])
        for kind, pair in pairs.items()
        for context in options.contexts
    }
    ways = {key: _steps(pairs[key[0]], state) for key, state in states.items()}
    times = _times(ways, options.turns)
    low = {key: float(np.quantile(taken, 0.1)) for key, taken in times.items()}
    first = {kind: min(options.contexts, key=lambda context: abs(context - 1000)) for kind in pairs}
    rows = [
        [kind, context, f"{low[kind, context] * 1e3:.1f}", f"{statistics.median(times[kind, context]) * 1e3:.1f}",
         f"{low[kind, context] / low[kind, first[kind]]:.2f}", f"{bytes_held(state) / 1e6:.2f}"]
        for (kind, context), state in states.items()
    ]  # fmt: skip
    head = ["layers", "context", "step, ms", "median", "step to the one at 1k", "MB held"]
    print(markdown(head, rows))  # noqa: T201


def _steps(pair: Pair, state: Any) -> Callable[[], Any]:
    return lambda: list(rounds(state, pair, max_new_tokens=1, block_size=1, stop_token_ids=()))


def _ids(pair: Pair, count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, pair.target.spec.vocab_size, count).tolist()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.states", description=__doc__)
    parser.add_argument("what", choices=["select", "share", "contexts"])
    parser.add_argument("--port", default="torch")
    parser.add_argument("--blocks", nargs="+", type=_positive, default=[8, 16])
    parser.add_argument("--context", type=_positive, default=200)
    parser.add_argument("--contexts", nargs="+", type=_positive, default=[128, 1024, 4096, 16384])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--window", type=_positive, default=512)
    parser.add_argument("--turns", type=_positive, default=15)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        get_port("torch" if options.what == "select" else options.port)
        with tempfile.TemporaryDirectory() as made:
            ways = {"select": _select, "share": _share, "contexts": _contexts}
            ways[options.what](options, Path(made))
    except errors.DflashError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
