"""The draft's training pass: no leak between blocks, none from the future, and the port's own pass for one block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_fn import get_port
from dflash_fn.config import DraftSpec
from dflash_fn.records import Model, Pair
from dflash_fn.tolerances import bound
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, draft_tensors

torch = pytest.importorskip("torch")

from dflash_fn_torch.attention import Reach  # noqa: E402
from dflash_fn_torch.train.forward import draft_hidden, own_mask, past_mask  # noqa: E402
from torch import Tensor  # noqa: E402

LENGTH, BLOCK = 30, 4
DESIGNS = {
    "plain": DraftDesign(block_size=BLOCK),
    "causal": DraftDesign(block_size=BLOCK, causal=True),
    "sliding": DraftDesign(block_size=BLOCK, window=6, layers=2),
    "one tap, no groups": DraftDesign(block_size=BLOCK, taps=(1,), kv_heads=4, layers=1),
    "yarn": DraftDesign(block_size=BLOCK, rope="yarn", target=TargetDesign(family="qwen3")),
}
CLOSE = (3, 4, 5, 17, 18, 25)
"""Anchors closer together than a block."""


@dataclass
class Bench:
    """A tiny pair, a text, and what its target makes of it."""

    pair: Pair
    weights: dict[str, Any]
    ids: np.ndarray
    features: Tensor

    @property
    def draft(self) -> Model[DraftSpec]:
        assert self.pair.draft is not None
        return self.pair.draft

    def block(self, anchors: Tensor) -> Tensor:
        tokens = torch.full((*anchors.shape, BLOCK), self.draft.spec.mask_token_id)
        tokens[..., 0] = torch.from_numpy(self.ids)[anchors]
        return torch.nn.functional.embedding(tokens, self.pair.target.weights.embedding)

    def hidden(self, anchors: tuple[int, ...], features: Tensor | None = None, block: Tensor | None = None) -> Tensor:
        places = torch.tensor([anchors])
        block = self.block(places) if block is None else block
        features = self.features if features is None else features
        return draft_hidden(self.draft.spec, self.weights, features, block, places)[0]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("forward"))


def make_bench(checkpoints: Checkpoints, design: DraftDesign) -> Bench:
    port = get_port("torch")
    pair = checkpoints.pair(port, design)
    ids = np.random.default_rng(5).integers(0, design.vocab, LENGTH)
    known = port.asarray(ids[None], "cpu")
    cache = port.new_cache(pair.target, LENGTH)
    made = port.target_pass(pair.target, cache, known, taps=design.taps, head=False, exact_rows=False)
    weights = {name: torch.from_numpy(values) for name, values in draft_tensors(design).items()}
    assert made.features is not None
    return Bench(pair, weights, ids, made.features.clone())


@pytest.fixture(params=DESIGNS)
def bench(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Bench:
    return make_bench(checkpoints, DESIGNS[request.param])


def test_p21_each_block_is_the_ports_draft_pass(bench: Bench) -> None:
    """P21: for one block, training computes what decoding computes."""
    pair, port = bench.pair, bench.pair.port
    hidden = bench.hidden(CLOSE)
    for row, anchor in enumerate(CLOSE):
        cache = port.new_cache(bench.draft, LENGTH)
        cache = port.draft_context(bench.draft, cache, bench.features[:, :anchor], (anchor,), exact_rows=False)
        block = torch.tensor([[int(bench.ids[anchor]), *[bench.draft.spec.mask_token_id] * (BLOCK - 1)]])
        theirs = port.draft_pass(bench.draft, pair.target, cache, block, exact_rows=False)[0]
        head = torch.from_numpy(_head(pair))
        ours = hidden[row] @ head.T
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < bound(
            "float32", "draft_logits", bench.draft.spec
        )


def _head(pair: Pair) -> np.ndarray:
    from safetensors.numpy import load_file

    source = pair.target.source
    assert source is not None
    assert source.folder is not None
    return load_file(source.folder / "model.safetensors")["lm_head.weight"]


def test_p21_no_block_sees_context_at_or_after_its_anchor(bench: Bench) -> None:
    """P21: changing the feature of one position moves the blocks that lie behind it, and no other by a bit."""
    before = bench.hidden(CLOSE)
    for place in range(LENGTH):
        changed = bench.features.clone()
        changed[0, place] += 1.0
        moved = (bench.hidden(CLOSE, features=changed) != before).flatten(1).any(dim=1)
        expected = [place < anchor and _within(bench, place, anchor) for anchor in CLOSE]
        assert moved.tolist() == expected, place


def _within(bench: Bench, place: int, anchor: int) -> bool:
    spec = bench.draft.spec
    every = all(reach.value != "sliding_attention" for reach in spec.layer_kinds)
    return every or spec.num_layers > 1 or anchor - place < (spec.sliding_window or 0)


def test_p21_no_block_sees_another(bench: Bench) -> None:
    """P21: changing one block's own embeddings, or where it stands, moves that block alone."""
    places = torch.tensor([CLOSE])
    before, block = bench.hidden(CLOSE), bench.block(places)
    for row in range(len(CLOSE)):
        changed = block.clone()
        changed[0, row, 1] += 1.0
        moved = (bench.hidden(CLOSE, block=changed) != before).flatten(1).any(dim=1)
        assert moved.tolist() == [other == row for other in range(len(CLOSE))]
    elsewhere = bench.hidden((*CLOSE[:-1], 11))
    assert torch.equal(elsewhere[:-1], before[:-1])


def test_p21_gradients_stay_inside_a_block_and_its_past(bench: Bench) -> None:
    """P21: the loss of one block has no gradient at another block, nor at a feature from its anchor on."""
    features, block = bench.features.clone().requires_grad_(), bench.block(torch.tensor([CLOSE])).requires_grad_()
    bench.hidden(CLOSE, features=features, block=block)[1].square().sum().backward()
    assert features.grad is not None
    assert block.grad is not None
    assert features.grad[0, CLOSE[1] :].abs().sum() == 0
    assert features.grad[0, CLOSE[1] - 1].abs().sum() > 0
    assert block.grad[0].flatten(1).abs().sum(dim=1).gt(0).tolist() == [row == 1 for row in range(len(CLOSE))]


def test_a_causal_layer_hides_later_slots() -> None:
    assert own_mask(Reach(True, None), 3, torch.device("cpu")).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    assert own_mask(Reach(False, None), 3, torch.device("cpu")).all()


def test_the_past_ends_before_the_anchor_and_begins_with_the_window() -> None:
    anchors = torch.tensor([[0, 2, 5]])
    seen = past_mask(Reach(False, None), anchors, 2, 6)[0]
    assert seen[:, 0].sum(dim=-1).tolist() == [0, 2, 5]
    assert torch.equal(seen[:, 0], seen[:, 1])
    window = past_mask(Reach(False, 3), anchors, 2, 6)[0]
    assert window[2].int().tolist() == [[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 0]]


def test_other_texts_of_a_batch_change_nothing_but_rounding(checkpoints: Checkpoints, tmp_path: Path) -> None:
    bench = make_bench(checkpoints, DESIGNS["plain"])
    both = torch.cat([bench.features, bench.features.flip(1)])
    places = torch.tensor([CLOSE, CLOSE])
    spec = bench.draft.spec
    made = draft_hidden(spec, bench.weights, both, bench.block(places), places)
    torch.testing.assert_close(made[0], bench.hidden(CLOSE), rtol=0, atol=bound("float32", "hidden", spec) * 5)
