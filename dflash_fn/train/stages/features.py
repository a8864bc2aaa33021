"""The stage `features`: hidden states of the target on disk, mapped into memory while the draft is trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from dflash_fn import errors, fingerprint
from dflash_fn.train import files, texts
from dflash_fn.train.run import Paused, Run
from dflash_fn.train.texts import Texts

__all__ = ["cached", "features_stage"]


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
    run.watch("features", 0, len(made), {"gigabytes": size / 1e9})
    first = _features_begun(folder, made_with, size)
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
        run.watch("features", count, len(made), {"gigabytes": size / 1e9})
        return not run.budget.spent

    advance(done)
    run.trainer.write_features(run.options, run.target, made, out, done, advance)
    if files.read_json(folder / "begun.json")["texts"] < len(made):
        raise Paused
    run.finish("features", made_with, {"bytes": size}, [folder / "features.npy"])


def _features_key(run: Run, made: Texts) -> str:
    return f"{made.digest}-{fingerprint.of_folder(run.target)}-{run.options.draft.taps}-{run.options.draft.cache}"


def _features_begun(folder: Path, made_with: str, size: int) -> int | None:
    """Return how many texts are written; None where nothing of these features is, or their file was cut off."""
    path, made = folder / "begun.json", folder / "features.npy"
    found = files.read_json(path) if path.is_file() and made.is_file() and made.stat().st_size > size else {}
    return found["texts"] if found.get("made_with") == made_with else None


def cached(run: Run, made: Texts) -> np.ndarray | None:
    """Return the features of texts, mapped into memory; None where the options ask for no cache.

    Raises:
        InputError: the stage is not done for these texts.
    """
    if run.options.draft.cache == "none":
        return None
    if not run.done("features", _features_key(run, made)):
        raise errors.InputError(f"{run.folder}: the stage `features` is not done for this data; run it first")
    return np.load(run.folder / "features" / "features.npy", mmap_mode="r")
