"""The stage `corpus`: sources, tokenizer, and both as streams of tokens."""

from __future__ import annotations

import sys

from dflash_fn import errors
from dflash_fn.train import bpe, files
from dflash_fn.train.corpus import collect
from dflash_fn.train.options import digest
from dflash_fn.train.run import Run

__all__ = ["corpus_stage"]


def corpus_stage(run: Run) -> None:
    """Collect the sources, make the tokenizer, and encode everything."""
    options, folder = run.options.corpus, run.folder / "corpus"
    if options is None:
        raise errors.InputError("the stage `corpus` needs options of a corpus; this run has none")
    made_with = f"{digest(options)}-{run.read}"
    if run.done("corpus", made_with):
        return
    run.watch("corpus", 0, 3, {})
    found = collect(options, run.excluded(), run.folder / "packages")
    run.watch("corpus", 1, 3, {"files": len(found.train)})
    train = [text for _, text in found.train]
    tokenizer = bpe.make(_spread(train), options.vocab_size, most_bytes=options.tokenizer_bytes)
    run.watch("corpus", 2, 3, {})
    stream = bpe.encode(tokenizer, train)
    files.write_array(folder / "train.npy", stream)
    files.write_array(folder / "held_out.npy", bpe.encode(tokenizer, [text for _, text in found.held_out]))
    files.write_json(folder / "held_out.json", [list(entry) for entry in found.held_out])
    (folder / "tokenizer").mkdir(exist_ok=True)
    bpe.write(
        tokenizer, folder / "tokenizer", max_context=run.options.target.max_context if run.options.target else 2048
    )
    facts = {
        "files": len(found.train),
        "bytes": sum(len(text.encode()) for text in train),
        "tokens": len(stream),
        "vocabulary": options.vocab_size,
        "digest": files.array_digest(stream),
        "python": sys.version.split()[0] if options.stdlib else None,
        "packages": [{"name": p.name, "licence": p.licence, "sha256": p.sha256} for p in found.packages],
        "held_out": [name for name, _ in found.held_out],
        "near": list(found.near),
    }
    tokens = [folder / name for name in ("train.npy", "held_out.npy", "held_out.json")]
    run.finish("corpus", made_with, facts, (*tokens, *(folder / "tokenizer").iterdir()))


def _spread(items: list[str]) -> list[str]:
    """Return texts so that any first part of the list is a sample of all of it."""
    return [item for first in range(16) for item in items[first::16]]
