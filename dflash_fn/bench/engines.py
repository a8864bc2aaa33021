"""Other people's engines, loaded as ours are: the same weights, dtype and device."""

from __future__ import annotations

from typing import Any

from dflash_fn import errors
from dflash_fn.sources import Source

__all__ = ["mlx_lm_model", "transformers_model"]


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
