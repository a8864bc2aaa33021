"""Tokens per second of ways to decode the same prompts, one beside the other in the same run.

The ways: transformers' greedy `generate`; upstream's `dflash_generate` with the same weights, if the package
`dflash` is installed; ours without a draft at width 1 and at the block's width; ours with the draft. Every prompt
goes through all ways before the next, so that a machine that changes its pace does so for all. Times are whole
calls, prompt included, in float32, past all stop tokens.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_fn.bench.common import add_pair_options, folders, load, markdown, prompt_ids, track
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.prompts import read_rows
from dflash_fn.records import Pair

__all__ = ["Way", "main"]


@dataclass(slots=True)
class Way:
    """A way of decoding, and what it came to.

    Attributes:
        name: for the table.
        run: takes token ids and a number of tokens; returns the emitted tokens and the number emitted by each step.
        seconds: per prompt.
        emitted: tokens per prompt.
        per_step: numbers emitted by the steps of all prompts.
    """

    name: str
    run: Callable[[list[int], int], tuple[list[int], list[int]]]
    seconds: list[float] = field(default_factory=list)
    emitted: list[list[int]] = field(default_factory=list)
    per_step: list[int] = field(default_factory=list)

    def time(self, ids: list[int], count: int) -> None:
        """Run one prompt and keep what it took."""
        begun = time.perf_counter()
        tokens, steps = self.run(ids, count)
        self.seconds.append(time.perf_counter() - begun)
        self.emitted.append(tokens)
        self.per_step += steps

    @property
    def rate(self) -> float:
        """Tokens per second over all prompts."""
        return sum(map(len, self.emitted)) / sum(self.seconds)

    @property
    def tau(self) -> float | None:
        """Mean tokens emitted per step, or None for ways without steps."""
        return sum(self.per_step) / len(self.per_step) if self.per_step else None


def _ours(pair: Pair, width: int, block_size: int) -> Callable[[list[int], int], tuple[list[int], list[int]]]:
    def run(ids: list[int], count: int) -> tuple[list[int], list[int]]:
        state = prefill(pair, ids, width=width)
        infos = [
            info for _, info in rounds(state, pair, max_new_tokens=count, stop_token_ids=(), block_size=block_size)
        ]
        steps = [len(info.emitted[0]) for info in infos if info.step > 0] if block_size > 1 else []
        return [token for info in infos for token in info.emitted[0]], steps

    return run


def _generate(target: Any) -> Callable[[list[int], int], tuple[list[int], list[int]]]:
    import torch

    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def run(ids: list[int], count: int) -> tuple[list[int], list[int]]:
        given = torch.tensor([ids])
        with torch.inference_mode():
            out = target.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, **options)
        return out[0, len(ids) :].tolist(), []

    return run


def _upstream(target: Any, folder: Path) -> Callable[[list[int], int], tuple[list[int], list[int]]]:
    import torch

    upstream: Any = importlib.import_module("dflash.model")

    upstream._cuda_time = time.perf_counter  # it waits for CUDA whether there is one or not
    draft = upstream.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()

    def run(ids: list[int], count: int) -> tuple[list[int], list[int]]:
        made = upstream.dflash_generate(draft, target, torch.tensor([ids]), count, None, return_stats=True)
        return made.output_ids[0, len(ids) :].tolist(), list(made.acceptance_lengths)

    return run


def _ways(options: argparse.Namespace, pair: Pair) -> list[Way]:
    from transformers import AutoModelForCausalLM

    checkpoint, folder = folders(options)
    target = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()
    plain = replace(pair, draft=None)
    ways = [Way("transformers generate", _generate(target))]
    try:
        ways.append(Way("upstream dflash_generate", _upstream(target, folder)))
    except ImportError:
        print("package `dflash` is not installed: upstream is left out", file=sys.stderr)  # noqa: T201
    block = options.block_size
    return [
        *ways,
        Way("ours, no draft, width 1", _ours(plain, 1, 1)),
        Way(f"ours, no draft, width {block}", _ours(plain, block, 1)),
        Way(f"ours, block {block}", _ours(pair, block, block)),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Time all ways and print a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.speed", description=__doc__)
    add_pair_options(parser)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--block-size", type=int, default=8)
    options = parser.parse_args(arguments)
    pair = load(options, "float32")
    ways = _ways(options, pair)
    prompts = [prompt_ids(pair, prompt, raw=options.raw) for _, prompt in read_rows(options.data)]
    for way in ways:
        way.run(prompts[0], 8)
    for ids in track(prompts, options.pair):
        for way in ways:
            way.time(ids, options.tokens)
    _report(ways)
    return 0


def _report(ways: list[Way]) -> None:
    first = ways[0]
    rows = [
        [
            way.name,
            f"{way.rate:.1f}",
            f"{way.rate / first.rate:.2f}",
            f"{way.tau:.2f}" if way.tau else "-",
            f"{sum(a == b for a, b in zip(way.emitted, first.emitted, strict=True))} of {len(way.emitted)}",
        ]
        for way in ways
    ]
    head = ["way", "tokens/s", f"against {first.name}", "tau", "same text as it"]
    print(markdown(head, rows))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
