"""Large targets on several devices, whole layers on each: where everything lies, and what moves between layers.

A map says where modules go, as transformers and accelerate write it: names of modules, or beginnings of names, and
their devices. Here it becomes a device for the embedding, one for each layer, and one for the head, where logits,
context features and the draft are too. Within a layer nothing ever moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dflash_fn import errors
from dflash_fn.checkpoint import text_part
from dflash_fn.config import TargetSpec

__all__ = ["STRATEGIES", "Places", "checked_map", "map_in_memory", "map_of", "places_of"]

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways to make a map, which accelerate knows; see its documentation."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of a target lie.

    Attributes:
        embedding: device of the embedding.
        layers: one device a layer.
        head: device of the final norm, of the head, and of what comes out.
    """

    embedding: str
    layers: tuple[str, ...]
    head: str

    @property
    def layout(self) -> str:
        """The places of the layers in words, for `dflash_fn.records.Model`; `whole` where there is one place only."""
        if {self.embedding, *self.layers} == {self.head}:
            return "whole"
        runs = ", ".join(f"{len(list(run))} on {device}" for device, run in groupby(self.layers))
        return f"layers {runs}, embedding on {self.embedding}, head on {self.head}"

    def of(self, name: str) -> str:
        """Return where a tensor of a checkpoint goes, by its name."""
        if name.startswith("model.layers."):
            index = int(name.split(".")[2])
            return self.layers[index] if index < len(self.layers) else self.head
        return self.embedding if name.startswith("model.embed_tokens.") else self.head

    def tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a view of a checkpoint whose tensors are where they go, or raise InputError if some have no data."""
        empty = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
        if empty is not None:
            raise errors.InputError(
                f"tensor {empty!r} of the model in memory is offloaded and has no data here; "
                "give the checkpoint's folder and a device_map, and it is read from there"
            )
        return Moved(tensors, self)


@dataclass(frozen=True, slots=True)
class Moved(Mapping[str, Tensor]):
    """Tensors by name, each moved to its place as it is taken."""

    tensors: Mapping[str, Tensor]
    places: Places

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].detach().to(self.places.of(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def checked_map(device_map: object) -> Mapping[str, Any] | str:
    """Return a map or the name of a way to make one, or raise InputError for what is neither."""
    if isinstance(device_map, Mapping) and all(isinstance(name, str) for name in device_map):
        return device_map
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return device_map
    got = repr(device_map) if isinstance(device_map, str) else f"an object of type {type(device_map).__name__}"
    raise errors.InputError(
        f"device_map: got {got}, expected a map from names of modules to devices, or one of: {', '.join(STRATEGIES)}"
    )


def map_in_memory(obj: object) -> Mapping[str, Any] | None:
    """Return the map of a transformers model that was loaded onto several devices; None for one device, or no model."""
    device_map = getattr(obj, "hf_device_map", None)
    return device_map if device_map and len({str(place) for place in device_map.values()}) > 1 else None


def places_of(device_map: Mapping[str, Any], spec: TargetSpec, known: tuple[str, ...]) -> Places:
    """Return where a map puts a target.

    Args:
        device_map: names of modules, `""` for all, and devices: `cuda:1`, 1, `torch.device("cuda", 1)`, `cpu`. The
            longest name that fits a module counts.
        spec: of the target.
        known: the devices that there are.

    Raises:
        InputError: a module without a place, a layer in several, or a device that is not here; `disk` is none.
    """
    names = text_part("device_map", {f"{name}.": name for name in device_map if name})
    rules = {name.removesuffix("."): _device(device_map[key], known) for name, key in names.items()}
    if "" in device_map:
        rules[""] = _device(device_map[""], known)
    layers = tuple(_layer_place(rules, f"model.layers.{layer}") for layer in range(spec.num_layers))
    embedding = _place(rules, "model.embed_tokens")
    head = embedding if spec.tied_head and "lm_head" not in rules else _place(rules, "lm_head")
    return Places(embedding, layers, head)


def _device(value: Any, known: tuple[str, ...]) -> str:
    name = f"cuda:{value}" if isinstance(value, int) else str(value)
    name = "cuda:0" if name == "cuda" else name
    if name not in known:
        raise errors.InputError(f"device_map: names device {name!r}; port torch has here: {', '.join(known)}")
    return name


def _place(rules: Mapping[str, str], module: str) -> str:
    fitting = [name for name in rules if not name or f"{module}.".startswith(f"{name}.")]
    if not fitting:
        raise errors.InputError(f"device_map: says nothing of {module!r}; give it a place, or '' one for all the rest")
    return rules[max(fitting, key=len)]


def _layer_place(rules: Mapping[str, str], layer: str) -> str:
    inner = {place for name, place in rules.items() if name.startswith(f"{layer}.")}
    outer = {_place(rules, layer)} if len(inner) != 1 or layer in rules else set()
    if len(inner | outer) > 1:
        raise errors.InputError(
            f"device_map: puts parts of {layer!r} on {' and '.join(sorted(inner | outer))}; a layer is on one device"
        )
    return next(iter(inner | outer))


def map_of(
    strategy: str, config: Mapping[str, Any], dtype: torch.dtype, memory: Mapping[Any, int] | None = None
) -> dict[str, Any]:
    """Return the map that accelerate makes of a target, from its config alone.

    Args:
        strategy: one of `STRATEGIES`.
        config: the target's config.json.
        dtype: that its weights will have.
        memory: bytes that each device has for weights; None asks the devices.

    Raises:
        BackendMissing: accelerate is not installed.
    """
    try:
        from accelerate import infer_auto_device_map
        from accelerate.utils import get_balanced_memory, get_max_memory
    except ImportError:
        raise errors.BackendMissing(
            f"device_map: {strategy!r} needs accelerate, which is not installed; run: "
            f"{errors.install_line('devices')}, or give a map from names of modules to devices"
        ) from None
    model = _empty_model(config, dtype)
    whole: list[str] = list(model._no_split_modules or ())
    given: dict[int | str, int | str] | None = dict(memory) if memory is not None else None
    if strategy == "sequential":
        given = get_max_memory(given)
    else:
        low = strategy == "balanced_low_0"
        given = get_balanced_memory(model, given, no_split_module_classes=whole, dtype=dtype, low_zero=low)
    return dict(infer_auto_device_map(model, given, no_split_module_classes=whole, dtype=dtype))


def _empty_model(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Make transformers' model of a config without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {key: value for key, value in config.items() if key not in ("model_type", "generation_eos_token_id")}
    made = AutoConfig.for_model(config["model_type"], **known)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    model.tie_weights()
    return model
