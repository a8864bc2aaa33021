"""The stages of a run, each of which can run alone, is skipped where its result is there, and resumes where it was cut.

    corpus -> target -> data -> features -> fit -> eval

`corpus` and `target` are for recipes that train the target too.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn import errors, fingerprint
from dflash_fn.load import load_pair
from dflash_fn.port import Port
from dflash_fn.records import Pair
from dflash_fn.sources import resolve
from dflash_fn.train import answers, bpe, card, checkpoints, curve, evaluation, files, texts
from dflash_fn.train.budget import Budget
from dflash_fn.train.corpus import collect
from dflash_fn.train.fitting import Fitted, fit
from dflash_fn.train.options import TrainOptions, digest, from_dict, to_dict
from dflash_fn.train.overlap import Excluded, exclude, read_prompts
from dflash_fn.train.texts import Texts
from dflash_fn.train.trainer import Trainer, Trains

__all__ = ["STAGES", "Paused", "Run", "open_run", "run_stages"]

OPTIONS = "options.json"
DONE = "done.json"
Watch = Callable[[str, int, int, dict[str, Any]], None]
"""Is told (stage, done, of how many, figures)."""


class Paused(Exception):  # noqa: N818 (no error: the run goes on when it is resumed)
    """The budget was spent, or Ctrl-C asked to stop; everything is saved."""


def _unwatched(stage: str, done: int, total: int, figures: dict[str, Any]) -> None:
    del stage, done, total, figures


@dataclass(frozen=True, slots=True)
class Run:
    """A run: options, a folder, and the port that computes.

    Attributes:
        options: all of them.
        folder: where everything lies.
        port: that runs the models, and trains them.
        trainer: the port's side of training.
        threads: that it uses.
        budget: when to pause.
        watch: is told how it goes.
    """

    options: TrainOptions
    folder: Path
    port: Port
    trainer: Trainer
    threads: int
    budget: Budget = field(default_factory=Budget)
    watch: Watch = _unwatched

    def fact(self, stage: str) -> dict[str, Any] | None:
        """Return what a stage wrote down; None where it is not done."""
        path = self.folder / stage / DONE
        return files.read_json(path) if path.is_file() else None

    def need(self, stage: str) -> dict[str, Any]:
        """Return what a stage wrote down.

        Raises:
            InputError: it is not done.
        """
        found = self.fact(stage)
        if found is None:
            raise errors.InputError(f"{self.folder}: the stage `{stage}` is not done yet; run it first")
        return found

    def done(self, stage: str, made_with: str) -> bool:
        """Whether a stage is done, from the same inputs."""
        found = self.fact(stage)
        return found is not None and found.get("made_with") == made_with

    def finish(self, stage: str, made_with: str, facts: dict[str, Any]) -> None:
        """Write down that a stage is done."""
        files.write_json(self.folder / stage / DONE, {"made_with": made_with, **facts})

    def pause(self) -> None:
        """Leave if it is time to; whoever calls has saved everything."""
        if self.budget.spent:
            raise Paused

    @property
    def target(self) -> Path:
        """The target's folder."""
        if self.options.target is not None:
            self.need("target")
            return self.folder / "target" / "model"
        return source_folder(self.options.source or "")

    def excluded(self) -> Excluded:
        """Return what may not be in the data."""
        prompts = [turn for file in self.options.exclude for turns in read_prompts(file) for turn in turns]
        return exclude(prompts, self.options.shared_words)


def source_folder(source: str) -> Path:
    """Return the folder of a target that is named by folder, hub id or zoo name."""
    from dflash_fn import zoo

    if source in zoo.names() and not Path(source).is_dir():
        return zoo.fetch(source).target
    folder = resolve(source, role="target").folder
    assert folder is not None
    return folder


