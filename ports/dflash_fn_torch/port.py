"""The port itself: `dflash_fn.port.Port` on torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dflash_fn import errors
from dflash_fn.checkpoint import check_bits, check_format
from dflash_fn.config import DecoderSpec, DraftSpec, TargetSpec
from dflash_fn.container import Bits
from dflash_fn.memory import peak_host_memory
from dflash_fn.port import Port, PortInfo, TargetPass
from dflash_fn.records import Model
from dflash_fn.sources import Source
from dflash_fn_torch import moves, parts
from dflash_fn_torch import namespace as xp
from dflash_fn_torch.attention import MAX_WIDTH
from dflash_fn_torch.decoder import target_pass
from dflash_fn_torch.draft import draft_context, draft_pass
from dflash_fn_torch.native import KINDS, library
from dflash_fn_torch.ops import has_bfloat16_units
from dflash_fn_torch.placement import checked_map, map_in_memory, map_of, places_of
from dflash_fn_torch.weights import read_draft, read_target

if TYPE_CHECKING:
    from dflash_fn.train.trainer import Trainer
    from dflash_fn_torch.sharding import Share

__all__ = ["TorchPort", "load"]

SHORT = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
NO_BFLOAT16_UNITS = (
    "this CPU has no bfloat16 units, so bfloat16 is slower than float32 as torch runs it; with compile it is kept in "
    "16 bits and computed in float32, which is not"
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class TorchPort:
    """torch on a CPU or on CUDA; a cache is a `dflash_fn_torch.parts.Cache`, a family a `parts.Family`.

    Attributes:
        name: as it is registered.
        prefill_width: see `dflash_fn.port.Port`.
        max_width: the same.
        compiled: whether models that it loads run on our own CPU kernels (`dflash_fn_torch.native`).
        share: what this process holds of models that several share; None where it holds all of them.
        device_map: where the layers of a target that is loaded go, or how to find out; None for one device.
    """

    name: str = "torch"
    prefill_width: int = 256
    max_width: int = MAX_WIDTH
    compiled: bool = False
    share: Share | None = None
    device_map: Mapping[str, Any] | str | None = None

    @property
    def xp(self) -> Any:
        """See `namespace`."""
        return xp

    def info(self) -> PortInfo:
        """Say what torch runs on; CUDA devices come first, because `device=None` takes the first."""
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
        notes = () if cuda or has_bfloat16_units() else (NO_BFLOAT16_UNITS,)
        backend, devices = f"torch {torch.__version__}", (*cuda, "cpu")
        return PortInfo(self.name, backend, devices, tuple(DTYPES), torch.get_num_threads(), notes)

    def compiling(self) -> TorchPort:
        """Return a port whose models run on our own kernels, compiled now where this machine has none yet."""
        library()
        return replace(self, compiled=True)

    def spread(self, *specs: DecoderSpec, device_map: Any = None, mesh: Any = None) -> Port:
        """Take a map of `placement`, or a share of a mesh; what that needs is imported only now."""
        if device_map is not None:
            return replace(self, device_map=checked_map(device_map))
        from dflash_fn_torch.mesh import share_of

        return replace(self, share=share_of(mesh, *specs))

    def trainer(self) -> Trainer:
        """Return what trains here (`dflash_fn.train.trainer.Trains`); imported only when it is asked for."""
        from dflash_fn_torch.train.trainer import TorchTrainer

        return TorchTrainer(self.info().devices)

    def peak_memory(self) -> float:
        """Ask CUDA's allocator, over all devices; the system where it has allocated nothing."""
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        return sum(torch.cuda.max_memory_allocated(i) for i in devices) / 1e9 or peak_host_memory()

    def claims(self, obj: object) -> bool:
        """Whether `obj` is a torch module."""
        return isinstance(obj, torch.nn.Module)

    def config_of(self, obj: Any) -> dict[str, Any] | None:
        """Read the config of a transformers model, with the stop tokens of its generation config."""
        config: Any = getattr(obj, "config", None)
        if not hasattr(config, "to_dict"):
            return None
        eos = getattr(getattr(obj, "generation_config", None), "eos_token_id", None)
        return config.to_dict() | ({} if eos is None else {"generation_eos_token_id": eos})

    def load_target(
        self, source: Source, spec: TargetSpec, *, dtype: str | None, device: str | None
    ) -> Model[TargetSpec]:
        """Read a target; off the CPU a module's own tensors are used in place where dtype and device allow."""
        check_format(self.name, source.name, spec)
        device_map = self.device_map or (None if device or self.share else map_in_memory(source.obj))
        if device_map is not None:
            _check_one_place(self.compiled, source)
            return self._placed(source, spec, device_map, dtype)
        place = self.share.device if self.share else self._device(source, device)
        name = dtype or (_own_dtype(source, spec) if source.obj is not None or place != "cpu" else "float32")
        if self.share is not None:
            return _shares().load_target(self.share, source, spec, name, _dtype(name))
        if self.compiled:
            _check_compiled(_dtype(name), place)
        weights = read_target(source, spec, _dtype(name), place, compiled=self.compiled)
        # A layer that is one call of our own kernels treats any number of slots alike.
        narrows = all(layer.fused is not None for layer in weights.layers)
        return Model(spec, weights, name, place, source, narrows=narrows)

    def load_draft(
        self, source: Source, spec: DraftSpec, target: Model[TargetSpec], *, bits: int | None = None
    ) -> Model[DraftSpec]:
        """Read a draft; there are no quantised products here."""
        check_format(self.name, source.name, spec)
        check_bits(self.name, bits)
        if self.share is not None:
            return _shares().load_draft(self.share, source, spec, target, _dtype(target.dtype))
        weights = read_draft(source, spec, _dtype(target.dtype), target.device, compiled=self.compiled)
        return Model(spec, weights, target.dtype, target.device, source)

    def load_tokenizer(self, source: str | Path) -> Any:
        """Read a tokenizer by transformers; by its general class where the folder names that one, without the rest."""
        if _names_general_class(Path(source)):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(source)
        from transformers import AutoTokenizer  # takes half a second more to import

        return AutoTokenizer.from_pretrained(source)

    def new_cache(self, model: Model[Any], capacity: int) -> parts.Cache:
        """Allocate zeros."""
        spec = self.share.spec(model.spec) if self.share else model.spec
        return parts.new(spec, capacity, dtype=_dtype(model.dtype), places=_places(model))

    def target_pass(
        self,
        target: Model[TargetSpec],
        cache: parts.Cache,
        tokens: Tensor,
        *,
        taps: tuple[int, ...],
        head: bool,
        exact_rows: bool,
    ) -> TargetPass:
        """See `decoder.target_pass`."""
        if self.share is None:
            return target_pass(target, cache, tokens, taps=taps, head=head, exact_rows=exact_rows)
        made = target_pass(self.share.model(target), cache, tokens, taps=taps, head=head, exact_rows=exact_rows)
        if made.logits is None:
            return made
        return replace(made, logits=self.share.logits(made.logits, target.spec.vocab_size))

    def draft_context(
        self,
        draft: Model[DraftSpec],
        cache: parts.Cache,
        features: Tensor,
        counts: tuple[int, ...],
        *,
        exact_rows: bool,
    ) -> parts.Cache:
        """See `draft.draft_context`."""
        run = self.share.model(draft) if self.share else draft
        return draft_context(run, cache, features, counts, exact_rows=exact_rows)

    def draft_pass(
        self, draft: Model[DraftSpec], target: Model[TargetSpec], cache: parts.Cache, block: Tensor, *, exact_rows: bool
    ) -> Tensor:
        """See `draft.draft_pass`."""
        if self.share is None:
            return draft_pass(draft, target, cache, block, exact_rows=exact_rows)
        part = draft_pass(self.share.model(draft), target, cache, block, exact_rows=exact_rows)
        return self.share.logits(part, draft.spec.vocab_size)

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

    @torch.inference_mode()
    def split_rows(self, cache: parts.Cache) -> tuple[parts.Cache, ...]:
        """See `parts.split`."""
        return parts.split(cache)

    @torch.inference_mode()
    def join_rows(self, caches: tuple[parts.Cache, ...]) -> parts.Cache:
        """See `parts.join`."""
        return parts.join(caches)

    @torch.inference_mode()
    def reserve(self, cache: parts.Cache, capacity: int) -> parts.Cache:
        """See `parts.reserve`."""
        return parts.reserve(cache, capacity)

    def asarray(self, values: np.ndarray, device: str) -> Tensor:
        """Copy to the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    def to_numpy(self, array: Tensor) -> np.ndarray:
        """Copy to the host; waits for the device."""
        array = array.detach()
        return (array.float() if array.dtype == torch.bfloat16 else array).cpu().numpy()

    def to_bits(self, array: Tensor) -> Bits:
        """Copy to the host; bfloat16 as uint16."""
        name = str(array.dtype).removeprefix("torch.")
        known = array.detach().cpu().contiguous()
        return Bits(name, (known.view(torch.uint16) if name == "bfloat16" else known).numpy())

    def from_bits(self, bits: Bits, device: str) -> Tensor:
        """Copy to the device."""
        known = torch.from_numpy(np.array(bits.values))
        return (known.view(torch.bfloat16) if bits.dtype == "bfloat16" else known).to(device)

    def export_cache(self, cache: parts.Cache) -> dict[str, Bits]:
        """See `moves.export`; of several processes, all must call this, and each gets the whole."""
        tensors = moves.export(cache)
        if self.share is not None:
            tensors = _shares().whole(self.share, tensors)
        return {name: self.to_bits(tensor) for name, tensor in tensors.items()}

    @torch.inference_mode()
    def import_cache(
        self,
        model: Model[Any],
        arrays: Mapping[str, Bits],
        lengths: tuple[int, ...],
        marks: tuple[int, ...],
        capacity: int,
    ) -> parts.Cache:
        """See `moves.restore`."""
        places = _places(model)
        tensors = {name: self.from_bits(bits, places[int(name.split(".")[0])]) for name, bits in arrays.items()}
        if self.share is not None:
            tensors = _shares().own(self.share, tensors)
        return moves.restore(self.new_cache(model, capacity), tensors, lengths, marks)

    def raw_tensors(self, obj: torch.nn.Module) -> Iterator[tuple[str, str, tuple[int, ...], list[bytes]]]:
        """Go over the state dict, less the names that share another's memory."""
        seen = set()
        for name, tensor in sorted(obj.state_dict().items()):
            place = (tensor.data_ptr(), tensor.shape)
            if place not in seen:
                seen.add(place)
                bits = self.to_bits(tensor)
                yield name, SHORT[bits.dtype], tuple(tensor.shape), [np.ascontiguousarray(bits.values).tobytes()]

    def _placed(
        self, source: Source, spec: TargetSpec, device_map: Mapping[str, Any] | str, dtype: str | None
    ) -> Model[TargetSpec]:
        """Read a target whose layers lie on several devices; in its own dtype where one of them may be no CPU."""
        known = self.info().devices
        name = dtype or (_own_dtype(source, spec) if source.obj is not None or known[0] != "cpu" else "float32")
        kind = _dtype(name)
        if isinstance(device_map, str):
            device_map = map_of(device_map, source.config, kind)
        places = places_of(device_map, spec, known)
        weights = read_target(source, spec, kind, None, view=places.tensors, head_of=lambda head: head.to(places.head))
        weights = replace(weights, places=places.layers)
        return Model(spec, weights, name, places.head, source, places.layout)

    def _device(self, source: Source, device: str | None) -> str:
        known = self.info().devices
        if device is None:
            return str(next(source.obj.parameters()).device) if source.obj is not None else known[0]
        place = "cuda:0" if device == "cuda" else device
        if place not in known:
            raise errors.InputError(f"port torch has no device {device!r} here; it has: {', '.join(known)}")
        return place


