"""The golden traces of this folder: what they are of, and how they were made (on port torch, in float32).

    python -m tests.golden.make

makes them anew, which is due when the format, the weights of `tiny-code`, or the designs below change. Each of them
holds something that ports get wrong: ragged rows that accept all or nothing, a prompt longer than a prefill chunk,
layers that slide, a stop token inside a block, a budget that cuts one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import dflash_fn
from dflash_fn.port import Port
from dflash_fn.records import Pair, Proposer
from dflash_fn.trace import record, write_trace
from tests.helpers import proposers
from tests.helpers.runs import decode_plainly
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, without_draft

__all__ = ["GOLDEN", "Golden", "path_of"]

HERE = Path(__file__).parent

Loader = Callable[[Port, Checkpoints], Pair]


@dataclass(frozen=True)
class Golden:
    """A trace, and what it is of.

    Attributes:
        load: loads the pair on a port.
        prompts: one a row.
        width: W.
        options: of `record`.
        plan: accepted tokens a step and row, for a proposer that knows the text; None asks the draft.
    """

    load: Loader
    prompts: list[list[int]]
    width: int
    options: dict[str, Any] = field(default_factory=dict)
    plan: list[list[int]] | None = None


def tiny(design: DraftDesign) -> Loader:
    """Return what loads a tiny pair."""
    return lambda port, checkpoints: checkpoints.pair(port, design)


def tiny_code(port: Port, checkpoints: Checkpoints) -> Pair:
    """Load the zoo's pair."""
    return dflash_fn.load_zoo("tiny-code", port=port, dtype="float32")


LLAMA = DraftDesign(target=TargetDesign(layers=3), seed=107, taps=(0, 2, 1))
QWEN3 = DraftDesign(
    target=TargetDesign(seed=20, family="qwen3", layers=3, window=6), seed=125, taps=(1, 0), window=3, rope="yarn"
)
HYBRID = DraftDesign(target=TargetDesign(family="qwen3_5", layers=4, seed=5), seed=131, taps=(0, 2), window=5)
LONG = np.random.default_rng(7).integers(0, 48, 261).tolist()
CODE = [306, 1009, 964, 13, 314, 301, 260, 351, 273, 393, 314, 537, 306, 928, 9]
"""`def add(a, b):`, `return a + b`, `def sub(`, in tokens of tiny-code."""

GOLDEN = {
    # the draft of seed 107 guesses all of the second row's text and little of the first's
    "llama": Golden(tiny(LLAMA), [[7, 11, 5, 30, 2], [9] * 12], 6, {"max_new_tokens": 16, "stop_token_ids": ()}),
    # 23 comes second in the last block
    "qwen3": Golden(tiny(QWEN3), [LONG], 5, {"max_new_tokens": 40, "stop_token_ids": 23}, plan=[[3], [0], [1], [2]]),
    # gated delta nets, past a whole prefill chunk, with every acceptance of a block of five
    "hybrid": Golden(
        tiny(HYBRID),
        [LONG[:259], LONG[:3]],
        5,
        {"max_new_tokens": 18, "stop_token_ids": ()},
        plan=[[0, 4], [4, 1], [2, 0], [1, 3], [3, 2]],
    ),
    "tiny-code": Golden(tiny_code, [CODE], 8, {"max_new_tokens": 24}),
}


def path_of(name: str) -> Path:
    """Return where a trace lies."""
    return HERE / f"{name}.safetensors"


def make(name: str, folder: Path) -> None:
    """Record a trace and write it."""
    golden = GOLDEN[name]
    pair = golden.load(dflash_fn.get_port("torch"), Checkpoints(folder))
    state = dflash_fn.prefill(pair, golden.prompts, width=golden.width)
    _, trace = record(state, pair, proposer=_proposer(golden, pair), **golden.options)
    write_trace(path_of(name), trace)


def _proposer(golden: Golden, pair: Pair) -> Proposer | None:
    if golden.plan is None:
        return None
    plain = without_draft(pair)
    known = decode_plainly(dflash_fn.prefill(plain, golden.prompts, width=golden.width), plain, 40)
    return proposers.scripted([list(ids) for ids in known.last.tokens], golden.plan)


if __name__ == "__main__":
    for made in GOLDEN:
        with tempfile.TemporaryDirectory() as there:
            make(made, Path(there))
        print(f"{path_of(made).name}: {path_of(made).stat().st_size} bytes")  # noqa: T201