def open_run(
    options: TrainOptions | None,
    folder: Path,
    port: Port,
    *,
    resume: bool = False,
    budget: Budget | None = None,
    watch: Watch | None = None,
) -> Run:
    """Begin a run in a folder, or go on with the one there.

    Args:
        options: of a new run; None takes those of the folder.
        folder: for everything that the run makes.
        port: to train on.
        resume: whether the folder may hold a run already.
        budget: when to pause.
        watch: is told how it goes.

    Raises:
        InputError: the folder holds a run and `resume` is False, or holds none and there are no options; or its options
            are others.
        PortError: the port cannot train.
    """
    if not isinstance(port, Trains):
        raise errors.PortError(f"port {port.name} cannot train; use --port torch")
    known = _known_options(folder)
    if known is not None and not resume:
        raise errors.InputError(f"{folder}: holds a run already; go on with it by --resume, or give another folder")
    if options is None and known is None:
        raise errors.InputError(f"{folder}: holds no run to resume; give --recipe or --target")
    if options is not None and known is not None:
        _check_same(options, known, folder)
    chosen = options or known
    assert chosen is not None
    if known is None:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / OPTIONS, to_dict(chosen))
    trainer: Trainer = port.trainer()
    threads = trainer.set_threads(chosen.threads)
    return Run(chosen, folder, port, trainer, threads, budget or Budget(), watch or _unwatched)


def _known_options(folder: Path) -> TrainOptions | None:
    path = folder / OPTIONS
    return from_dict(TrainOptions, files.read_json(path), name=str(path)) if path.is_file() else None


def _check_same(options: TrainOptions, known: TrainOptions, folder: Path) -> None:
    old, new = to_dict(known), to_dict(options)
    other = [key for key in new if new[key] != old[key]]
    if other:
        raise errors.InputError(
            f"{folder}: its run has other options ({', '.join(other)}); leave them out to resume, or give another folder"
        )


def run_stages(run: Run, stages: Sequence[str] | None = None) -> dict[str, Any]:
    """Run stages in their order, and return what the last one wrote down.

    Args:
        run: from `open_run`.
        stages: their names; None takes all that the options ask for.

    Raises:
        InputError: an unknown stage, or one whose input is missing.
        Paused: the budget is spent or Ctrl-C asked to stop; everything is saved.
    """
    wanted = tuple(stages) if stages else _all(run.options)
    for name in wanted:
        if name not in STAGES:
            raise errors.InputError(f"unknown stage {name!r}; the stages are: {', '.join(STAGES)}")
    for name in [name for name in STAGES if name in wanted]:
        run.pause()
        STAGES[name](run)
    return run.fact(wanted[-1]) or {}


def _all(options: TrainOptions) -> tuple[str, ...]:
    own = () if options.target is None else ("target",)
    corpus = () if options.corpus is None else ("corpus",)
    cache = () if options.draft.cache == "none" else ("features",)
    return (*corpus, *own, "data", *cache, "fit", "eval")


def corpus_stage(run: Run) -> None:
    """Collect the sources, make the tokenizer, and encode everything."""
    options, folder = run.options.corpus, run.folder / "corpus"
    if options is None:
        raise errors.InputError("the stage `corpus` needs options of a corpus; this run has none")
    made_with = digest((options, run.options.exclude, run.options.shared_words)) if False else _corpus_key(run)
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
    run.finish("corpus", made_with, facts)


def _corpus_key(run: Run) -> str:
    return digest(dataclasses.replace(TrainOptions(source="-"), corpus=run.options.corpus, exclude=run.options.exclude))


def _spread(items: list[str]) -> list[str]:
    """Return texts so that any first part of the list is a sample of all of it."""
    return [item for first in range(16) for item in items[first::16]]


def target_stage(run: Run) -> None:
    """Train the target."""
    options, folder = run.options.target, run.folder / "target"
    if options is None:
        raise errors.InputError("the stage `target` needs options of a target to train; this run has none")
    known = run.need("corpus")
    made_with = f"{digest(options)}-{known['digest']}-{run.options.seed}-{run.threads}-{run.options.autocast}"
    if run.done("target", made_with):
        return
    streams = [np.load(run.folder / "corpus" / f"{name}.npy", mmap_mode="r") for name in ("train", "held_out")]
    task = run.trainer.target_task(options, run.options, streams[0], streams[1])
    fitted = _fitted(run, "target", task, options.fit, folder, made_with)
    with files.fresh_folder(folder / "model") as place:
        task.export(place)
        for file in sorted((run.folder / "corpus" / "tokenizer").iterdir()):
            shutil.copy(file, place / file.name)
    run.finish("target", made_with, _fit_facts(run, fitted, folder / "model"))