def _places(model: Model[Any]) -> tuple[str, ...]:
    """Return the device of each layer."""
    places = getattr(model.weights, "places", None)
    return places if places is not None else (model.device,) * model.spec.num_layers


def _shares() -> ModuleType:
    """Return what runs shares of models; imported only where there are some, for it needs torch's DTensor."""
    from dflash_fn_torch import shares

    return shares


def _own_dtype(source: Source, spec: DecoderSpec) -> str:
    if source.obj is None:
        return spec.dtype
    return str(next(source.obj.parameters()).dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise errors.InputError(f"port torch does not run in dtype {name!r}; it runs in: {', '.join(DTYPES)}")
    return DTYPES[name]


def _names_general_class(folder: Path) -> bool:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    known = config.get("tokenizer_class") if isinstance(config, dict) else None
    return known in ("PreTrainedTokenizerFast", "TokenizersBackend")


def _check_one_place(compiled: bool, source: Source) -> None:
    if compiled:
        raise errors.InputError(
            f"compile: {source.name} lies on several devices, and port torch compiles for cpu alone; load it onto one"
        )


def _check_compiled(dtype: torch.dtype, device: str) -> None:
    if device != "cpu":
        raise errors.InputError(
            f"compile: got device {device}; port torch compiles for cpu alone, so give device='cpu'"
        )
    if KINDS.index(dtype) >= library().dflash_kinds():
        raise errors.InputError(
            f"compile: the C++ compiler has no {dtype}; take float32 or bfloat16, or a newer compiler"
        )


def load() -> Port:
    """Return the port; the registry calls this."""
    return TorchPort()
