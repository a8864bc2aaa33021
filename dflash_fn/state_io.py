"""States in files: saved by any port, loaded by any other, and decoding goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn import container, errors, fingerprint, inputs
from dflash_fn.container import Bits
from dflash_fn.origin import check_pair_type, check_state, origin_of
from dflash_fn.records import Cache, ContextFeatures, DecodeState, Model, Pair, StopReason

__all__ = ["fingerprint_of", "load_state", "save_state"]

KIND = "state"


def save_state(path: str | Path, state: DecodeState, pair: Pair) -> None:
    """Write a state to a file, in a layout that does not depend on the port.

    The file holds tokens, the visible slots of both caches, pending context features, step, seeds, stops and width,
    and digests of the pair's weights. A row's K/V are [length, kv_heads, head_dim] a layer.

    Args:
        path: of the file; an existing one is replaced in one go.
        state: any state.
        pair: the pair that it was made with.

    Raises:
        CacheFolderError: the file cannot be written; nothing half-written stays.
        InputError: a state of another pair, or arguments in another order.
    """
    file = inputs.as_path(path, "path, state, pair")
    check_state(state, pair)
    port = pair.port
    arrays = {f"tokens.{row}": Bits("int64", np.array(ids)) for row, ids in enumerate(state.tokens)}
    arrays |= {f"target.{name}": bits for name, bits in port.export_cache(state.target_cache).items()}
    if pair.draft:
        arrays |= {f"draft.{name}": bits for name, bits in port.export_cache(state.draft_cache).items()}
    arrays |= _features(state, pair)
    container.write(file, KIND, _header(state, pair), arrays)


def load_state(path: str | Path, pair: Pair) -> DecodeState:
    """Read a state, to go on with on the pair's port.

    Args:
        path: of a file that `save_state` wrote, on any port.
        pair: the same checkpoints in the same dtype, on any port and device.

    Returns:
        The state. On the port that saved it, everything that follows has the same bits; on another port, the bits
        are that port's own, and the tokens are the same but for near ties.

    Raises:
        StateFileError: no such file, cut or edited, in a newer format, or of another pair or dtype.
        InputError: arguments in another order.

    Guarantees:
        P12: on the port that saved it, what is loaded looks the same, and decodes and extends to the same bits.
    """
    file = inputs.as_path(path, "path, pair")
    check_pair_type(pair)
    header, arrays = container.read(file, KIND)
    _check(file, header, pair)
    rows = len(header["seed"])
    tokens = tuple(tuple(arrays[f"tokens.{row}"].values.tolist()) for row in range(rows))
    return DecodeState(
        tokens=tokens,
        target_cache=_cache(header["target_cache"], "target", arrays, pair, pair.target, header["width"]),
        draft_cache=(
            _cache(header["draft_cache"], "draft", arrays, pair, pair.draft, header["width"]) if pair.draft else None
        ),
        context_features=_pending(header, arrays, pair),
        step=header["step"],
        seed=tuple(header["seed"]),
        stop=tuple(StopReason[name] if name else None for name in header["stop"]),
        width=header["width"],
        exact_rows=header["exact_rows"],
        origin=origin_of(pair),
    )


def fingerprint_of(model: Model[Any], pair: Pair) -> str:
    """Return the digest of a model's checkpoint, the same for a folder and for the same tensors in memory."""
    if model.source is None:
        raise errors.InputError("the model does not know where it came from; load the pair by load_pair")
    if model.source.folder is not None:
        return fingerprint.of_folder(model.source.folder)
    return fingerprint.of_tensors(pair.port.raw_tensors(model.source.obj))


def _header(state: DecodeState, pair: Pair) -> dict[str, Any]:
    pending = state.context_features
    return {
        "port": pair.port.name,
        "pair": pair.name,
        "dtype": pair.target.dtype,
        "width": state.width,
        "exact_rows": state.exact_rows,
        "step": state.step,
        "seed": list(state.seed),
        "stop": [reason.name if reason else None for reason in state.stop],
        "target": fingerprint_of(pair.target, pair),
        "draft": fingerprint_of(pair.draft, pair) if pair.draft else None,
        "target_cache": _shape(pair, state.target_cache),
        "draft_cache": _shape(pair, state.draft_cache) if pair.draft else None,
        "features": list(pending.counts) if pending else None,
    }


def _shape(pair: Pair, cache: Cache) -> dict[str, list[int]]:
    return {
        "lengths": list(pair.port.lengths(cache)),
        "marks": list(pair.port.lengths(pair.port.rewind(cache))),
    }


def _features(state: DecodeState, pair: Pair) -> dict[str, Bits]:
    pending = state.context_features
    if pending is None:
        return {}
    dtype, values = pair.port.to_bits(pending.values)
    return {f"features.{row}": Bits(dtype, values[row, :count]) for row, count in enumerate(pending.counts)}


def _check(path: Path, header: dict[str, Any], pair: Pair) -> None:
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        mine = fingerprint_of(model, pair) if model else None
        if header[role] != mine:
            raise errors.StateFileError(
                f"{path}: was saved with another {role} (pair {header['pair']!r}, {role} digest {header[role]}; "
                f"this pair's is {mine})"
            )
    if header["dtype"] != pair.target.dtype:
        raise errors.StateFileError(
            f"{path}: was saved in {header['dtype']}, the pair is loaded in {pair.target.dtype}; "
            f"load it with dtype={header['dtype']!r}"
        )


def _cache(
    shape: dict[str, list[int]], role: str, arrays: dict[str, Bits], pair: Pair, model: Model[Any], width: int
) -> Cache:
    prefix = f"{role}."
    mine = {name.removeprefix(prefix): bits for name, bits in arrays.items() if name.startswith(prefix)}
    lengths = tuple(shape["lengths"])
    return pair.port.import_cache(model, mine, lengths, tuple(shape["marks"]), max(lengths) + 2 * width)


def _pending(header: dict[str, Any], arrays: dict[str, Bits], pair: Pair) -> ContextFeatures | None:
    counts = header["features"]
    if counts is None:
        return None
    rows = [arrays[f"features.{row}"].values for row in range(len(counts))]
    values = np.zeros((len(counts), header["width"], rows[0].shape[-1]), dtype=rows[0].dtype)
    for row, known in enumerate(rows):
        values[row, : len(known)] = known
    bits = Bits(arrays["features.0"].dtype, values)
    return ContextFeatures(pair.port.from_bits(bits, pair.target.device), tuple(counts))
