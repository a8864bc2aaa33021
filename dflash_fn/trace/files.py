"""Traces in files: integers and digests in the JSON header, where people can read them, and numbers in arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn import container, errors, inputs
from dflash_fn.container import Bits
from dflash_fn.records import StopReason
from dflash_fn.trace.records import CacheView, LawsView, LogitsView, RowStart, RowStep, Trace
from dflash_fn.trace.summary import STATISTICS

__all__ = ["KIND", "read_trace", "write_trace"]

KIND = "trace"
"""What the header of a trace file names."""
PLAIN = [field.name for field in fields(Trace) if field.name not in ("start", "steps")]
OPTIONAL = {field.name for field in fields(Trace) if field.default is not MISSING}

Arrays = Mapping[str, Bits]


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a trace to a file, whole or not at all.

    Raises:
        CacheFolderError: the file cannot be written; nothing half-written stays.
        InputError: arguments in another order.
    """
    file = inputs.as_path(path, "path, trace")
    arrays: dict[str, Bits] = {}
    header: dict[str, Any] = {name: getattr(trace, name) for name in PLAIN}
    header["start"] = [_start_out(row, f"start.{index}", arrays) for index, row in enumerate(trace.start)]
    header["steps"] = [
        [_row_out(row, f"{step}.{index}", arrays) if row else None for index, row in enumerate(rows)]
        for step, rows in enumerate(trace.steps)
    ]
    container.write(file, KIND, header, arrays)


def read_trace(path: str | Path) -> Trace:
    """Read a trace that `write_trace` or another engine wrote.

    Raises:
        StateFileError: no such file, cut or edited, in a newer format, or not what a trace must be.

    Guarantees:
        P12: a trace that was written and read holds, in every bit, on the port that made it.
    """
    header, arrays = container.read(inputs.as_path(path, "path"), KIND)
    try:
        trace = _trace_in(header, arrays)
        problem = next(_problems(trace), "")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise errors.StateFileError(f"{path}: not a trace as the format describes it ({error!r})") from None
    if problem:
        raise errors.StateFileError(f"{path}: {problem}")
    return trace


def _start_out(row: RowStart, name: str, arrays: dict[str, Bits]) -> dict[str, Any]:
    if row.features is not None:
        arrays[f"{name}.features"] = Bits("float32", row.features)
    return {
        "target_cache": _cache_out(row.target_cache, f"{name}.target_cache", arrays),
        "draft_cache": _cache_out(row.draft_cache, f"{name}.draft_cache", arrays),
    }


def _row_out(row: RowStep, name: str, arrays: dict[str, Bits]) -> dict[str, Any]:
    if row.features is not None:
        arrays[f"{name}.features"] = row.features
    arrays.update((f"{name}.uniforms.{stream}", Bits("float64", values)) for stream, values in row.uniforms.items())
    _laws_out(row.laws, f"{name}.laws", arrays)
    return {
        "features_digest": row.features_digest,
        "draft_cache": _cache_out(row.draft_cache, f"{name}.draft_cache", arrays),
        "draft_logits": _logits_out(row.draft_logits, f"{name}.draft_logits", arrays),
        "block": row.block,
        "target_logits": _logits_out(row.target_logits, f"{name}.target_logits", arrays),
        "num_accepted": row.num_accepted,
        "next_token": row.next_token,
        "emitted": row.emitted,
        "stop": row.stop.name if row.stop else None,
        "target_cache": _cache_out(row.target_cache, f"{name}.target_cache", arrays),
    }


def _cache_out(view: CacheView | None, name: str, arrays: dict[str, Bits]) -> dict[str, Any] | None:
    if view is None:
        return None
    arrays.update((f"{name}.{kind}", Bits("float32", values)) for kind, values in view.fresh.items())
    return {"length": view.length, "digest": view.digest}


def _logits_out(view: LogitsView | None, name: str, arrays: dict[str, Bits]) -> dict[str, Any] | None:
    if view is None:
        return None
    arrays[f"{name}.values"] = view.values
    if view.ids is not None:
        arrays[f"{name}.ids"] = Bits("int64", view.ids.astype(np.int64))
    if view.summary is not None:
        arrays[f"{name}.summary"] = Bits("float32", view.summary)
    return {"digest": view.digest}


def _laws_out(view: LawsView | None, name: str, arrays: dict[str, Bits]) -> None:
    for field in fields(LawsView) if view else ():
        values = getattr(view, field.name)
        if values is not None:
            arrays[f"{name}.{field.name}"] = Bits(str(values.dtype), values)


def _trace_in(header: Mapping[str, Any], arrays: Arrays) -> Trace:
    plain = {name: _tuples(header[name]) for name in PLAIN if name in header or name not in OPTIONAL}
    start = tuple(_start_in(row, f"start.{index}", arrays) for index, row in enumerate(header["start"]))
    steps = tuple(
        tuple(_row_in(row, f"{step}.{index}", arrays) if row else None for index, row in enumerate(rows))
        for step, rows in enumerate(header["steps"])
    )
    return Trace(**plain, start=start, steps=steps)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _start_in(row: Mapping[str, Any], name: str, arrays: Arrays) -> RowStart:
    return RowStart(
        target_cache=_cache_in(row.get("target_cache"), f"{name}.target_cache", arrays),
        features=_values(arrays, f"{name}.features"),
        draft_cache=_cache_in(row.get("draft_cache"), f"{name}.draft_cache", arrays),
    )


