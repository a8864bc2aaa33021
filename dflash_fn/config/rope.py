"""Rotary embeddings in config.json: the old keys and the new ones in, one `RopeSpec` out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dflash_fn import errors
from dflash_fn.config.fields import Fields, shown
from dflash_fn.config.specs import LayerKind, RopeSpec

__all__ = ["parse_rope"]

KINDS = ("default", "linear", "llama3", "yarn")

DEFAULT_THETA = 10000.0
"""transformers' `default_theta`, for both families."""

TABLES = ("rope_parameters", "rope_scaling")
"""What transformers 5 writes, and what transformers 4 wrote."""


def parse_rope(fields: Fields, *, head_dim: int, max_context: int, rotary: float = 1.0) -> RopeSpec:
    """Read the rotary embedding of a config, whichever style it is written in.

    A base inside `rope_parameters` or `rope_scaling` counts before `rope_theta` beside them, and 10000 only where
    neither is given.

    Args:
        fields: the whole config.
        head_dim: dimensions of a head.
        max_context: what stands in for an absent `original_max_position_embeddings`, as in transformers.
        rotary: share of a head that rotates where no key says so; families with 1.0 have no other share.

    Raises:
        ConfigError: a value that makes no sense, or two keys that contradict each other.
        UnsupportedModel: a kind that is none of `KINDS`, a part of a head, or a rotary embedding per layer kind.
    """
    if head_dim % 2:
        raise errors.ConfigError(
            f"{fields.name}: head_dim: got {head_dim}, expected an even number, since dimensions rotate in pairs"
        )
    rope = rope_fields(fields)
    refuse_kinds(rope)
    head_dim = rotary_dim(rope, head_dim, rotary)
    kind = rope_kind(rope)
    theta = rope.number("rope_theta", DEFAULT_THETA, minimum=1.0)
    original = rope.integer("original_max_position_embeddings", max_context)
    if kind == "linear":
        return RopeSpec(kind, theta, head_dim, factor=rope.number("factor", minimum=1.0, strict=False))
    if kind == "llama3":
        return parse_llama3(rope, theta, head_dim, original)
    if kind == "yarn":
        return parse_yarn(rope, theta, head_dim, original, max_context)
    return RopeSpec(kind, theta, head_dim)


def rope_fields(fields: Fields) -> Fields:
    """Gather all keys that concern the rotary embedding, with the places where they were found."""
    values: dict[str, Any] = {}
    paths: dict[str, str] = {}
    inside = ""
    for table in TABLES:
        path = f"{fields.paths.get(table, '')}{table}."
        inside = path if fields.table(table) else inside
        for key, value in fields.table(table).items():
            if values.get(key) is not None and value not in (None, values[key]):
                raise errors.ConfigError(
                    f"{fields.name}: {path}{key}: got {shown(value)}, expected {shown(values[key])}, "
                    f"as {paths[key]}{key} has it; remove one of the two"
                )
            if values.get(key) is None:
                values[key], paths[key] = value, path
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        # transformers lets the outer key win for the last one only: Phi-3 style configs keep the true value there
        if fields.has(key) and (values.get(key) is None or key.startswith("original")):
            values[key], paths[key] = fields.values[key], fields.paths.get(key, "")
    return Fields(values, fields.name, paths, inside)


def refuse_kinds(rope: Fields) -> None:
    """Refuse what no family has: a rotary embedding for each layer kind."""
    for key, value in rope.values.items():
        if isinstance(value, Mapping) or key in {kind.value for kind in LayerKind}:
            raise rope.unsupported(key, "a rotary embedding per layer kind is not supported")


def rotary_dim(rope: Fields, head_dim: int, rotary: float) -> int:
    """Return how many dimensions of a head rotate, the first ones; an even number."""
    share = rope.number("partial_rotary_factor", rotary)
    if rotary == 1.0 and share != 1.0:
        raise rope.unsupported("partial_rotary_factor", "only whole heads rotate; supported is 1.0")
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2:
        raise rope.bad("partial_rotary_factor", f"a share of head_dim {head_dim} that is an even number")
    return dim


def rope_kind(rope: Fields) -> str:
    """Read the kind of scaling, from `rope_type` or from `type`, as older configs call it."""
    given = [key for key in ("rope_type", "type") if rope.has(key)]
    if not given:
        return "default"
    kind = rope.values[given[0]]
    # transformers 4 let `type` win, transformers 5 `rope_type`, so there is no telling which was trained with
    if kind != rope.values[given[-1]]:
        raise rope.bad("rope_type", f"{shown(rope.values['type'])}, as {rope.paths['type']}type has it")
    if kind not in KINDS:
        raise rope.unsupported(given[0], f"supported are {', '.join(KINDS)}")
    return kind


def parse_llama3(rope: Fields, theta: float, dim: int, original: int) -> RopeSpec:
    """Read the four numbers of Llama 3.1's scaling."""
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    if high <= low:
        raise rope.bad("high_freq_factor", f"a number greater than low_freq_factor, which is {low:g}")
    factor = rope.number("factor", minimum=1.0, strict=False)
    return RopeSpec(
        "llama3", theta, dim, factor, original_max_position=original, low_freq_factor=low, high_freq_factor=high
    )


def parse_yarn(rope: Fields, theta: float, dim: int, original: int, max_context: int) -> RopeSpec:
    """Read YaRN's numbers; a null factor means the ratio of the two context lengths, as in transformers."""
    if "factor" in rope.values and not rope.has("factor"):
        factor = max_context / original
    else:
        factor = rope.number("factor", minimum=1.0, strict=False)
    return RopeSpec(
        "yarn",
        theta,
        dim,
        factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", yarn_attention_factor(rope, factor)),
        truncate=rope.flag("truncate", True),
    )


def yarn_attention_factor(rope: Fields, factor: float) -> float:
    """0.1 m ln(factor) + 1; DeepSeek's two weights m, where both are given, as a quotient of two of these."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    weight = rope.number("mscale", 0.0, strict=False)
    weight_all = rope.number("mscale_all_dim", 0.0, strict=False)
    if weight and weight_all:
        return magnitude(weight) / magnitude(weight_all)
    return magnitude(1.0)
