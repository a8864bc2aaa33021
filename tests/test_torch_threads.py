"""The contract on torch with any number of threads: kernels share their work by shape, and the shape is fixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import dflash_fn
from tests.helpers import proposers
from tests.helpers.runs import decode_plainly, differing, run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

torch = pytest.importorskip("torch")

DESIGN = DraftDesign(target=TargetDesign(inner=64, hidden=64, head_dim=16), block_size=4)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("width", [4, 9, 16])
def test_bits_hold(checkpoints: Checkpoints, threads: int, width: int, heads: int, kv_heads: int) -> None:
    design = replace(DESIGN, target=replace(DESIGN.target, heads=heads, kv_heads=kv_heads))
    pair = checkpoints.pair(dflash_fn.get_port("torch"), design)
    prompt = np.random.default_rng(0).integers(0, 48, 250).tolist()
    expected = decode_plainly(dflash_fn.prefill(pair, prompt, width=width), pair, 12)
    proposer = proposers.corrupted([[*prompt, *expected.emitted[0]]], seed=5, rate=0.15)
    state = dflash_fn.prefill(pair, prompt, width=width)
    found = run(state, pair, max_new_tokens=12, block_size=width, proposer=proposer)
    assert found.emitted == expected.emitted
    assert differing(found.logits[0], expected.logits[0]) == []


def test_exact_rows_have_the_bits_of_their_single_row_runs(checkpoints: Checkpoints, threads: int) -> None:
    pair, prompts = checkpoints.pair(dflash_fn.get_port("torch"), DESIGN), [[5, 9, 2], [7, 4, 11, 3, 30, 8, 1]]
    together = run(dflash_fn.prefill(pair, prompts, width=8, exact_rows=True), pair, max_new_tokens=8)
    for row, ids in enumerate(prompts):
        alone = run(dflash_fn.prefill(pair, ids, width=8), pair, max_new_tokens=8)
        assert differing(together.logits[row], alone.logits[0]) == []
