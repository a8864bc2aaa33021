"""Loading a pair, and refusing targets, drafts and tokenizers that do not fit each other."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_fn import errors
from dflash_fn.config import DraftSpec, TargetSpec, parse_draft, parse_target
from dflash_fn.port import Compiles, Port
from dflash_fn.records import Pair
from dflash_fn.registry import get_port, port_names
from dflash_fn.sources import Source, resolve

__all__ = ["check_pair", "check_tokenizer", "load_pair", "load_zoo", "read_tokenizer"]

LEAST_TOKENIZER_SHARE = 0.9
"""Vocabularies are padded to round numbers, never by a tenth: a smaller tokenizer belongs to another model."""


def load_pair(
    target: str | Path | object,
    draft: str | Path | object | None = None,
    *,
    port: str | Port = "torch",
    dtype: str | None = None,
    device: str | None = None,
    device_map: Mapping[str, Any] | str | None = None,
    mesh: Any = None,
    tokenizer: Any = None,
    draft_bits: int | None = None,
    compile: bool = False,  # noqa: A002 (the word of torch and of the command line)
    name: str | None = None,
) -> Pair:
    """Load a target and its draft.

    Everything that can be checked without weights is checked before any weight is read.

    Args:
        target: a checkpoint folder, a name of the zoo, a hub id, or a model in memory (torch: a transformers model,
            mlx: an mlx-lm model, which has no stop ids), which is read and never changed. On a CPU torch copies its
            matrices into the layout for products; else they are used in place.
        draft: the same for a DFlash draft in upstream's format; None for plain decoding.
        port: a registered port's name, or a port.
        dtype: `float32`, `bfloat16` or `float16`; None takes float32 on a CPU, the checkpoint's own on an
            accelerator, and a model in memory's own.
        device: the port's name of a device; None takes its first, and a model in memory's own.
        device_map: where the layers of a large target go (torch): a map of transformers, from names of modules to
            devices, or a way to make one (`auto`, `balanced`, `balanced_low_0`, `sequential`). None for one device,
            or what a model in memory has as `hf_device_map`.
        mesh: the processes that share each layer (torch): a `DeviceMesh` of one dimension, or how many `torchrun`
            has started. All of them then call everything alike, and get the same tokens.
        tokenizer: a tokenizer, or a folder to read one from; None reads the target's folder if it holds one.
        draft_bits: bits to round the draft's matrices to when they are read (mlx: 4 or 8, say), so that it is faster;
            the text stays the target's. None leaves them as they are.
        compile: whether to run on kernels that this machine's C++ compiler makes, once, for this machine (torch on a
            CPU): faster, under the same contract. Bits may differ from those without it.
        name: for reports; None takes the target's.

    Raises:
        UnknownPort, BackendMissing: no such port, or its backend is not installed; nothing to compile with.
        DownloadError: a hub id that is neither cached nor reachable.
        ConfigError, UnsupportedModel: a config.json that lacks a key, or that nothing here runs.
        HiddenSizeMismatch, VocabularyMismatch, TappedLayerMismatch, TargetLayersMismatch, MaskTokenMismatch,
        TokenizerMismatch: the parts do not fit each other.
        CheckpointError: weights that are missing, damaged or of other shapes.
        InputError: what is neither folder, hub id nor model of the port, or what the port does not have; a map, a
            mesh or a model that cannot be spread.
    """
    engine = _compiling(_engine(port)) if compile else _engine(port)
    source = _resolved(engine, target, "target")
    spec = parse_target(source.config, name=source.name)
    draft_source = _resolved(engine, draft, "draft") if draft is not None else None
    draft_spec = parse_draft(draft_source.config, name=draft_source.name) if draft_source else None
    if draft_spec:
        check_pair(spec, draft_spec)
    if device_map is not None or mesh is not None:
        _check_alone(compile, device_map)
        engine = _spread(engine, [spec, draft_spec], device, device_map, mesh)
    words = read_tokenizer(engine, source, tokenizer)
    if words is not None:
        check_tokenizer(spec, words, draft_source)
    loaded = engine.load_target(source, spec, dtype=dtype, device=device)
    if draft_source is None or draft_spec is None:
        return Pair(loaded, None, engine, words, name or source.name)
    guess = engine.load_draft(draft_source, draft_spec, loaded, bits=draft_bits)
    return Pair(loaded, guess, engine, words, name or source.name)


def load_zoo(name: str = "tiny-code", **options: Any) -> Pair:
    """Load a named pair of the zoo; the options are those of `load_pair`.

    Raises:
        InputError: no pair of that name.
        DownloadError: it must be downloaded, and cannot be.
    """
    from dflash_fn import zoo

    files = zoo.fetch(name)
    return load_pair(files.target, files.draft, name=name, **options)


def check_pair(target: TargetSpec, draft: DraftSpec) -> None:
    """Raise the error that says why these two do not fit, if they do not.

    The draft uses the target's embedding and head and reads its layers, so hidden size, vocabulary, depth and tapped
    layers must agree, and the mask token must have a row in the embedding.
    """
    if draft.hidden_size != target.hidden_size:
        raise errors.HiddenSizeMismatch(
            f"the draft has hidden size {draft.hidden_size}, the target {target.hidden_size}; "
            "the draft was made for another target"
        )
    if draft.vocab_size != target.vocab_size:
        raise errors.VocabularyMismatch(
            f"the draft has a vocabulary of {draft.vocab_size}, the target of {target.vocab_size}; "
            "the draft was made for another target"
        )
    beyond = [i for i in draft.target_layer_ids if i >= target.num_layers]
    if beyond:
        raise errors.TappedLayerMismatch(
            f"the draft taps target layer {beyond[0]}; the target has layers 0 to {target.num_layers - 1}"
        )
    if draft.num_target_layers != target.num_layers:
        raise errors.TargetLayersMismatch(
            f"the draft was trained for a target of {draft.num_target_layers} layers; this one has {target.num_layers}"
        )
    if not 0 <= draft.mask_token_id < target.vocab_size:
        raise errors.MaskTokenMismatch(
            f"the draft's mask token is {draft.mask_token_id}; the target's ids end at {target.vocab_size - 1}"
        )


def check_tokenizer(target: TargetSpec, tokenizer: Any, draft: Source | None) -> None:
    """Raise TokenizerMismatch if the tokenizer is plainly not the target's, or the draft brings another one."""
    size = len(tokenizer)
    if size > target.vocab_size or size < LEAST_TOKENIZER_SHARE * target.vocab_size:
        raise errors.TokenizerMismatch(
            f"the tokenizer has {size} tokens, the target's vocabulary {target.vocab_size}; "
            "give the tokenizer that the target was trained with"
        )
    file = draft.folder / "tokenizer.json" if draft and draft.folder else None
    if file and file.is_file():
        theirs = json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("vocab", {})
        ours = tokenizer.get_vocab()
        if any(ours.get(token) != index for token, index in dict(theirs).items()):
            raise errors.TokenizerMismatch(f"{file}: gives tokens other ids than the target's tokenizer does")


