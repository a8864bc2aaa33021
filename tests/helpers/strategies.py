"""Hypothesis strategies: tiny targets and drafts of every kind, prompts, proposers, and everything to run them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from dflash_fn.port import Port
from dflash_fn.records import Pair, Proposer
from tests.helpers import proposers
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

__all__ = ["PROPOSERS", "Setting", "drafts", "loaded", "prompts", "settings_on", "targets"]

SEEDS = st.integers(0, 2**16)

FEW_EXAMPLES = 50
"""Up to here a run is for a developer or CI, beyond it for the night."""

PROPOSERS: dict[str, Callable[[Sequence[Sequence[int]], int], Proposer | None]] = {
    "draft": lambda texts, seed: None,
    "right": lambda texts, seed: proposers.right(texts),
    "wrong": lambda texts, seed: proposers.wrong(texts),
    "corrupted": lambda texts, seed: proposers.corrupted(texts, seed, 0.2),
    "random": lambda texts, seed: proposers.at_random(seed),
}
"""Who guesses, as a function of the true texts and a seed; None is the pair's own draft."""


@st.composite
def targets(draw: st.DrawFn) -> TargetDesign:
    """Any target with at least two heads, whose size is a multiple of four; one in three is a hybrid."""
    family = draw(st.sampled_from(["llama", "qwen3", "qwen3_5"]))
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1 if kv_heads > 1 else 2, 3))
    return TargetDesign(
        seed=draw(SEEDS),
        family=family,
        layers=draw(st.integers(1, 3)),
        hidden=draw(st.sampled_from([16, 20, 24, 32])),
        inner=draw(st.sampled_from([16, 20, 33, 48])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8, 16])),
        vocab=draw(st.sampled_from([32, 37, 48, 64])),
        tied=draw(st.booleans()),
        bias=family != "qwen3_5" and draw(st.booleans()),
        rope=draw(st.sampled_from(["default", "llama3", "yarn"])),
        window=draw(st.none() | st.integers(1, 12)) if family == "qwen3" else None,
        **(draw(delta_nets()) if family == "qwen3_5" else {}),
    )


@st.composite
def delta_nets(draw: st.DrawFn) -> dict[str, Any]:
    """What a hybrid has besides: how often attention comes, and the sizes of the layers in between."""
    key_heads = draw(st.integers(1, 2))
    return {
        "interval": draw(st.integers(1, 4)),
        "key_heads": key_heads,
        "value_heads": key_heads * draw(st.integers(1, 3)),
        "key_dim": draw(st.sampled_from([4, 8, 12, 16])),
        "value_dim": draw(st.sampled_from([4, 8, 12, 16])),
        "kernel": draw(st.integers(2, 5)),
    }


@st.composite
def drafts(draw: st.DrawFn, target: st.SearchStrategy[TargetDesign] = targets()) -> DraftDesign:  # noqa: B008
    """Any draft, with its target."""
    owner, kv_heads = draw(target), draw(st.integers(1, 2))
    layers = list(range(owner.layers))
    return DraftDesign(
        target=owner,
        seed=draw(SEEDS),
        layers=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8])),
        block_size=draw(st.integers(1, 8)),
        taps=tuple(draw(st.permutations(layers))[: draw(st.integers(1, owner.layers))]),
        mask=draw(st.integers(0, owner.vocab - 1)),
        rope=draw(st.sampled_from(["default", "yarn"])),
        window=draw(st.none() | st.integers(1, 12)),
        causal=draw(st.none() | st.booleans()),
    )


@st.composite
def prompts(draw: st.DrawFn, vocab: int, longest: int = 24) -> list[int]:
    """Token ids: short ones, all of them drawn; now and then, ones that end near the border of a chunk."""
    ids = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=longest))
    border = draw(st.sampled_from([0, 0, 0, 0, 250, 256]))
    return (ids * (1 + border // len(ids)))[: border + len(ids)] if border else ids


@dataclass(frozen=True)
class Setting:
    """What a property runs: a design, the dtype and width to run it in, and a block size within the width."""

    design: DraftDesign
    dtype: str
    width: int
    block_size: int

    @property
    def vocab(self) -> int:
        """The target's vocabulary."""
        return self.design.vocab


HYBRID = TargetDesign(family="qwen3_5", layers=3, head_dim=8, kernel=3, value_heads=2)
FEW = [
    DraftDesign(TargetDesign(), window=5),
    DraftDesign(TargetDesign(family="qwen3", layers=3, tied=True, window=4, vocab=37), taps=(2, 0), block_size=6),
    DraftDesign(HYBRID, taps=(1,), layers=1, causal=True, window=3, mask=0),
    DraftDesign(replace(HYBRID, layers=2, interval=3, key_heads=2, value_heads=6, key_dim=4, value_dim=12), layers=1),
    DraftDesign(replace(HYBRID, interval=3, kernel=5, value_heads=1, tied=True, vocab=37), taps=(2, 0), block_size=3),
]
"""Designs for ports that compile each shape, which takes longer than running it; other profiles draw from all."""


def compiles(port: Port) -> bool:
    """Whether a port takes long for each new shape, and few examples are run."""
    return port.name == "jax" and settings().max_examples <= FEW_EXAMPLES


@st.composite
def settings_on(draw: st.DrawFn, port: Port, dtypes: Sequence[str] = ()) -> Setting:
    """Any design, in any of these dtypes, or any that the port runs in."""
    known = list(dtypes or port.info().dtypes)
    if compiles(port):
        design = draw(st.sampled_from(FEW))
        return Setting(design, draw(st.sampled_from(known[:2])), 8, draw(st.integers(1, 8)))
    design = draw(drafts())
    width = draw(st.integers(design.block_size, min(16, port.max_width)))
    return Setting(design, draw(st.sampled_from(known)), width, draw(st.integers(1, width)))


def loaded(checkpoints: Checkpoints, port: Port, setting: Setting) -> Pair:
    """Load what was drawn; outside the strategy, since reading files is not drawing."""
    return checkpoints.pair(port, setting.design, setting.dtype)
