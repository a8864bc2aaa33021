"""The port itself: `dflash_fn.port.Port` on jax and equinox, a numerics reference and no engine.

jax is inside, numpy outside: what goes in and comes out are numpy arrays, and `xp` is numpy. jax has 64-bit types only
where a setting of the whole thread says so. Numpy always has them, so that policies compute with float64 logits and
uniforms while that setting stays everybody else's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_fn import errors
from dflash_fn.checkpoint import check_bits, check_format, one_device
from dflash_fn.config import DecoderSpec, DraftSpec, TargetSpec
from dflash_fn.container import Bits
from dflash_fn.memory import peak_host_memory
from dflash_fn.port import Port, PortInfo, TargetPass
from dflash_fn.records import Model
from dflash_fn.sources import Source
from dflash_fn_jax import cache as kv
from dflash_fn_jax import namespace
from dflash_fn_jax.decoder import target_pass
from dflash_fn_jax.draft import draft_context, draft_pass
from dflash_fn_jax.ops import STRIDE, from_bits, scope, to_bits
from dflash_fn_jax.weights import read_draft, read_target

__all__ = ["JaxPort", "load"]

DEVICES = ("cpu",)
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class JaxPort:
    """jax on a CPU; a cache is a tuple of `dflash_fn_jax.cache.Row`, a family a `cache.Family`.

    Tokens are computed one by one, so every row always has the bits that it has alone, and `exact_rows` changes
    nothing; nor does the width that a token is verified at.
    """

    name: str = "jax"
    prefill_width: int = STRIDE
    max_width: int = STRIDE

    @property
    def xp(self) -> Any:
        """Numpy and bfloat16."""
        return namespace

    def info(self) -> PortInfo:
        """Say what jax runs on; XLA keeps a thread a core."""
        return PortInfo(self.name, f"jax {jax.__version__}", DEVICES, DTYPES, threads=os.cpu_count() or 1)

    def peak_memory(self) -> float:
        """Ask the system; everything lies in main memory."""
        return peak_host_memory()

    def claims(self, obj: object) -> bool:
        """No: jax has no model classes that bring a config; what is in memory goes into a `records.Model` directly."""
        del obj
        return False

    def config_of(self, obj: Any) -> dict[str, Any] | None:
        """None: the port claims no objects."""
        del obj
        return None

    def spread(self, *specs: DecoderSpec, device_map: Any = None, mesh: Any = None) -> Port:
        """Raise: one device holds everything here."""
        del specs, device_map, mesh
        raise one_device(self.name)

    def load_target(
        self, source: Source, spec: TargetSpec, *, dtype: str | None, device: str | None
    ) -> Model[TargetSpec]:
        """Read a target."""
        check_format(self.name, source.name, spec)
        if device not in (None, *DEVICES):
            raise errors.InputError(f"port jax has no device {device!r} here; it has: {', '.join(DEVICES)}")
        name = dtype or "float32"
        if name not in DTYPES:
            raise errors.InputError(f"port jax does not run in dtype {name!r}; it runs in: {', '.join(DTYPES)}")
        return Model(spec, read_target(source, spec, name), name, DEVICES[0], source)

    def load_draft(
        self, source: Source, spec: DraftSpec, target: Model[TargetSpec], *, bits: int | None = None
    ) -> Model[DraftSpec]:
        """Read a draft; there are no quantised products here."""
        check_format(self.name, source.name, spec)
        check_bits(self.name, bits)
        return Model(spec, read_draft(source, spec, target.dtype), target.dtype, target.device, source)

    def load_tokenizer(self, source: str | Path) -> Any:
        """Read a tokenizer by transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source)

    def new_cache(self, model: Model[Any], capacity: int) -> kv.Cache:
        """Allocate zeros."""
        return (kv.new(model.spec, capacity, dtype=model.dtype),)

    def target_pass(
        self,
        target: Model[TargetSpec],
        cache: kv.Cache,
        tokens: np.ndarray,
        *,
        taps: tuple[int, ...],
        head: bool,
        exact_rows: bool,
    ) -> TargetPass:
        """See `decoder.target_pass`."""
        del exact_rows
        return target_pass(target, cache, tokens, taps=taps, head=head)

    def draft_context(
        self,
        draft: Model[DraftSpec],
        cache: kv.Cache,
        features: np.ndarray,
        counts: tuple[int, ...],
        *,
        exact_rows: bool,
    ) -> kv.Cache:
        """See `draft.draft_context`."""
        del exact_rows
        return draft_context(draft, cache, features, counts)

    def draft_pass(
        self,
        draft: Model[DraftSpec],
        target: Model[TargetSpec],
        cache: kv.Cache,
        block: np.ndarray,
        *,
        exact_rows: bool,
    ) -> np.ndarray:
        """See `draft.draft_pass`."""
        del exact_rows
        return draft_pass(draft, target, cache, block)

    def select(self, family: kv.Family, counts: tuple[int, ...]) -> kv.Cache:
        """New lengths over the same arrays, and states by `gated_delta.replay`."""
        with scope(kv.dtype_of(family.full)):
            return kv.select(family, counts)

    def lengths(self, cache: kv.Cache) -> tuple[int, ...]:
        """Read them off."""
        return tuple(row.length for row in cache)

    def mark(self, cache: kv.Cache) -> kv.Cache:
        """See `cache.mark`."""
        return kv.mark(cache)

    def rewind(self, cache: kv.Cache) -> kv.Cache:
        """See `cache.rewind`."""
        return kv.rewind(cache)

    def split_rows(self, cache: kv.Cache) -> tuple[kv.Cache, ...]:
        """A cache is its rows."""
        return tuple((row,) for row in cache)

    def join_rows(self, caches: tuple[kv.Cache, ...]) -> kv.Cache:
        """A cache is its rows."""
        return tuple(row for cache in caches for row in cache)

    def reserve(self, cache: kv.Cache, capacity: int) -> kv.Cache:
        """See `cache.reserve`; appending copies all the same, since jax's arrays are values."""
        return tuple(kv.reserve(row, capacity) for row in cache)

    def to_bits(self, array: Any) -> Bits:
        """Leave it as it is, but for bfloat16."""
        return to_bits(array)

    def from_bits(self, bits: Bits, device: str) -> np.ndarray:
        """Leave it as it is, but for bfloat16."""
        del device
        return from_bits(bits)

    def export_cache(self, cache: kv.Cache) -> dict[str, Bits]:
        """See `cache.export`."""
        return kv.export(cache)

    def import_cache(
        self,
        model: Model[Any],
        arrays: Mapping[str, Bits],
        lengths: tuple[int, ...],
        marks: tuple[int, ...],
        capacity: int,
    ) -> kv.Cache:
        """See `cache.restore`."""
        (empty,) = self.new_cache(model, capacity)
        return kv.restore(empty, arrays, lengths, marks)

    def raw_tensors(self, obj: Any) -> Iterable[tuple[str, str, tuple[int, ...], Iterable[bytes]]]:
        """None: the port claims no objects."""
        del obj
        return ()

    def asarray(self, values: np.ndarray, device: str) -> np.ndarray:
        """Leave it as it is."""
        del device
        return np.asarray(values)

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        """Leave it as it is, but for bfloat16."""
        return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def load() -> Port:
    """Return the port; the registry calls this."""
    return JaxPort()
