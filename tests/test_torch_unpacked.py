"""The torch port where oneDNN packs nothing, as on processors that it does not know: the same contract, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import dflash_fn
from tests.helpers import proposers
from tests.helpers.runs import decode_plainly, differing, run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

torch = pytest.importorskip("torch")
ops = pytest.importorskip("dflash_fn_torch.ops", exc_type=ImportError)
weights = pytest.importorskip("dflash_fn_torch.weights", exc_type=ImportError)

DESIGN = DraftDesign(target=TargetDesign(inner=64, hidden=64, head_dim=16), block_size=4)
HYBRID = TargetDesign(inner=64, hidden=64, head_dim=16, family="qwen3_5", layers=3)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dflash_fn.Pair]:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("unpacked"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "packs", lambda dtype: False)
        port = dflash_fn.get_port("torch")
        made = {dtype: checkpoints.pair(port, DESIGN, dtype) for dtype in ("float32", "bfloat16")}
        return made | {"hybrid": checkpoints.pair(port, HYBRID)}


@pytest.mark.parametrize(
    ("name", "width"), [(name, width) for name in ("float32", "bfloat16", "hybrid") for width in range(1, 17)]
)
def test_bits_hold_at_every_width(pairs: dict[str, dflash_fn.Pair], name: str, width: int) -> None:
    pair = pairs[name]
    prompt = np.random.default_rng(0).integers(0, 48, 9).tolist()
    expected = decode_plainly(dflash_fn.prefill(pair, prompt, width=width), pair, 16)
    proposer = proposers.corrupted([[*prompt, *expected.emitted[0]]], seed=5, rate=0.15)
    state = dflash_fn.prefill(pair, prompt, width=width)
    found = run(state, pair, max_new_tokens=16, block_size=width, proposer=proposer)
    assert found.emitted == expected.emitted
    assert differing(found.logits[0], expected.logits[0]) == []


@pytest.mark.parametrize("width", [4, 8, 16])
def test_exact_rows_have_the_bits_of_their_single_row_runs(pairs: dict[str, dflash_fn.Pair], width: int) -> None:
    pair, prompts = pairs["float32"], [[5, 9, 2], [7, 4, 11, 3, 30, 8, 1]]
    together = run(dflash_fn.prefill(pair, prompts, width=width, exact_rows=True), pair, max_new_tokens=8)
    for row, ids in enumerate(prompts):
        alone = run(dflash_fn.prefill(pair, ids, width=width), pair, max_new_tokens=8)
        assert differing(together.logits[row], alone.logits[0]) == []


@pytest.mark.parametrize(("slots", "inner"), [(2, 20), (4, 20), (8, 33), (16, 20), (3, 64), (3, 20), (12, 20)])
def test_the_mlp_treats_all_slots_alike(slots: int, inner: int) -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        up, down, x = (torch.randn(*shape, generator=random) for shape in ((2 * inner, 24), (24, inner), (1, 24)))
        found = ops.gated_mlp(x.expand(slots, -1).contiguous(), ops.Projection((up,)), ops.Projection((down,)), 1)
        assert torch.equal(found, found[:1].expand(slots, -1))
