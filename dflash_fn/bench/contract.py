"""Property P01 at length: whatever the draft, tokens and bits of logits are those of no draft at the same width.

For every prompt, dtype and width, decode without a draft; then with four drafts (the pair's own, one of random
weights, one that is always right, one that is always wrong) at every block size, and compare. Results are appended
to a file as they come; a second run goes on where the first was ended. Exits 1 if anything differed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn.bench.common import add_pair_options, folders, load, markdown, prompt_ids, track
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.prompts import read_rows
from dflash_fn.records import Array, DecodeState, Pair, Proposer
from dflash_fn.sources import Source, read_config

__all__ = ["Trace", "decoded", "main", "random_draft", "scripted"]

Trace = list[tuple[int, str]]
"""Emitted tokens, each with a digest of the bits of the logits that it was chosen from."""


def decoded(state: DecodeState, pair: Pair, count: int, *, block_size: int, proposer: Proposer | None = None) -> Trace:
    """Decode a single row past all stops and return what it emitted."""
    trace: Trace = []
    for _, info in rounds(
        state, pair, max_new_tokens=count, stop_token_ids=(), block_size=block_size, proposer=proposer
    ):
        bits = pair.port.to_numpy(info.logits[0, : len(info.emitted[0])])
        trace += [(token, _digest(line)) for token, line in zip(info.emitted[0], bits, strict=True)]
    return trace


def _digest(line: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(line).tobytes(), digest_size=8).hexdigest()


def scripted(start: int, tokens: list[int], shift: int, vocab_size: int) -> Proposer:
    """Return a proposer that knows the continuation of a `start`-token prompt, and adds `shift` to every token."""

    def propose(state: DecodeState, pair: Pair, size: int) -> Array:
        done = len(state.tokens[0]) - start
        known = (tokens[done : done + size - 1] + [0] * size)[: size - 1]
        block = np.array([[(token + shift) % vocab_size for token in known]], dtype=np.int64)
        return pair.port.asarray(block, pair.target.device)

    return propose


def random_draft(pair: Pair, folder: Path) -> Pair:
    """Return the pair with a draft of the same config and random weights."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    config = read_config(folder)
    spec = pair.draft.spec if pair.draft else None
    assert spec is not None
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as made:
        with safe_open(folder / "model.safetensors", framework="np") as known:
            shapes = {name: known.get_slice(name).get_shape() for name in known.keys()}  # noqa: SIM118
        weights = {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}
        save_file(weights, Path(made) / "model.safetensors")
        draft = pair.port.load_draft(Source("random", config, folder=Path(made)), spec, pair.target)
    return replace(pair, draft=draft)


def _cases(pair: Pair, blocks: list[int], width: int, folder: Path) -> Iterator[tuple[str, Pair, int, int | None]]:
    """Yield (draft's name, pair, block size, shift of a scripted proposer)."""
    plain = replace(pair, draft=None)
    random = random_draft(pair, folder)
    for size in blocks:
        if size <= width:
            yield "own", pair, size, None
            yield "random", random, size, None
            yield "right", plain, size, 0
            yield "wrong", plain, size, 1


def _compare(
    pair: Pair, ids: list[int], options: argparse.Namespace, width: int, folder: Path
) -> Iterator[dict[str, Any]]:
    plain = replace(pair, draft=None)
    base = decoded(prefill(plain, ids, width=width), plain, options.tokens, block_size=1)
    tokens = [token for token, _ in base]
    for name, other, size, shift in _cases(pair, options.blocks, width, folder):
        proposer = None
        if shift is not None:
            proposer = scripted(len(ids), tokens, shift, pair.target.spec.vocab_size)
        trace = decoded(prefill(other, ids, width=width), other, options.tokens, block_size=size, proposer=proposer)
        wrong = [i for i, (mine, theirs) in enumerate(zip(trace, base, strict=True)) if mine != theirs]
        yield {"draft": name, "block_size": size, "tokens": len(trace), "differs_at": wrong[:1]}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.contract", description=__doc__)
    add_pair_options(parser)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--widths", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--blocks", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; a run that was ended goes on from it")
    return parser.parse_args(arguments)


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["pair"], record["dtype"], record["width"], record["prompt"]


def main(arguments: list[str] | None = None) -> int:
    """Run all cases that the output file does not hold yet; return the exit code."""
    options = _options(arguments)
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {_key(record) for record in known}
    with options.out.open("a") as out:
        for dtype in options.dtypes:
            pair = load(options, dtype)
            _, folder = folders(options)
            work = [(width, *row) for width in options.widths for row in read_rows(options.data)]
            for width, name, prompt in track(work, f"{options.pair} {dtype}"):
                head = {"pair": options.pair, "dtype": dtype, "width": width, "prompt": name}
                if _key(head) not in done:
                    ids = prompt_ids(pair, prompt, raw=options.raw)
                    made = [head | found for found in _compare(pair, ids, options, width, folder)]
                    out.writelines(json.dumps(record) + "\n" for record in made)
                    out.flush()
                    known += made
    return _report(known)


def _report(records: list[dict[str, Any]]) -> int:
    rows = []
    for key in sorted({(r["pair"], r["dtype"], r["width"], r["draft"]) for r in records}):
        mine = [r for r in records if (r["pair"], r["dtype"], r["width"], r["draft"]) == key]
        different = [r for r in mine if r["differs_at"]]
        rows.append([*key, len(mine), sum(r["tokens"] for r in mine), len(different)])
    print(markdown(["pair", "dtype", "width", "draft", "runs", "positions", "runs that differ"], rows))  # noqa: T201
    return 1 if any(record["differs_at"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