def _fitted(run: Run, stage: str, task: Any, options: Any, folder: Path, made_with: str) -> Fitted:
    fitted = fit(
        task, options, folder / "checkpoints", made_with=made_with, budget=run.budget,
        report=lambda step, point: run.watch(stage, step, options.steps, point),
    )  # fmt: skip
    if not fitted.done:
        raise Paused
    return fitted


def _fit_facts(run: Run, fitted: Fitted, folder: Path) -> dict[str, Any]:
    last = fitted.curve[-1]
    return {
        "steps": fitted.steps,
        "loss": last["loss"],
        "last": last,
        "digest": fingerprint.of_folder(folder),
        "threads": run.threads,
        "backend": run.port.info().backend,
        "bytes": (folder / "model.safetensors").stat().st_size,
        "parameters": (folder / "model.safetensors").stat().st_size // 2,
    }


def data_stage(run: Run) -> None:
    """Let the target write what the draft learns from."""
    options, folder = run.options.text, run.folder / "data"
    source = fingerprint.of_folder(run.target)
    made_with = f"{digest(options)}-{source}-{run.options.seed}"
    if run.done("data", made_with):
        return
    pair = load_pair(run.target, port=run.port, dtype="float32", device=run.options.device)
    ask, pieces = _asking(run, pair)
    parts = []
    for first in range(0, pieces, options.rows):
        run.pause()
        part = folder / f"parts-{made_with[-32:]}" / f"{first:08}.safetensors"
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
    run.finish("data", made_with, facts | dropped)


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
            ids += [*pair.tokenizer.encode(Path(name).read_text(encoding="utf-8")), *pair.target.spec.eos_token_ids[:1]]
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


def features_stage(run: Run) -> None:
    """Write the target's hidden states to disk, for `fit` to map into memory."""
    if run.options.draft.cache == "none":
        raise errors.InputError("the stage `features` needs draft.cache to be float32 or bfloat16; it is none")
    made = texts.read(run.folder / "data" / "texts.safetensors")
    folder, made_with = run.folder / "features", _features_key(run, made)
    if run.done("features", made_with):
        return
    folder.mkdir(exist_ok=True)
    dtype = np.dtype("float32" if run.options.draft.cache == "float32" else "uint16")
    shape = (len(made.tokens), run.trainer.feature_width(run.options, run.target))
    size = shape[0] * shape[1] * dtype.itemsize
    run.watch("features", 0, len(made), {"gigabytes": round(size / 1e9, 2)})
    first = _features_begun(folder, made_with)
    if first is None and size > 0.95 * shutil.disk_usage(folder).free:
        raise errors.CacheFolderError(
            f"{folder}: the cache of features takes {size / 1e9:.1f} GB, more than is free; set draft.cache to none"
        )
    mode = "w+" if first is None else "r+"
    out = np.lib.format.open_memmap(folder / "features.npy", mode=mode, dtype=dtype, shape=shape)  # pyright: ignore
    done = first or 0

    def advance(count: int) -> bool:
        out.flush()
        files.write_json(folder / "begun.json", {"made_with": made_with, "texts": count})
        run.watch("features", count, len(made), {"gigabytes": round(size / 1e9, 2)})
        return not run.budget.spent

    advance(done)
    run.trainer.write_features(run.options, run.target, made, out, done, advance)
    if files.read_json(folder / "begun.json")["texts"] < len(made):
        raise Paused
    run.finish("features", made_with, {"bytes": size})


def _features_key(run: Run, made: Texts) -> str:
    return f"{made.digest}-{fingerprint.of_folder(run.target)}-{run.options.draft.taps}-{run.options.draft.cache}"


