"""Other people's engines, with the weights, the dtype and the device that ours have."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dflash_fn import errors
from dflash_fn.records import Pair
from dflash_fn.sources import Source

__all__ = ["Decode", "Decoded", "generate", "mlx_lm", "mlx_lm_model", "transformers_model", "upstream"]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a way made of token ids.

    Attributes:
        tokens: that it emitted.
        first: seconds to the first of them; None where it emitted none.
        emitted: as in `Reply`.
        parts: as in `Reply`.
        blocks: as in `Reply`.
    """

    tokens: Sequence[int]
    first: float | None
    emitted: tuple[int, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    blocks: tuple[int, ...] = ()


Decode: TypeAlias = Callable[[list[int], int], Decoded]
"""Takes token ids, and the most tokens to emit."""


def transformers_model(source: Source, dtype: str, device: str = "cpu") -> Any:
    """Return a transformers model, ready to decode: the object itself where the source is one.

    Raises:
        CheckpointError: transformers cannot read the folder.
    """
    if source.obj is not None:
        return source.obj
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would write over what the command line says
    try:
        return AutoModelForCausalLM.from_pretrained(source.folder, dtype=dtype).to(device).eval()  # pyright: ignore
    except (OSError, ValueError, KeyError) as error:
        raise errors.CheckpointError(f"{source.folder}: transformers cannot load it ({error})") from error


def mlx_lm_model(source: Source, dtype: str) -> Any:
    """Return an mlx-lm model, ready to decode: the object itself where the source is one."""
    if source.obj is not None:
        return source.obj
    import mlx.core as mx
    import mlx_lm

    model: Any = mlx_lm.load(str(source.folder))[0]
    model.set_dtype(getattr(mx, dtype))
    return model


class _FirstToken:
    """A streamer of transformers that notes when the first token came; the prompt comes before it."""

    def __init__(self) -> None:
        self.calls, self.at = 0, None

    def put(self, value: Any) -> None:
        del value
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def generate(pair: Pair, stop: tuple[int, ...]) -> Decode:
    """Return transformers' greedy `generate` with the pair's target."""
    import torch

    assert pair.target.source is not None
    model = transformers_model(pair.target.source, pair.target.dtype, pair.target.device)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": list(stop) or None, "pad_token_id": 0}

    def decode(ids: list[int], count: int) -> Decoded:
        given, watch = torch.tensor([ids], device=pair.target.device), _FirstToken()
        begun = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=count, streamer=watch, **options
            )
        return Decoded(out[0, len(ids) :].tolist(), watch.at - begun if watch.at else None)

    return decode


def mlx_lm(pair: Pair, stop: tuple[int, ...]) -> Decode:
    """Return mlx-lm's `generate_step` with the pair's target, ended at the same tokens as ours."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    assert pair.target.source is not None
    model = mlx_lm_model(pair.target.source, pair.target.dtype)

    def decode(ids: list[int], count: int) -> Decoded:
        tokens: list[int] = []
        first, begun = None, time.perf_counter()
        for token, _ in generate_step(mx.array(ids), model, max_tokens=count):
            first = first if first is not None else time.perf_counter() - begun
            tokens.append(int(token))
            if tokens[-1] in stop:
                break
        return Decoded(tokens, first)

    return decode


def upstream(pair: Pair, block: int, stop: tuple[int, ...]) -> Decode:
    """Return upstream's `dflash_generate` with the pair's weights.

    Raises:
        BackendMissing: the package `dflash` is not installed.
    """
    import torch

    try:
        from dflash import model as theirs  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise errors.BackendMissing(
            "way upstream needs the package dflash, which is not installed; run: pip install --no-deps dflash==0.1.0"
        ) from None
    assert pair.draft is not None
    assert pair.draft.source is not None
    assert pair.target.source is not None
    device = pair.target.device
    if not device.startswith("cuda"):
        theirs._cuda_time = time.perf_counter  # it waits for CUDA whether there is one or not
    target = transformers_model(pair.target.source, pair.target.dtype, device)
    kind: Any = theirs.DFlashDraftModel
    draft = pair.draft.source.obj
    if draft is None:
        draft = kind.from_pretrained(pair.draft.source.folder, dtype=getattr(torch, pair.draft.dtype)).to(device).eval()

    def decode(ids: list[int], count: int) -> Decoded:
        given: Any = torch.tensor([ids], device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what upstream calls is not for who measures it to mend
            made: Any = theirs.dflash_generate(
                draft, target, given, count, list(stop), block_size=block, return_stats=True
            )
        return Decoded(
            made.output_ids[0, len(ids) :].tolist(), made.time_to_first_token, tuple(made.acceptance_lengths)
        )

    return decode
