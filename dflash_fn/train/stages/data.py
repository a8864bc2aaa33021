"""The stage `data`: the target writes what the draft learns from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_fn import errors, fingerprint
from dflash_fn.load import load_pair
from dflash_fn.records import Pair
from dflash_fn.train import answers, texts
from dflash_fn.train.options import digest
from dflash_fn.train.run import Run
from dflash_fn.train.texts import Texts

__all__ = ["data_stage"]


def data_stage(run: Run) -> None:
    """Let the target write what the draft learns from."""
    options, folder = run.options.text, run.folder / "data"
    source = fingerprint.of_folder(run.target)
    made_with = f"{digest(options)}-{source}-{run.read}-{run.options.seed}{run.kernels}"
    if run.done("data", made_with):
        return
    pair = load_pair(run.target, port=run.port, dtype="float32", device=run.options.device, compile=run.options.compile)
    ask, pieces = _asking(run, pair)
    parts = []
    for first in range(0, pieces, options.rows):
        run.pause()
        part = folder / f"parts-{digest(made_with)}" / f"{first:08}.safetensors"
        if not part.is_file():
            asked = ask(first, min(first + options.rows, pieces))
            texts.write(part, texts.pack(answers.answer(pair, asked, options.max_new_tokens)))
        parts.append(texts.read(part))
        run.watch("data", min(first + options.rows, pieces), pieces, {})
    made, dropped = _sifted(run, pair, texts.join(parts))
    if len(made) < 2:
        raise errors.InputError(f"data: {len(made)} texts are left of {pieces}; ask for more, or loosen least_distinct")
    texts.write(folder / "texts.safetensors", made)
    facts = {"texts": len(made), "tokens": len(made.tokens), "answer_tokens": made.answer_tokens, "digest": made.digest}
    run.finish("data", made_with, facts | dropped, [folder / "texts.safetensors"])


def _asking(run: Run, pair: Pair) -> tuple[answers.Ask, int]:
    options = run.options.text
    if options.kind == "given":
        return answers.ask_given(pair, options.files)
    if options.kind == "chat":
        return answers.ask_chat(pair, options, run.options.seed), options.pieces
    if options.files or run.options.corpus is None:
        return answers.ask_stream(pair, _text_stream(pair, options.files), options, run.options.seed), options.pieces
    run.need("corpus")
    stream = np.load(run.folder / "corpus" / "train.npy", mmap_mode="r")
    return answers.ask_stream(pair, stream, options, run.options.seed), options.pieces


def _text_stream(pair: Pair, names: Sequence[str]) -> np.ndarray:
    """Encode plain text files, an end-of-text token after each."""
    if not names:
        raise errors.InputError("text.files: got none, expected text files to go on from, or a corpus")
    ids: list[int] = []
    for name in names:
        try:
            text = Path(name).read_text(encoding="utf-8")
            # not verbose: that a whole file is longer than the context is no news
            ids += [*pair.tokenizer.encode(text, verbose=False), *pair.target.spec.eos_token_ids[:1]]
        except (OSError, UnicodeDecodeError) as error:
            raise errors.InputError(f"text.files: {name} cannot be read ({error})") from None
    return np.array(ids, dtype=np.int32)


def _sifted(run: Run, pair: Pair, made: Texts) -> tuple[Texts, dict[str, int]]:
    """Drop loops, answers that are there already, and what is near a prompt that is to be kept out."""
    excluded, seen, kept = run.excluded(), set(), []
    dropped = {"loops": 0, "duplicates": 0, "near": 0, "prompts": excluded.prompts}
    for index in range(len(made)):
        ids, start = made[index].tolist(), int(made.starts[index])
        if texts.distinct_share(ids[start:]) < run.options.text.least_distinct:
            dropped["loops"] += 1
        elif tuple(ids[max(0, start - 8) :]) in seen:
            dropped["duplicates"] += 1
        elif excluded.near(pair.tokenizer.decode(ids)):
            dropped["near"] += 1
        else:
            kept.append((ids, start))
            seen.add(tuple(ids[max(0, start - 8) :]))
    return texts.pack(kept), dropped