def _features_begun(folder: Path, made_with: str) -> int | None:
    """Return how many texts are written; None where nothing of these features is."""
    path = folder / "begun.json"
    found = files.read_json(path) if path.is_file() and (folder / "features.npy").is_file() else {}
    return found["texts"] if found.get("made_with") == made_with else None


def fit_stage(run: Run) -> None:
    """Train the draft."""
    options, folder = run.options.draft, run.folder / "fit"
    made = texts.read(run.folder / "data" / "texts.safetensors")
    source = fingerprint.of_folder(run.target)
    own = digest(dataclasses.replace(options, cache="none")) if options.cache == "float32" else digest(options)
    made_with = f"{own}-{made.digest}-{source}-{run.options.seed}-{run.threads}-{run.options.autocast}"
    if run.done("fit", made_with):
        return
    features = _features(run, made)
    task = run.trainer.draft_task(run.options, run.target, made, features)
    fitted = _fitted(run, "fit", task, options.fit, folder, made_with)
    with files.fresh_folder(run.folder / "draft") as place:
        task.export(place)
        shutil.copy(run.folder / OPTIONS, place / "training.json")
    run.finish("fit", made_with, _fit_facts(run, fitted, run.folder / "draft"))
    curve.write(folder / "curve.jsonl", fitted.curve)


def _features(run: Run, made: Texts) -> np.ndarray | None:
    if run.options.draft.cache == "none":
        return None
    if not run.done("features", _features_key(run, made)):
        raise errors.InputError(f"{run.folder}: the stage `features` is not done for this data; run it first")
    return np.load(run.folder / "features" / "features.npy", mmap_mode="r")


def eval_stage(run: Run) -> None:
    """Measure the pair, and write the model card."""
    fitted = run.need("fit")
    made_with = f"{fitted['digest']}-{digest(run.options.eval)}"
    if not run.done("eval", made_with):
        pair = load_pair(
            run.target,
            run.folder / "draft",
            port=run.port,
            dtype="float32",
            device=run.options.device,
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

    found, exact, timed = {}, True, []
    for name, prompts in sets.items():
        answered = evaluation.evaluate(pair, prompts, options, advance=advance)
        exact = exact and evaluation.exactness(pair, prompts, answered)
        free = evaluation.baseline(pair, prompts, options)
        found[name] = evaluation.summary(answered) | {"ngrams": free["tau"], "ngrams_first": free["tau_first"]}
        timed += prompts[: evaluation.TIMED // 2]
    held = run.folder / "corpus" / "held_out.json"
    heads = [text for _, text in files.read_json(held)] if held.is_file() else []
    return {
        "sets": found,
        "exact": exact,
        "bits_per_byte": evaluation.bits_per_byte(pair, heads, options.head_bytes),
        "speed": evaluation.speed(pair, timed, options),
    }


def _prompt_sets(run: Run, pair: Pair) -> dict[str, list[tuple[str, list[int]]]]:
    """Return the prompts to measure on: heads of held-out files, and JSONL files."""
    options, sets = run.options.eval, {}
    held = run.folder / "corpus" / "held_out.json"
    if held.is_file():
        heads = [(name, pair.tokenizer.encode(text)[: options.file_prompt]) for name, text in files.read_json(held)]
        sets["held-out files"] = heads
    for file in options.prompts:
        rows = read_prompts(file)[: options.rows]
        templated = not options.raw and bool(getattr(pair.tokenizer, "chat_template", None))
        sets[Path(file).stem] = [
            (f"{Path(file).stem}/{i}", _ids(pair, turns[0], templated)) for i, turns in enumerate(rows)
        ]
    return sets


def _ids(pair: Pair, prompt: str, templated: bool) -> list[int]:
    from dflash_fn.text import chat_prompt

    if templated:
        return chat_prompt(pair.tokenizer, [{"role": "user", "content": prompt}])
    return list(pair.tokenizer.encode(prompt))


STAGES: dict[str, Callable[[Run], None]] = {
    "corpus": corpus_stage,
    "target": target_stage,
    "data": data_stage,
    "features": features_stage,
    "fit": fit_stage,
    "eval": eval_stage,
}
"""All stages, in order."""