def _engine(port: Any) -> Port:
    if isinstance(port, str):
        return get_port(port)
    if not callable(getattr(port, "load_target", None)):
        raise errors.InputError(
            f"port: got {reprlib.repr(port)}, expected a port or the name of one: {', '.join(port_names())}"
        )
    return port


def _spread(port: Port, specs: list[Any], device: str | None, device_map: Any, mesh: Any) -> Port:
    if device_map is not None and mesh is not None:
        raise errors.InputError("device_map and mesh exclude each other; a mesh has a device for each process")
    if device is not None:
        other = "device_map" if device_map is not None else "mesh"
        raise errors.InputError(f"device and {other} exclude each other; {other} says where the weights go")
    return port.spread(*(spec for spec in specs if spec is not None), device_map=device_map, mesh=mesh)


def _check_alone(compiled: bool, device_map: Any) -> None:
    if compiled:
        other = "device_map" if device_map is not None else "mesh"
        raise errors.InputError(
            f"compile and {other} exclude each other; compiled kernels run whole layers on one CPU, in one process"
        )


def _compiling(port: Port) -> Port:
    if not isinstance(port, Compiles):
        raise errors.InputError(f"compile: port {port.name} has no kernels to compile; leave compile out")
    return port.compiling()


def _resolved(port: Port, source: Any, role: str) -> Source:
    if isinstance(source, (str, Path)):
        found = resolve(source, role=role)
        # states are compared by the place of their weights, which must not change its meaning with the current folder
        return replace(found, folder=found.folder.absolute()) if found.folder else found
    config = port.config_of(source) if port.claims(source) else None
    if config is None:
        raise errors.InputError(
            f"{role}: got an object of type {type(source).__name__}, which port {port.name} cannot read; "
            "expected a folder, a hub id, or a model of that port's library that has its config with it"
        )
    return Source(type(source).__name__, config, obj=source)


def read_tokenizer(port: Port, source: Source, given: Any = None) -> Any:
    """Return the tokenizer that is given, or the one of its folder or else the source's; None if that holds none.

    Raises:
        CheckpointError: the folder's tokenizer cannot be read.
    """
    if given is not None and not isinstance(given, (str, Path)):
        return given
    folder = Path(given) if given is not None else source.folder
    if folder is None or (given is None and not any(folder.glob("tokenizer*"))):
        return None
    try:
        return port.load_tokenizer(folder)
    except Exception as error:  # tokenizers raise bare Exceptions on a damaged file
        if not (folder / "tokenizer.json").is_file():
            raise errors.CheckpointError(
                f"{folder}: there is no tokenizer.json, and what else is there makes no tokenizer; "
                "put the file there, or give another tokenizer"
            ) from error
        raise errors.CheckpointError(f"{folder}: its tokenizer cannot be read ({error})") from error
