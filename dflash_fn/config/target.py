"""A target's config.json in, a `TargetSpec` out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dflash_fn import errors
from dflash_fn.config.decoder import FAMILIES, MODEL_TYPES, Family, architectures, decoder_values, is_draft
from dflash_fn.config.fields import Fields, is_integer
from dflash_fn.config.hybrid import text_fields
from dflash_fn.config.specs import TargetSpec

__all__ = ["parse_target"]


def parse_target(config: Mapping[str, Any], *, name: str = "target") -> TargetSpec:
    """Read the config.json of a dense llama, qwen3 or qwen3_5 model.

    Absent keys get the defaults of transformers' `LlamaConfig`, `Qwen3Config` and `Qwen3_5TextConfig`, but for those
    that say how large the weights are (`hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`,
    `vocab_size`): they must be there. Of a model that also sees, the text part is read, which the config wraps as
    `text_config`; its vision tower and its `mtp` layers are not run.

    Args:
        config: config.json as parsed by `json`, or a transformers config's `to_dict()`. The key
            `generation_eos_token_id` holds generation_config.json's `eos_token_id`, as
            `dflash_fn.sources.read_config` puts it there.
        name: what to call the model in messages.

    Raises:
        ConfigError: a key that is missing or makes no sense.
        UnsupportedModel: another family, a draft, or an option that no decoder here runs.

    Example:
        >>> spec = parse_target({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 96,
        ...                      "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": [7, 8]})
        >>> spec.num_kv_heads, spec.head_dim, spec.rope.theta, spec.eos_token_ids
        (4, 16, 10000.0, (7, 8))
    """
    fields = Fields(config, name)
    if is_draft(fields):
        raise errors.UnsupportedModel(
            f"{name}: this is the config of a DFlash draft; expected a target, such as Qwen3-8B"
        )
    if not fields.has("model_type"):
        raise fields.bad("model_type", " or ".join(FAMILIES))
    family = family_of(fields, MODEL_TYPES)
    if family == "qwen3_5":
        fields = text_fields(fields)
        family_of(fields, [known for known, owner in MODEL_TYPES.items() if owner == family])
    return TargetSpec(
        **decoder_values(fields, family),
        tied_head=fields.flag("tie_word_embeddings", False),
        eos_token_ids=eos_token_ids(fields, FAMILIES[family]),
    )


def family_of(fields: Fields, supported: Collection[str]) -> str:
    """Return the family that a config names by `model_type`, whose classes its `architectures` must be.

    Args:
        fields: of a whole model or its text part.
        supported: values of `model_type`; a text part that has none is of the first.

    Raises:
        UnsupportedModel: it names another family or class.
    """
    named = fields.values["model_type"] if fields.has("model_type") else next(iter(supported))
    if not isinstance(named, str) or named not in supported:
        raise fields.unsupported("model_type", f"supported are {', '.join(supported)}")
    family = MODEL_TYPES[named]
    known = FAMILIES[family].architectures
    if architectures(fields) and not set(known) & set(architectures(fields)):
        raise fields.unsupported("architectures", f"supported for {family} is {' or '.join(known)}")
    return family


def eos_token_ids(fields: Fields, family: Family) -> tuple[int, ...]:
    """Read the ids that end an answer: config.json's, then generation_config.json's, each once."""
    ids: list[int] = []
    for key in ("eos_token_id", "generation_eos_token_id"):
        value = fields.values[key] if fields.has(key) else []
        for token in value if isinstance(value, list | tuple) else [value]:
            if not is_integer(token) or token < 0:
                raise fields.bad(key, "a token id, a list of token ids, or null")
            ids.append(token)
    given = any(key in fields.values for key in ("eos_token_id", "generation_eos_token_id"))
    return tuple(dict.fromkeys(ids)) if given else family.eos
