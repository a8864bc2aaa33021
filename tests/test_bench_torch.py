"""The benchmarks of the torch port: what they compare is the same, and their tables have every row."""

from __future__ import annotations

from pathlib import Path

import pytest

import dflash_fn
from dflash_fn import errors
from dflash_fn.bench import purity, verification
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

pytest.importorskip("torch")
pytest.importorskip("dflash_fn_torch.port", exc_type=ImportError)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dflash_fn.Pair:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("bench"))
    return checkpoints.pair(dflash_fn.get_port("torch"), DraftDesign(target=TargetDesign(), block_size=4))


def test_the_loops_that_mutate_emit_what_ours_does(pair: dflash_fn.Pair) -> None:
    state = dflash_fn.prefill(pair, [5, 9, 2, 7], width=4)
    expected = purity.pure(pair, state, 30, 4)
    assert purity.mutating(pair, state, 30, 4)() == expected
    assert purity.in_place(pair, state, 30, 4)() == expected


def test_purity_refuses_what_it_does_not_run(tmp_path: Path) -> None:
    design = DraftDesign(target=TargetDesign(family="qwen3", window=4), block_size=4)
    sliding = Checkpoints(tmp_path).pair(dflash_fn.get_port("torch"), design)
    with pytest.raises(errors.InputError, match="layers that slide or recur; expected full attention alone"):
        purity.mutating(sliding, dflash_fn.prefill(sliding, [1, 2], width=4), 4, 4)


def test_purity_prints_a_ratio_with_its_interval(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"{shared / 'data' / 'humaneval.jsonl'}:0-4"
    assert purity.main(["--raw", "--data", data, "--tokens", "4", "--rounds", "1", "--block-size", "4"]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows] == ["| ours", "| in place", "| by hand"]
    for row in rows[1:]:
        low, high = (float(end) for end in row.split(" | ")[3].removesuffix(" |").split(" to "))
        assert low <= float(row.split(" | ")[2]) <= high


def test_a_step_has_the_products_of_target_and_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert verification.main(["--pair", "tiny-code", "--rounds", "1", "--context", "9", "--compile"]) == 0
    tables = capsys.readouterr().out.strip().split("\n\n")
    names = ["linear(x, w)", "mm(w, x.T)", "packed by oneDNN", "our kernels"]
    for table, name in zip(tables, ("one token, width 1", "one verification", "one step, block 8"), strict=True):
        assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]] == [name, *names]


def test_shapes_of_products_are_those_of_the_weights(pair: dflash_fn.Pair) -> None:
    spec, draft = pair.target.spec, pair.draft
    assert draft is not None
    weights = pair.target.weights
    matrices = [
        part.weights[0] for layer in weights.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    shapes = [(outputs, inputs) for _, inputs, outputs in verification._target_products(pair, 4)]
    assert shapes == [tuple(matrix.shape) for matrix in (*matrices, weights.head)]
    context = [(outputs, inputs) for _, inputs, outputs in verification._draft_products(pair, 4, 4)][:2]
    assert context == [tuple(part.weights[0].shape) for part in (draft.weights.fuse, draft.weights.context_kv)]
    assert spec.num_layers * 4 + 1 == len(shapes)
