"""The stage `eval`: what the pair is worth, and its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_fn.load import load_pair
from dflash_fn.prompts import read
from dflash_fn.records import Pair
from dflash_fn.text import encoded
from dflash_fn.train import card, evaluation, files
from dflash_fn.train.options import digest
from dflash_fn.train.run import Run

__all__ = ["eval_stage"]


def eval_stage(run: Run) -> None:
    """Measure the pair, and write the model card."""
    fitted = run.need("fit")
    made_with = f"{fitted['digest']}-{digest(run.options.eval)}{run.kernels}"
    if not run.done("eval", made_with):
        pair = load_pair(
            run.target,
            run.folder / "draft",
            port=run.port,
            dtype="float32",
            device=run.options.device,
            compile=run.options.compile,
            name=run.options.name,
        )
        run.finish("eval", made_with, _measured(run, pair))
    stages = ("corpus", "target", "data", "fit", "eval")
    text = card.card(run.options, {stage: run.fact(stage) for stage in stages})
    files.write_text(run.folder / "MODEL_CARD.md", text)


def _measured(run: Run, pair: Pair) -> dict[str, Any]:
    options, sets = run.options.eval, _prompt_sets(run, pair)
    total, done = sum(map(len, sets.values())), 0

    def advance() -> None:
        nonlocal done
        done += 1
        run.watch("eval", done, total, {})
        run.pause()

    found, exact, timed, shown = {}, True, [], []
    for name, prompts in sets.items():
        answered = evaluation.evaluate(pair, prompts, options, advance=advance)
        exact = exact and evaluation.exactness(pair, prompts, answered)
        free = evaluation.baseline(pair, prompts, options)
        found[name] = evaluation.summary(answered) | {"ngrams": free["tau"], "ngrams_first": free["tau_first"]}
        timed += prompts[: evaluation.TIMED // 2]
        shown += evaluation.samples(pair, prompts, answered)
    held = run.folder / "corpus" / "held_out.json"
    heads = [text for _, text in files.read_json(held)] if held.is_file() else []
    return {
        "sets": found,
        "exact": exact if sets else None,
        "bits_per_byte": evaluation.bits_per_byte(pair, heads, options.head_bytes),
        "speed": evaluation.speed(pair, timed, options),
        "samples": shown,
    }


def _prompt_sets(run: Run, pair: Pair) -> dict[str, list[tuple[str, list[int]]]]:
    """Return the prompts to measure on: heads of held-out files, and JSONL rows that leave room for an answer."""
    options, sets = run.options.eval, {}
    room = pair.target.spec.max_context - options.block_size
    held = run.folder / "corpus" / "held_out.json"
    if held.is_file():
        # a token is rarely longer than sixteen bytes, and a whole file may be longer than the context
        heads = [
            (name, pair.tokenizer.encode(text[: 16 * options.file_prompt])) for name, text in files.read_json(held)
        ]
        sets["held-out files"] = [(name, ids[: options.file_prompt]) for name, ids in heads]
    for file in options.prompts:
        rows = read(file)[: options.rows]
        named = [
            (f"{Path(file).stem}/{i}", encoded(pair.tokenizer, turns[0], raw=options.raw))
            for i, turns in enumerate(rows)
        ]
        sets[Path(file).stem] = [(name, ids) for name, ids in named if len(ids) < room]
    return {name: prompts for name, prompts in sets.items() if prompts}