def _row_in(row: Mapping[str, Any], name: str, arrays: Arrays) -> RowStep:
    return RowStep(
        features=arrays.get(f"{name}.features"),
        features_digest=row.get("features_digest"),
        draft_cache=_cache_in(row.get("draft_cache"), f"{name}.draft_cache", arrays),
        draft_logits=_logits_in(row.get("draft_logits"), f"{name}.draft_logits", arrays),
        block=tuple(row["block"]),
        target_logits=_logits_in(row.get("target_logits"), f"{name}.target_logits", arrays),
        uniforms={stream: bits.values for stream, bits in _below(arrays, f"{name}.uniforms.")},
        num_accepted=row["num_accepted"],
        next_token=row["next_token"],
        emitted=tuple(row["emitted"]),
        stop=StopReason[row["stop"]] if row["stop"] else None,
        target_cache=_cache_in(row.get("target_cache"), f"{name}.target_cache", arrays),
        laws=_laws_in(arrays, f"{name}.laws"),
    )


def _laws_in(arrays: Arrays, name: str) -> LawsView | None:
    if f"{name}.ids" not in arrays:
        return None
    ids, p, q, target, overlap = (arrays[f"{name}.{kind}"].values for kind in ("ids", "p", "q", "target", "overlap"))
    return LawsView(ids, p, q, target, _values(arrays, f"{name}.draft"), overlap)


def _cache_in(view: Mapping[str, Any] | None, name: str, arrays: Arrays) -> CacheView | None:
    if view is None:
        return None
    fresh = {kind: bits.values for kind, bits in _below(arrays, f"{name}.")}
    for kind, values in fresh.items():
        if values.ndim != 3 or values.shape[2] != len(STATISTICS):
            raise ValueError(f"{name}.{kind}: got shape {values.shape}, expected [layers, tokens, {len(STATISTICS)}]")
    return CacheView(view["length"], view.get("digest"), fresh)


def _logits_in(view: Mapping[str, Any] | None, name: str, arrays: Arrays) -> LogitsView | None:
    if view is None:
        return None
    values, ids, summary = arrays[f"{name}.values"], _values(arrays, f"{name}.ids"), _values(arrays, f"{name}.summary")
    if ids is not None and ids.shape != values.values.shape:
        raise ValueError(f"{name}: values of shape {values.values.shape}, ids of shape {ids.shape}")
    return LogitsView(values, ids, summary, view.get("digest"))


def _values(arrays: Arrays, name: str) -> np.ndarray | None:
    return arrays[name].values if name in arrays else None


def _below(arrays: Arrays, prefix: str) -> Iterator[tuple[str, Bits]]:
    return ((name.removeprefix(prefix), bits) for name, bits in arrays.items() if name.startswith(prefix))


def _problems(trace: Trace) -> Iterator[str]:
    """Yield what makes no sense, whatever the pair is."""
    rows = len(trace.prompts)
    if not rows or not all(trace.prompts) or len(trace.seed) != rows:
        yield f"expected a prompt and a seed for each row, got {rows} prompts and {len(trace.seed)} seeds"
    if trace.start and len(trace.start) != rows:
        yield f"start: expected {rows} rows, got {len(trace.start)}"
    for step, found in enumerate(trace.steps):
        known = [row for row in found if row]
        if len(found) != rows or not known:
            yield f"step {step}: expected {rows} rows, of which one has not stopped; got {len(known)} of {len(found)}"
        elif len({len(row.block) for row in known}) > 1 or not 1 <= len(known[0].block) <= trace.width:
            yield f"step {step}: expected blocks of one length from 1 to the width {trace.width}"
        for row in known:
            if not 0 <= row.num_accepted < len(row.block) or not 1 <= len(row.emitted) <= row.num_accepted + 1:
                yield f"step {step}: accepts {row.num_accepted} of {len(row.block) - 1} and emits {len(row.emitted)}"
            if min(*row.block, row.next_token, *row.emitted) < 0:
                yield f"step {step}: a negative token"
            yield from _law_problems(step, row)


def _law_problems(step: int, row: RowStep) -> Iterator[str]:
    view, size = row.laws, len(row.block)
    if view is not None:
        tokens = view.ids.shape[-1]
        shapes = dict.fromkeys(("ids", "p", "target"), (size, tokens)) | {
            "q": (size - 1, tokens),
            "overlap": (size - 1,),
        }
        shapes |= {} if view.draft is None else {"draft": (size - 1, tokens)}
        for name, shape in shapes.items():
            if (found := getattr(view, name).shape) != shape:
                yield f"step {step}: expected laws.{name} of shape {shape}, got {found}"
