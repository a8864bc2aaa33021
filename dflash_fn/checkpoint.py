"""Checkpoints, apart from any array library: files, names, shapes, and what is left over; for the ports' `weights`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from dflash_fn import errors
from dflash_fn.config import DecoderSpec

__all__ = ["Reader", "centered_norms", "check_bits", "check_format", "one_device", "read_folder", "text_part"]

log = logging.getLogger("dflash_fn")

IGNORED = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints carry and that follow from the config."""

PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""What the text part of a model that also sees is called by transformers and by mlx-lm, and by text models."""

OTHER_PARTS = {
    "mtp.": "layers that predict further tokens",
    "model.mtp.": "layers that predict further tokens",
    "language_model.mtp.": "layers that predict further tokens",
    "model.visual.": "a vision tower",
    "visual.": "a vision tower",
    "vision_tower.": "a vision tower",
}
"""Parts of such models that are not run, by the beginnings of their tensors' names."""

Tensor = TypeVar("Tensor")


@dataclass(slots=True)
class Reader(Generic[Tensor]):
    """Tensors by name, each checked as it is taken, so that what is left over can be named.

    Attributes:
        name: of the source, for messages.
        tensors: what is there; each has a `shape`.
        convert: makes of a tensor what is handed out.
        joins: whether matrices with one input may be joined, because they are copied anyway.
        left: names not taken yet.
    """

    name: str
    tensors: Mapping[str, Any]
    convert: Callable[[Any], Tensor]
    joins: bool
    left: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.left = {name for name in self.tensors if not name.endswith(IGNORED)}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of exactly this shape, or raise CheckpointError."""
        return self.convert(self.raw(name, *shape))

    def raw(self, name: str, *shape: int) -> Any:
        """Return a tensor as `take` does, in the checkpoint's own dtype."""
        if name not in self.tensors:
            raise errors.CheckpointError(f"{self.name}: no tensor {name!r}; the checkpoint does not fit its config")
        self.left.discard(name)
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise errors.CheckpointError(
                f"{self.name}: tensor {name!r} has shape {list(tensor.shape)}; its config asks for {list(shape)}"
            )
        return tensor

    def linear(self, name: str, outputs: int, inputs: int, *, bias: bool) -> tuple[Tensor, Tensor | None]:
        """Return `name.weight` [outputs, inputs] and `name.bias` [outputs], or None where there is to be no bias."""
        weight = self.take(f"{name}.weight", outputs, inputs)
        return weight, self.take(f"{name}.bias", outputs) if bias else None

    def skip(self, name: str) -> None:
        """Let a tensor be there that is of no use."""
        self.left.discard(name)

    def finish(self) -> None:
        """Raise CheckpointError if there are tensors that nobody asked for."""
        if self.left:
            some = ", ".join(sorted(self.left)[:3])
            raise errors.CheckpointError(
                f"{self.name}: {len(self.left)} tensors that its config gives no use for, such as {some}"
            )


def read_folder(
    folder: Path, read_file: Callable[[Path], Mapping[str, Tensor]], damage: tuple[type[Exception], ...]
) -> dict[str, Tensor]:
    """Read all safetensors files of a folder.

    Args:
        folder: of the checkpoint.
        read_file: returns a file's tensors by name.
        damage: what `read_file` raises where a file is not whole.

    Raises:
        CheckpointError: no such file, one that cannot be read, or a tensor that is in two of them.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise errors.CheckpointError(f"{folder}: no *.safetensors file; expected a checkpoint in that format")
    tensors: dict[str, Tensor] = {}
    owners: dict[str, Path] = {}
    for file in files:
        if file.is_dir():
            raise errors.CheckpointError(f"{file}: is a folder; expected a safetensors file of that name")
        try:
            found = read_file(file)
        except damage as error:
            raise errors.CheckpointError(f"{file}: not a whole safetensors file ({error}); fetch it again") from None
        for name in found:
            if name in owners:
                raise errors.CheckpointError(
                    f"{folder}: tensor {name!r} is in both {owners[name].name} and {file.name}; "
                    "remove the file that does not belong to the checkpoint"
                )
            owners[name] = file
        tensors.update(found)
    return tensors


def centered_norms(tensors: Mapping[str, Any]) -> bool:
    """Whether a qwen3_5 checkpoint holds the norms' weights less 1, as transformers does; mlx-lm has added it.

    They tell apart by the convolutions, [channels, 1, kernel] there and [channels, kernel, 1] here, or, where there
    are none, by their names.
    """
    convolutions = [tensor for name, tensor in tensors.items() if name.endswith("conv1d.weight")]
    if convolutions:
        return all(tensor.shape[-1] != 1 for tensor in convolutions)
    return not any(name.startswith("language_model.") for name in tensors)


def text_part(name: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a checkpoint's text part, named as in text models; log which others there are."""
    kept, left = {}, Counter()
    for key, tensor in tensors.items():
        other = next((what for prefix, what in OTHER_PARTS.items() if key.startswith(prefix)), None)
        if other is not None:
            left[other] += 1
            continue
        prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), "")
        kept[PREFIXES.get(prefix, "") + key.removeprefix(prefix)] = tensor
    for what, count in sorted(left.items()):
        log.info("%s: %d tensors of %s are not read: only the text part is run", name, count, what)
    return kept


def check_format(port: str, name: str, spec: DecoderSpec, *known: str) -> None:
    """Raise UnsupportedModel unless a checkpoint's matrices are plain floats, or in a `known` format."""
    if spec.quantization is not None and spec.quantization not in known:
        raise errors.UnsupportedModel(
            f"{name}: its matrices are quantised in the format {spec.quantization!r}, which port {port} does not read; "
            f"use the float checkpoint{', or the one in the format ' + known[0] if known else ''}"
        )


def one_device(port: str) -> errors.InputError:
    """Return the error of a port that is asked to spread a model and has one device."""
    return errors.InputError(f"port {port} keeps a model on one device; device_map and mesh are for port torch")


def check_bits(port: str, bits: int | None) -> None:
    """Raise InputError where a port without quantised products is asked for them."""
    if bits is not None:
        raise errors.InputError(f"draft_bits: got {bits}; port {port} has no quantised products, leave it out")
