"""What a call of transformers' `generate` asks for, read into one record; what is not supported is refused by name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_fn import errors

__all__ = ["Request", "read_request"]

FALSE = (
    "do_sample",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "constraints",
    "force_words_ids",
    "output_attentions",
    "output_hidden_states",
)
"""Fields of a generation config that may hold nothing, or false."""

ONE = ("num_beams", "num_return_sequences", "num_beam_groups")
"""Fields that may hold nothing, or 1."""

NEUTRAL = ("LogitNormalization", "InfNanRemoveLogitsProcessor")
"""Logits processors that leave the best of finite logits where it is."""

READ = ("attention_mask", "position_ids", "cache", "past_key_values")
IRRELEVANT = ("use_cache", "logits_to_keep", "cache_position", "return_dict")
"""Keyword arguments for `forward` that change no token."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `generate`.

    Attributes:
        input_ids: [R, T], padding on the left.
        rows: the prompts without padding.
        budget: tokens that each row may gain.
        stop_token_ids: ids that end a row.
        pad_token_id: what a row holds after its end; None where the config names neither it nor a stop id.
        processors: transformers' list of neutral logits processors, which make `scores` of logits.
        criteria: transformers' list of stopping criteria, stop ids and length among them.
        streamer: what is told each column of tokens, or None.
        as_record: whether a `GenerateDecoderOnlyOutput` is wanted.
        wants_scores: whether its `scores` are.
        wants_logits: whether its `logits` are.
    """

    input_ids: Tensor
    rows: tuple[tuple[int, ...], ...]
    budget: int
    stop_token_ids: tuple[int, ...]
    pad_token_id: int | None
    processors: Any
    criteria: Any
    streamer: Any
    as_record: bool
    wants_scores: bool
    wants_logits: bool

    @property
    def pads(self) -> bool:
        """Whether rows that have ended are padded, as `generate` does it where anything names stop ids."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)


def read_request(
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    streamer: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> Request:
    """Read what `generate` hands to a decoding method.

    Raises:
        InputError: anything that would make other tokens than greedy decoding of the prompts, one answer each; or that
            asks for what is not computed.
    """
    left_out = _left_out()
    _refuse_modes(config, synced_gpus or bool(left_out.get("synced_gpus")), left_out.get("assistant_model"))
    _refuse_processors(processors)
    _refuse_inputs(model_kwargs)
    as_record, stops = bool(config.return_dict_in_generate), _ids(config.eos_token_id)
    pads = _ids(config.pad_token_id) or stops
    return Request(
        input_ids=input_ids,
        rows=_rows(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")),
        budget=config.max_length - input_ids.shape[1],
        stop_token_ids=stops,
        pad_token_id=pads[0] if pads else None,
        processors=processors,
        criteria=criteria,
        streamer=streamer or left_out.get("streamer"),
        as_record=as_record,
        wants_scores=as_record and bool(config.output_scores),
        wants_logits=as_record and bool(config.output_logits),
    )


def _left_out() -> dict[str, Any]:
    """Return arguments of the `generate` that is calling which it hands to its own decoding methods alone."""
    # transformers (5.0 to 5.24) drops them where `custom_generate` is a function: a streamer would be told the prompt
    # and nothing more, an assistant would be ignored, both without a word. Its frame is the one place that has them.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
        frame = frame.f_back
    return {}


def _refuse_modes(config: Any, synced_gpus: bool, assistant_model: Any) -> None:
    wrong = {name: value for name in FALSE if (value := getattr(config, name, None))}
    wrong |= {name: value for name in ONE if (value := getattr(config, name, None)) not in (None, 1)}
    if assistant_model is not None:
        wrong["assistant_model"] = type(assistant_model).__name__
    if synced_gpus:
        wrong["synced_gpus"] = True
    if getattr(config, "cache_implementation", None) == "quantized":
        wrong["cache_implementation"] = "quantized"
    for name, value in wrong.items():
        raise errors.InputError(
            f"custom_generate: got {name}={value!r}, from the call or the model's generation config; supported is "
            f"greedy decoding, one answer a prompt{'; pass do_sample=False' if name == 'do_sample' else ''}"
        )


def _refuse_processors(processors: Any) -> None:
    for processor in processors:
        if type(processor).__name__ not in NEUTRAL:
            raise errors.InputError(
                f"custom_generate: got the logits processor {type(processor).__name__}, from logits_processor= or from "
                "an option that makes one (repetition_penalty, min_new_tokens, bad_words_ids, ...); none is supported"
            )


def _refuse_inputs(model_kwargs: dict[str, Any]) -> None:
    for name, value in model_kwargs.items():
        if name not in READ + IRRELEVANT and value is not None:
            raise errors.InputError(f"custom_generate: got {name}=; supported inputs are input_ids and attention_mask")
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
            raise errors.InputError(f"custom_generate: got {name}=, which it neither reads nor fills; leave it out")


def _rows(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """Return the prompts without their padding on the left."""
    seen = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    for row, slots in enumerate(seen.tolist()):
        if slots != sorted(slots) or slots[-1:] != [1]:
            raise errors.InputError(
                f"custom_generate: row {row} of attention_mask is not zeros and then ones; pad on the left "
                "(padding_side='left')"
            )
    expected = (seen.cumsum(-1) - 1).clamp(min=0)
    if positions is not None and not torch.equal(positions.to(seen.device).expand_as(seen) * seen, expected * seen):
        raise errors.InputError("custom_generate: got position_ids= that do not count the prompt's tokens from 0 on")
    return tuple(tuple(ids[real.bool()].tolist()) for ids, real in zip(input_ids, seen, strict=True))


def _ids(value: Any) -> tuple[int, ...]:
    """Return the ids that a config names: none, one, or several."""
    if value is None:
        return ()
    known = value.tolist() if isinstance(value, Tensor) else value
    return tuple(known) if isinstance(known, (list, tuple)) else (known,)
