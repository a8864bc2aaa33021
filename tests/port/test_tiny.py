"""The tiny models are worth testing with: their greedy text is not constant, and a design is always the same model."""

from __future__ import annotations

from pathlib import Path

import pytest

import dflash_fn
from dflash_fn.port import Port
from tests.helpers.runs import decode_plainly
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

DESIGNS = {
    "llama": TargetDesign(),
    "llama-tied": TargetDesign(tied=True),
    "llama-bias": TargetDesign(bias=True),
    "llama3-rope": TargetDesign(rope="llama3"),
    "qwen3": TargetDesign(seed=20, family="qwen3"),
    "qwen3-window": TargetDesign(seed=20, family="qwen3", window=4),
}


@pytest.mark.parametrize("name", DESIGNS)
def test_greedy_text_is_not_constant(port: Port, checkpoints: Checkpoints, name: str) -> None:
    pair = checkpoints.pair(port, DESIGNS[name])
    text = decode_plainly(dflash_fn.prefill(pair, [1, 2, 3, 4, 5]), pair, 40).emitted[0]
    assert len(set(text)) >= 8


@pytest.mark.parametrize("design", [TargetDesign(), DraftDesign(rope="yarn", window=3)])
def test_a_design_is_always_the_same_file(tmp_path: Path, design: TargetDesign | DraftDesign) -> None:
    once, again = (Checkpoints(tmp_path / name).folder(design) for name in ("once", "again"))
    for name in ("config.json", "model.safetensors"):
        assert (once / name).read_bytes() == (again / name).read_bytes()
