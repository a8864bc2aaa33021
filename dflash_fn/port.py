"""The protocol that a port implements. These docstrings are the specification; ports say only what differs.

A port is a set of pure functions over its own arrays and caches. A `Cache` is a value: no call changes what an
earlier one returned, however much memory they share. Shapes: R rows, W width, B block size, S tokens in a chunk,
V vocabulary, H hidden size, L tapped layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dflash_fn.config import DecoderSpec, DraftSpec, TargetSpec
from dflash_fn.container import Bits
from dflash_fn.records import Array, Cache, Model
from dflash_fn.sources import Source

__all__ = ["Compiles", "Port", "PortInfo", "TargetPass"]


@dataclass(frozen=True, slots=True)
class PortInfo:
    """What `dflash-fn ports` and `dflash-fn doctor` print of a port.

    Attributes:
        name: as it is registered.
        backend: array library and version, such as `torch 2.13.0`.
        devices: names that `device=` takes here, the default first.
        dtypes: names that `dtype=` takes.
        threads: threads that products use on a CPU.
        notes: what one should know of this machine before one chooses a dtype or a device; empty where all is well.
    """

    name: str
    backend: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    threads: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetPass:
    """Result of one target pass over a chunk.

    Attributes:
        logits: [R, S, V] in the model's dtype, or None where `head` was False.
        features: [R, S, L * H], the tapped hidden states side by side, or None where `taps` was empty.
        family: the caches after 0, 1, ... S of the chunk's tokens; `Port.select` takes one.
    """

    logits: Array | None
    features: Array | None
    family: Any


@runtime_checkable
class Port(Protocol):
    """Functions that run targets and drafts on one array library.

    Attributes:
        name: as it is registered, such as `torch`.
        prefill_width: tokens in a whole prefill chunk. A shorter last chunk is padded (see `dflash_fn.opening`).
        max_width: the widest verification for which the guarantee of `target_pass` holds.
        xp: the port's array namespace, within the subset of the array API standard that `dflash_fn.policies` lists.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def prefill_width(self) -> int: ...  # noqa: D102
    @property
    def max_width(self) -> int: ...  # noqa: D102
    @property
    def xp(self) -> Any: ...  # noqa: D102

    def info(self) -> PortInfo:
        """Say what this port runs on."""
        ...

    def peak_memory(self) -> float:
        """Return the most memory that the process has held so far, in GB: the accelerator's where one is in use."""
        ...

    def claims(self, obj: object) -> bool:
        """Whether `obj` is a model of the port's library in memory, which `load_target` or `load_draft` can read."""
        ...

    def config_of(self, obj: Any) -> dict[str, Any] | None:
        """Return what config.json would say of an object that the port claims; None where the object has no config."""
        ...

    def spread(self, *specs: DecoderSpec, device_map: Any = None, mesh: Any = None) -> Port:
        """Return this port, set to spread what it loads over several devices or processes; see `dflash_fn.load_pair`.

        Args:
            specs: of the target, and of the draft where there is one: what is to be spread.
            device_map: where each layer of the target goes, or a way to find that out; None with a mesh.
            mesh: the processes that share each layer; None with a map.

        Raises:
            InputError: a port, a map, a mesh or a model for which that cannot be.
        """
        ...

    def load_target(
        self, source: Source, spec: TargetSpec, *, dtype: str | None, device: str | None
    ) -> Model[TargetSpec]:
        """Read a target's weights.

        Args:
            source: a checkpoint folder, or a model object in memory, which is read and never changed.
            spec: the record parsed from its config.
            dtype: `float32`, `bfloat16` or `float16`; None takes the checkpoint's own on an accelerator and float32
                on a CPU.
            device: one of `PortInfo.devices`; None takes the first, or the object's own.

        Raises:
            CheckpointError: a tensor is missing, has another shape than the spec says, or cannot be read.
            InputError: an unknown dtype or device.
            UnsupportedModel: the spec asks for a layer kind, or a format of weights, that this port does not run.
        """
        ...

    def load_draft(
        self, source: Source, spec: DraftSpec, target: Model[TargetSpec], *, bits: int | None = None
    ) -> Model[DraftSpec]:
        """Read a draft's weights, onto the target's device and in its dtype. Raises as `load_target` does.

        Args:
            source: as in `load_target`.
            spec: the record parsed from its config.
            target: the model that it drafts for.
            bits: to round the draft's matrices to, on ports with quantised products; InputError on others. None
                leaves them as they are.
        """
        ...

    def load_tokenizer(self, source: str | Path) -> Any:
        """Read a tokenizer from a folder: an object with the methods of transformers' tokenizers."""
        ...

    def new_cache(self, model: Model[Any], capacity: int) -> Cache:
        """Return an empty cache of one row with room for at least `capacity` tokens before it must grow."""
        ...

    def target_pass(
        self,
        target: Model[TargetSpec],
        cache: Cache,
        tokens: Array,
        *,
        taps: tuple[int, ...],
        head: bool,
        exact_rows: bool,
    ) -> TargetPass:
        """Run the target over S more tokens a row.

        Row r's tokens take the positions `len(cache row r)` and on; slot s sees every cached token and slots 0..s.

        Args:
            target: the model.
            cache: of R rows; unchanged by the call.
            tokens: [R, S] integers.
            taps: target layers to tap: id i gives the output of layer i, that is `hidden_states[i + 1]` of
                transformers (which is taken after the final norm where i is the last layer).
            head: whether logits are wanted.
            exact_rows: whether row r must have the bits that it has alone.

        Guarantees:
            At a given (R, S) each slot's results depend, bit for bit, only on its row's earlier tokens: not on the
            slot, on later slots, on what buffers held before, or on how the cache came about (P01), as long as the keys
            and values of the chunk are finite.
            In any chunks, logits and features are those of transformers' model, but for rounding (P11).
        """
        ...

    def select(self, family: Any, counts: tuple[int, ...]) -> Cache:
        """Return the cache after the first `counts[r]` of the chunk's tokens in each row r; 0 <= counts[r] <= S."""
        ...

    def draft_context(
        self, draft: Model[DraftSpec], cache: Cache, features: Array, counts: tuple[int, ...], *, exact_rows: bool
    ) -> Cache:
        """Let the draft read context features: `features[r, :counts[r]]` become the next K/V rows of row r.

        Args:
            draft: the model.
            cache: the draft's, of R rows; unchanged by the call.
            features: [R, S, L * H] as a target pass returned them.
            counts: how many of the S are real; the rest must leave no trace.
            exact_rows: whether row r must have the bits that it has alone.
        """
        ...

    def draft_pass(
        self, draft: Model[DraftSpec], target: Model[TargetSpec], cache: Cache, block: Array, *, exact_rows: bool
    ) -> Array:
        """Fill a block of masked tokens.

        Args:
            draft: the model.
            target: whose embedding and head the draft uses.
            cache: the draft's, which covers every token before the anchor; unchanged by the call.
            block: [R, B] integers: the anchor, then B - 1 mask tokens; at positions `len(cache row r)` and on.
            exact_rows: whether row r must have the bits that it has alone.

        Returns:
            [R, B - 1, V] logits of the slots after the anchor.
        """
        ...

    def lengths(self, cache: Cache) -> tuple[int, ...]:
        """Return how many tokens each row of a cache covers."""
        ...

    def mark(self, cache: Cache) -> Cache:
        """Return the same cache, with `rewind` set to come back to its present lengths."""
        ...

    def rewind(self, cache: Cache) -> Cache:
        """Return the cache as it was when it, or the one it was made from, was last marked; empty if never."""
        ...

    def split_rows(self, cache: Cache) -> tuple[Cache, ...]:
        """Return one single-row cache a row, marks included."""
        ...

    def join_rows(self, caches: tuple[Cache, ...]) -> Cache:
        """Return one cache whose rows are these caches' rows, marks included."""
        ...

    def reserve(self, cache: Cache, capacity: int) -> Cache:
        """Return the same cache with room for `capacity` tokens a row, so that appending them copies nothing."""
        ...

    def to_bits(self, array: Array) -> Bits:
        """Fetch an array to the host as a file holds it: bfloat16 as its bits in uint16."""
        ...

    def from_bits(self, bits: Bits, device: str) -> Array:
        """Hand an array from a file to the port."""
        ...

    def export_cache(self, cache: Cache) -> dict[str, Bits]:
        """Fetch what a cache sees, in the layout that all ports share.

        Returns:
            By `{layer}.{row}.{array}`, of the layers that have them:

            * `keys`, `values`: [length of the row, kv_heads, head_dim], of full attention.
            * `window_keys`, `window_values`: [tokens, kv_heads, head_dim], of a layer that slides: the last
              `window - 1` tokens of the row, or all of a shorter one.
            * `conv`: [kernel - 1, channels], what a gated delta net's convolution saw last; zeros before the first
              token. `recurrent`: [value_heads, key_dim, value_dim], its state, in float32.
            * `marked_` and one of the last four names: the same at the row's mark, where that is neither 0 nor the
              row's length.
        """
        ...

    def import_cache(
        self,
        model: Model[Any],
        arrays: Mapping[str, Bits],
        lengths: tuple[int, ...],
        marks: tuple[int, ...],
        capacity: int,
    ) -> Cache:
        """Return a cache that sees what `export_cache` fetched, on any port.

        Args:
            model: whose cache it is.
            arrays: as `export_cache` returned them.
            lengths: of the rows.
            marks: lengths that `rewind` goes back to.
            capacity: tokens a row to make room for.
        """
        ...

    def raw_tensors(self, obj: Any) -> Iterable[tuple[str, str, tuple[int, ...], Iterable[bytes]]]:
        """Go over the tensors of a model in memory, by name: (name, dtype as safetensors has it, shape, bytes)."""
        ...

    def asarray(self, values: np.ndarray, device: str) -> Array:
        """Hand a numpy array to the port."""
        ...

    def to_numpy(self, array: Array) -> np.ndarray:
        """Fetch an array to the host (bfloat16 as float32, which holds every value of it)."""
        ...


@runtime_checkable
class Compiles(Protocol):
    """A port that can have kernels compiled for the machine; `load_pair(compile=True)` asks for them."""

    def compiling(self) -> Port:
        """Return the port whose models run on kernels that a compiler of this machine made, now or earlier.

        Raises:
            BackendMissing: there is no compiler, or it fails.

        Guarantees:
            What `Port` guarantees. Bits may differ from those of the port as it is, as between two machines.
        """
        ...
