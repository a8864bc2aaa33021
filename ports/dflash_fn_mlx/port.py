"""The port itself: `dflash_fn.port.Port` on mlx."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_fn import errors
from dflash_fn.checkpoint import check_format, one_device
from dflash_fn.config import DecoderSpec, DraftSpec, TargetSpec
from dflash_fn.container import Bits
from dflash_fn.port import Port, PortInfo, TargetPass
from dflash_fn.records import Model
from dflash_fn.sources import Source
from dflash_fn_mlx import moves, parts
from dflash_fn_mlx import namespace as xp
from dflash_fn_mlx.attention import MAX_WIDTH
from dflash_fn_mlx.decoder import target_pass
from dflash_fn_mlx.draft import draft_context, draft_pass
from dflash_fn_mlx.weights import read_draft, read_target, tensors_of

__all__ = ["MlxPort", "load"]

SHORT = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint32": "U32", "uint8": "U8"}
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
DEVICES = {"gpu": mx.gpu, "cpu": mx.cpu}


@dataclass(frozen=True, slots=True)
class MlxPort:
    """mlx on Apple's GPU or on a CPU; a cache is a `dflash_fn_mlx.parts.Cache`, a family a `parts.Family`."""

    name: str = "mlx"
    prefill_width: int = 256
    max_width: int = MAX_WIDTH

    @property
    def xp(self) -> Any:
        """`dflash_fn_mlx.namespace`."""
        return xp

    def info(self) -> PortInfo:
        """Say what mlx runs on; the GPU comes first, because `device=None` takes the first."""
        devices = tuple(name for name, device in DEVICES.items() if mx.is_available(device))
        return PortInfo(self.name, f"mlx {version('mlx')}", devices, tuple(DTYPES), threads=1)

    def peak_memory(self) -> float:
        """Ask mlx's allocator."""
        return mx.get_peak_memory() / 1e9

    def claims(self, obj: object) -> bool:
        """Whether `obj` is an mlx module."""
        return isinstance(obj, nn.Module)

    def config_of(self, obj: Any) -> dict[str, Any] | None:
        """Read the `args` of an mlx-lm model. They have no stop ids, so that a target in memory has none."""
        args = getattr(obj, "args", None)
        if not is_dataclass(args) or isinstance(args, type):
            return None
        if getattr(args, "rope_traditional", False):
            raise errors.UnsupportedModel(
                f"{type(obj).__name__}: rope_traditional: got true; dimension i is turned with dimension i + 1 there, "
                "and with i + head_dim / 2 here"
            )
        return {**asdict(args), "eos_token_id": None}

    def spread(self, *specs: DecoderSpec, device_map: Any = None, mesh: Any = None) -> Port:
        """Raise: one device holds everything here."""
        del specs, device_map, mesh
        raise one_device(self.name)

    def load_target(
        self, source: Source, spec: TargetSpec, *, dtype: str | None, device: str | None
    ) -> Model[TargetSpec]:
        """Read a target, plain or quantised; a module's own arrays are used as they are where the dtype allows."""
        check_format(self.name, source.name, spec, "mlx")
        place = self._device(device)
        name = dtype or (_own_dtype(source, spec) if source.obj is not None or place != "cpu" else "float32")
        with mx.stream(DEVICES[place]):
            return Model(spec, read_target(source, spec, _dtype(name)), name, place, source)

    def load_draft(
        self, source: Source, spec: DraftSpec, target: Model[TargetSpec], *, bits: int | None = None
    ) -> Model[DraftSpec]:
        """Read a draft; where `bits` are asked for, they are those of mlx's affine format, in groups of 64 or 32."""
        check_format(self.name, source.name, spec, "mlx")
        with mx.stream(DEVICES[target.device]):
            weights = read_draft(source, spec, _dtype(target.dtype), bits)
        return Model(spec, weights, target.dtype, target.device, source)

    def load_tokenizer(self, source: str | Path) -> Any:
        """Read a tokenizer by transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source)

    def new_cache(self, model: Model[Any], capacity: int) -> parts.Cache:
        """Allocate zeros."""
        return parts.new(model.spec, capacity, dtype=_dtype(model.dtype))

    def target_pass(
        self,
        target: Model[TargetSpec],
        cache: parts.Cache,
        tokens: mx.array,
        *,
        taps: tuple[int, ...],
        head: bool,
        exact_rows: bool,
    ) -> TargetPass:
        """See `decoder.target_pass`."""
        with mx.stream(DEVICES[target.device]):
            return target_pass(target, cache, tokens, taps=taps, head=head, exact_rows=exact_rows)

    def draft_context(
        self,
        draft: Model[DraftSpec],
        cache: parts.Cache,
        features: mx.array,
        counts: tuple[int, ...],
        *,
        exact_rows: bool,
    ) -> parts.Cache:
        """See `draft.draft_context`."""
        with mx.stream(DEVICES[draft.device]):
            return draft_context(draft, cache, features, counts, exact_rows=exact_rows)

    def draft_pass(
        self,
        draft: Model[DraftSpec],
        target: Model[TargetSpec],
        cache: parts.Cache,
        block: mx.array,
        *,
        exact_rows: bool,
    ) -> mx.array:
        """See `draft.draft_pass`."""
        with mx.stream(DEVICES[draft.device]):
            return draft_pass(draft, target, cache, block, exact_rows=exact_rows)

    def select(self, family: parts.Family, counts: tuple[int, ...]) -> parts.Cache:
        """New lengths over the same memory, and states by `gated_delta.replay`."""
        return parts.select(family, counts)

    def lengths(self, cache: parts.Cache) -> tuple[int, ...]:
        """Read them off."""
        return cache.lengths

    def mark(self, cache: parts.Cache) -> parts.Cache:
        """See `parts.mark`."""
        return parts.mark(cache)

    def rewind(self, cache: parts.Cache) -> parts.Cache:
        """See `parts.rewind`."""
        return parts.rewind(cache)

    def split_rows(self, cache: parts.Cache) -> tuple[parts.Cache, ...]:
        """See `parts.split`."""
        return parts.split(cache)

    def join_rows(self, caches: tuple[parts.Cache, ...]) -> parts.Cache:
        """See `parts.join`."""
        return parts.join(caches)

    def reserve(self, cache: parts.Cache, capacity: int) -> parts.Cache:
        """See `parts.reserve`."""
        return parts.reserve(cache, capacity)

    def asarray(self, values: np.ndarray, device: str) -> mx.array:
        """See `namespace.asarray`; memory belongs to no device.

        float64 is rounded to float32 by numpy, to the nearest: mlx itself cuts it off.
        """
        del device
        return xp.asarray(values.astype(np.float32) if values.dtype == np.float64 else values)

    def to_numpy(self, array: mx.array) -> np.ndarray:
        """Wait for the array and copy it."""
        return _on_host(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)

    def to_bits(self, array: mx.array) -> Bits:
        """Copy to the host; bfloat16 as uint16."""
        name = str(array.dtype).removeprefix("mlx.core.")
        return Bits(name, _on_host(array.view(mx.uint16) if name == "bfloat16" else array))

    def from_bits(self, bits: Bits, device: str) -> mx.array:
        """Copy; memory belongs to no device."""
        del device
        known = mx.array(np.ascontiguousarray(bits.values))
        return known.view(mx.bfloat16) if bits.dtype == "bfloat16" else known

    def export_cache(self, cache: parts.Cache) -> dict[str, Bits]:
        """See `moves.export`."""
        return {name: self.to_bits(array) for name, array in moves.export(cache).items()}

    def import_cache(
        self,
        model: Model[Any],
        arrays: Mapping[str, Bits],
        lengths: tuple[int, ...],
        marks: tuple[int, ...],
        capacity: int,
    ) -> parts.Cache:
        """See `moves.restore`."""
        known = {name: self.from_bits(bits, model.device) for name, bits in arrays.items()}
        return moves.restore(self.new_cache(model, capacity), known, lengths, marks)

    def raw_tensors(self, obj: nn.Module) -> Iterator[tuple[str, str, tuple[int, ...], list[bytes]]]:
        """Go over the parameters."""
        for name, tensor in sorted(tensors_of(Source("", {}, obj=obj)).items()):
            bits = self.to_bits(tensor)
            yield name, SHORT[bits.dtype], tuple(tensor.shape), [np.ascontiguousarray(bits.values).tobytes()]

    def _device(self, device: str | None) -> str:
        known = self.info().devices
        if device is not None and device not in known:
            raise errors.InputError(f"port mlx has no device {device!r} here; it has: {', '.join(known)}")
        return device or known[0]


def _own_dtype(source: Source, spec: DecoderSpec) -> str:
    if source.obj is None:
        return spec.dtype
    floats = [x.dtype for x in tensors_of(source).values() if mx.issubdtype(x.dtype, mx.floating)]
    return str(floats[0]).removeprefix("mlx.core.")


def _dtype(name: str) -> mx.Dtype:
    if name not in DTYPES:
        raise errors.InputError(f"port mlx does not run in dtype {name!r}; it runs in: {', '.join(DTYPES)}")
    return DTYPES[name]


def _on_host(array: mx.array) -> np.ndarray:
    """Copy to the host, and wait for the array in `mx.eval` before.

    numpy would wait too, but with Python's lock held: a stream that drops memory which numpy lent needs that lock, and
    neither ends (ml-explore/mlx#4413).
    """
    mx.eval(array)
    return np.array(array)


def load() -> Port:
    """Return the port; the registry calls this."""
    return MlxPort()
