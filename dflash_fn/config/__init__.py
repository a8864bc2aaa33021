"""Checkpoint configs: Hugging Face's config.json in, `TargetSpec` and `DraftSpec` records out."""

from dflash_fn.config.draft import parse_draft
from dflash_fn.config.specs import DecoderSpec, DeltaSpec, DraftSpec, LayerKind, RopeSpec, TargetSpec
from dflash_fn.config.target import parse_target

__all__ = [
    "DecoderSpec",
    "DeltaSpec",
    "DraftSpec",
    "LayerKind",
    "RopeSpec",
    "TargetSpec",
    "parse_draft",
    "parse_target",
]
