"""One process of several that share models: run by `tests/test_torch_shares.py`, which compares what they write.

Usage: python -m tests.helpers.share_worker FOLDER RANK COUNT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import dflash_fn
from dflash_fn import errors
from dflash_fn.records import Pair
from tests.helpers import proposers
from tests.helpers.runs import Run, decode_plainly, run
from tests.helpers.tiny import DraftDesign, TargetDesign, without_draft

__all__ = ["CASES", "PROMPTS", "TOKENS", "WAYS", "Case"]

PROMPTS = {
    "short": [[5, 9, 2, 7]],
    "chunks": [[(7 * i * i + 3 * i) % 31 for i in range(300)]],
    "rows": [[5, 9, 2, 7, 1, 30], [3]],
}
TOKENS = 10

WAYS = {"short": ("right", "draft"), "chunks": ("draft",), "rows": ("corrupted", "draft")}
"""Who drafts after each prompt: every message between processes costs a millisecond here."""


@dataclass(frozen=True)
class Case:
    """A pair, and in how many shares it is run."""

    design: DraftDesign
    counts: tuple[int, ...] = (2,)
    dtype: str = "float32"


LLAMA = TargetDesign(seed=3, kv_heads=4)
QWEN3 = TargetDesign(seed=20, family="qwen3", layers=3, vocab=37, tied=True, bias=True, window=6)
HYBRID = TargetDesign(seed=4, family="qwen3_5", layers=4, heads=4, kv_heads=2, key_heads=2, value_heads=4)

CASES = {
    "llama": Case(DraftDesign(LLAMA, kv_heads=4), (2, 4)),
    "qwen3": Case(DraftDesign(QWEN3, taps=(2, 0), window=5)),
    "hybrid": Case(DraftDesign(HYBRID, taps=(1, 3))),
    "bfloat16": Case(DraftDesign(TargetDesign(seed=5, tied=True)), dtype="bfloat16"),
}


def folders(root: Path, name: str) -> tuple[Path, Path]:
    """Where a case's checkpoints lie."""
    return root / f"{name}-target", root / f"{name}-draft"


def contract(pair: Pair, prompt: list[list[int]], ways: tuple[str, ...]) -> tuple[Run, dict[str, bool]]:
    """Decode with the draft, and say of each way of drafting whether all its bits are those without a draft (P01)."""
    plain = decode_plainly(dflash_fn.prefill(pair, prompt), without_draft(pair), TOKENS)
    texts = plain.last.tokens
    guesses = {"draft": None, "right": proposers.right(texts), "corrupted": proposers.corrupted(texts, 1, 0.3)}
    drafted, same = plain, {}
    for name in ways:
        made = run(dflash_fn.prefill(pair, prompt), pair, max_new_tokens=TOKENS, proposer=guesses[name])
        same[name] = made.emitted == plain.emitted and all(
            mine.tobytes() == other.tobytes() for mine, other in zip(made.logits, plain.logits, strict=True)
        )
        drafted = made if name == "draft" else drafted
    return drafted, same


def run_case(root: Path, name: str, pair: Pair) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Run a case's prompts, then save a state and go on from one that a single process saved."""
    said, arrays = {}, {}
    for key, prompt in PROMPTS.items():
        made, same = contract(pair, prompt, WAYS[key])
        said[key] = {"emitted": made.emitted, "accepted": made.accepted(), "same": same}
        arrays |= {f"{name}.{key}.{row}": logits for row, logits in enumerate(made.logits)}
    middle = dflash_fn.decode(dflash_fn.prefill(pair, PROMPTS["rows"]), pair, max_new_tokens=5, stop_token_ids=())
    dflash_fn.save_state(root / f"{name}-shared.state", middle, pair)
    on = run(dflash_fn.load_state(root / f"{name}-shared.state", pair), pair, max_new_tokens=8)
    said["resumed"] = on.emitted
    said["resumed_alike"] = on.emitted == run(middle, pair, max_new_tokens=8).emitted
    said["moved"] = run(dflash_fn.load_state(root / f"{name}-single.state", pair), pair, max_new_tokens=8).emitted
    said["layout"] = pair.target.layout
    said["heads"] = [[t.shape[1] for t in middle.target_cache.full.buffer.keys][:1], pair.target.weights.head.shape[0]]
    return said, arrays


def refusals(root: Path, mesh: Any, pair: Pair) -> dict[str, str]:
    """What is said of meshes and models for which sharing cannot be."""
    target, draft = folders(root, "llama")
    odd, odd_draft = folders(root, "odd")
    single = dflash_fn.load_pair(target, draft)
    tries: dict[str, Callable[[], object]] = {
        "type": lambda: dflash_fn.load_pair(target, mesh="two"),
        "number": lambda: dflash_fn.load_pair(target, mesh=3),
        "shape": lambda: dflash_fn.load_pair(target, mesh=init_device_mesh("cpu", (1, mesh.size()))),
        "target": lambda: dflash_fn.load_pair(odd, mesh=mesh),
        "draft": lambda: dflash_fn.load_pair(target, odd_draft, mesh=mesh),
        "device": lambda: dflash_fn.load_pair(target, mesh=mesh, device="cpu"),
        "both": lambda: dflash_fn.load_pair(target, mesh=mesh, device_map="auto"),
        "state": lambda: dflash_fn.decode(dflash_fn.prefill(single, [1, 2]), pair),
    }
    return {name: message(attempt) for name, attempt in tries.items()}


def in_memory(folder: Path) -> Any:
    """Return a folder's target as a module, with what the port asks of one."""
    model: Any = torch.nn.Module()
    config = json.loads((folder / "config.json").read_text())
    model.config = SimpleNamespace(to_dict=lambda: config)
    tensors = load_file(folder / "model.safetensors")
    model.state_dict = lambda: tensors
    return model


def message(attempt: Callable[[], object]) -> str:
    """Return the text of the error that an attempt ends in."""
    try:
        attempt()
    except errors.DflashError as error:
        return str(error)
    return "no error"


def main(folder: str, rank: str, count: str) -> None:
    """Run every case that is for this number of shares."""
    root, me, shares = Path(folder), int(rank), int(count)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store-{shares}", rank=me, world_size=shares)
    mesh = init_device_mesh("cpu", (shares,))
    said: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, case in CASES.items():
        if shares in case.counts:
            pair = dflash_fn.load_pair(*folders(root, name), mesh=mesh, dtype=case.dtype)
            said[name], made = run_case(root, name, pair)
            arrays |= made
            if (name, shares) == ("llama", 2):
                said["refused"] = refusals(root, mesh, pair)
                held = dflash_fn.load_pair(in_memory(folders(root, name)[0]), mesh=mesh, dtype="float32")
                said["memory"] = decode_plainly(dflash_fn.prefill(held, PROMPTS["short"]), held, TOKENS).emitted
    (root / f"said-{shares}-{me}.json").write_text(json.dumps(said))
    np.savez(root / f"logits-{shares}-{me}.npz", **arrays)  # pyright: ignore[reportArgumentType]
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
