"""A DFlash draft's config.json in, a `DraftSpec` out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_fn import errors
from dflash_fn.config.decoder import architectures, decoder_values, is_draft
from dflash_fn.config.fields import Fields, is_integer
from dflash_fn.config.specs import DraftSpec, LayerKind

__all__ = ["parse_draft"]

ARCHITECTURE = "DFlashDraftModel"
NESTED = "dflash_config"
FAMILY = "qwen3"
"""Layers of every published draft, whatever its target is made of."""

DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

OTHER_DRAFTS = {
    "fc_layernorm": "norms of each tapped layer",
    "use_swa": "windows that layer_types does not list",
    "markov_rank": "Markov heads",
    "markov_head_type": "Markov heads",
    "enable_confidence_head": "confidence heads",
}
"""Keys with which other trainers mark a draft that computes something else, and what that is."""


def parse_draft(config: Mapping[str, Any], *, name: str = "draft") -> DraftSpec:
    """Read the config.json of a DFlash draft.

    A key counts wherever it is given, in `dflash_config` or beside it; where both have it, `dflash_config` wins. What
    makes a block (`block_size`, `mask_token_id`, `target_layer_ids`, `num_target_layers`) has no default.

    Args:
        config: config.json as parsed by `json`, or a transformers config's `to_dict()`.
        name: what to call the model in messages.

    Raises:
        ConfigError: a key that is missing or makes no sense.
        UnsupportedModel: a target, a DFlash 2 draft, or an option that no decoder here runs.

    Source:
        arXiv 2602.06036, and the config that upstream's package `dflash` 0.1.0 reads. That one falls back to a block
        size of 16, to evenly spread layers and to mask id 0 or None; here these are errors.

    Example:
        >>> spec = parse_draft({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16,
        ...                     "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "block_size": 16,
        ...                     "num_target_layers": 6, "dflash_config": {"block_size": 8, "mask_token_id": 95,
        ...                                                               "target_layer_ids": [1, 4]}})
        >>> spec.block_size, spec.target_layer_ids, spec.causal
        (8, (1, 4), (False,))
    """
    fields = Fields(config, name)
    if not is_draft(fields):
        raise errors.UnsupportedModel(
            f"{name}: this config is a target, not a draft: it has neither {NESTED} nor target_layer_ids, "
            f"nor the architecture {ARCHITECTURE}"
        )
    fields = flattened(fields)
    refuse_other_drafts(fields)
    values = decoder_values(fields, FAMILY)
    depth = fields.integer("num_target_layers")
    return DraftSpec(
        **values,
        block_size=fields.integer("block_size"),
        mask_token_id=mask_token_id(fields, values["vocab_size"]),
        target_layer_ids=target_layer_ids(fields, depth),
        num_target_layers=depth,
        causal=causal(fields, values["layer_kinds"]),
        input_embedding_scale=fields.number("input_embedding_scale", 1.0),
        output_multiplier=fields.number("output_multiplier", 1.0),
        logit_softcap=fields.number("final_logit_softcapping", 0.0, strict=False) or None,
    )


def flattened(fields: Fields) -> Fields:
    """Lay the keys of `dflash_config` over the config; null there overrides nothing."""
    nested = {key: value for key, value in fields.table(NESTED).items() if value is not None}
    return Fields({**fields.values, **nested}, fields.name, dict.fromkeys(nested, f"{NESTED}."))


def refuse_other_drafts(fields: Fields) -> None:
    """Refuse DFlash 2 and the variants of other trainers, whose weights would run and mean something else."""
    names = architectures(fields)
    marks = [key for key in DFLASH2_KEYS if fields.values.get(key)]
    if "DFlash2DraftModel" in names or marks:
        found = fields.label("architectures") if "DFlash2DraftModel" in names else fields.label(marks[0])
        raise errors.UnsupportedModel(
            f"{found}: this is a DFlash 2 draft (DFlash2DraftModel); its convolutions (conv_*) and its candidate "
            f"selector (selector_*) are not supported; use a draft of architecture {ARCHITECTURE}"
        )
    if names and ARCHITECTURE not in names:
        raise fields.unsupported("architectures", f"supported is {ARCHITECTURE}")
    if fields.has("model_type") and fields.values["model_type"] != FAMILY:
        raise fields.unsupported("model_type", f"supported for drafts is {FAMILY}")
    for key, what in OTHER_DRAFTS.items():
        if fields.values.get(key):
            raise fields.unsupported(key, f"{what} are not supported")
    if fields.has("draft_vocab_size") and fields.values["draft_vocab_size"] != fields.values.get("vocab_size"):
        raise fields.unsupported("draft_vocab_size", "a draft vocabulary other than vocab_size is not supported")


def mask_token_id(fields: Fields, vocab_size: int) -> int:
    """Read the id of the mask token, which must have a row in the embedding."""
    token = fields.integer("mask_token_id", minimum=0)
    if token >= vocab_size:
        raise fields.bad("mask_token_id", f"an id below vocab_size, which is {vocab_size}")
    return token


def target_layer_ids(fields: Fields, depth: int) -> tuple[int, ...]:
    """Read the tapped layers, each once and each inside the target."""
    expected = f"a list of different layers from 0 to {depth - 1}, num_target_layers being {depth}"
    if not fields.has("target_layer_ids"):
        raise fields.bad("target_layer_ids", expected)
    ids = fields.sequence("target_layer_ids")
    inside = all(is_integer(layer) and 0 <= layer < depth for layer in ids)
    if not ids or not inside or len(set(ids)) != len(ids):
        raise fields.bad("target_layer_ids", expected)
    return ids


def causal(fields: Fields, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """Tell which layers hide later slots of the block: `is_causal` decides for all, without it those that slide."""
    if fields.has("is_causal"):
        return (fields.flag("is_causal", False),) * len(kinds)
    return tuple(kind is LayerKind.SLIDING for kind in kinds)
