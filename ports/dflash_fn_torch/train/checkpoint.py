"""Weights and optimisers to and from what a checkpoint file holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from dflash_fn import errors
from dflash_fn.container import Bits
from dflash_fn_torch.train.optimiser import Optimiser

__all__ = ["fetch", "put_back", "read_named", "write_model"]


def fetch(weights: Mapping[str, Tensor], optimiser: Optimiser) -> dict[str, Bits]:
    """Fetch everything that a step changes."""
    groups = {"weights": weights, "first": optimiser.first, "second": optimiser.second}
    return {
        f"{group}/{name}": Bits("float32", tensor.detach().cpu().numpy().copy())
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def put_back(weights: Mapping[str, Tensor], optimiser: Optimiser, arrays: Mapping[str, Bits]) -> None:
    """Copy what `fetch` fetched into place.

    Raises:
        StateFileError: the checkpoint holds other tensors.
    """
    groups = {"weights": weights, "first": optimiser.first, "second": optimiser.second}
    places = {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in places.items()}
    if shapes != {name: bits.values.shape for name, bits in arrays.items()}:
        raise errors.StateFileError("the checkpoint holds other weights than this run trains; give another folder")
    for name, tensor in places.items():
        tensor.copy_(torch.from_numpy(arrays[name].values.copy()))


def read_named(folder: Path, *endings: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint folder whose names end so, in float32, by ending; those there are.

    Raises:
        CheckpointError: there is no such folder or file.
    """
    found: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise errors.CheckpointError(f"{folder}: no *.safetensors file; expected a checkpoint in that format")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                for ending in endings:
                    if name == ending or name.endswith(f".{ending}"):
                        found[ending] = opened.get_tensor(name).float()
    return found


def write_model(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors, in bfloat16."""
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    rounded = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()}
    # safetensors' own files can be read by nobody else, whatever the umask says
    (folder / "model.safetensors").write_bytes(save(rounded, metadata={"format": "pt"}))
