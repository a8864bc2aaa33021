"""Loading: names, dtypes, devices, shards, tokenizers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import dflash_fn
from dflash_fn import errors
from dflash_fn.port import Port
from tests.helpers.fixtures import DTYPES, need_dtype
from tests.helpers.runs import decode_plainly, differing, fetch
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, target_tensors, write_checkpoint

DESIGN = DraftDesign()


def test_a_pair_knows_its_parts(port: Port, checkpoints: Checkpoints) -> None:
    target, draft = checkpoints.folder(DESIGN.target), checkpoints.folder(DESIGN)
    pair = dflash_fn.load_pair(target, draft, port=port.name, dtype="float32")
    assert (pair.name, pair.port.name, pair.tokenizer, pair.block_size) == (str(target), port.name, None, 4)
    assert pair.draft is not None
    assert (pair.target.dtype, pair.draft.dtype, pair.draft.device) == ("float32", "float32", pair.target.device)
    assert pair.target.device in port.info().devices
    assert dflash_fn.load_pair(str(target), str(draft), port=port, name="mine").name == "mine"


def test_without_a_draft_the_block_size_is_1(port: Port, checkpoints: Checkpoints) -> None:
    pair = dflash_fn.load_pair(checkpoints.folder(DESIGN.target), port=port)
    assert (pair.draft, pair.block_size) == (None, 1)
    assert dflash_fn.prefill(pair, [1]).width == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_activations_are_in_the_dtype_that_is_asked_for(
    port: Port, checkpoints: Checkpoints, dtype: str
) -> None:
    need_dtype(port, dtype)
    pair = checkpoints.pair(port, DESIGN, dtype)
    assert pair.draft is not None
    assert (pair.target.dtype, pair.draft.dtype) == (dtype, dtype)
    state = dflash_fn.prefill(pair, [1, 2])
    branches = dflash_fn.verify(state, pair, dflash_fn.propose(state, pair))
    kind = {"float32": "float32", "float16": "float16", "bfloat16": "float32"}[dtype]  # as numpy holds it
    assert port.to_numpy(branches.logits).dtype == port.to_numpy(branches.features).dtype == kind
    if dtype == "bfloat16":
        assert not (fetch(port, branches.logits) & 0xFFFF).any()


def test_on_a_cpu_float32_is_the_default_dtype(port: Port, checkpoints: Checkpoints, tmp_path: Path) -> None:
    if port.info().devices[0] != "cpu":
        pytest.skip(f"port {port.name} has an accelerator here")
    design = DESIGN.target
    folder = write_checkpoint(tmp_path / "target", design.config | {"dtype": "bfloat16"}, target_tensors(design))
    assert dflash_fn.load_pair(folder, port=port).target.dtype == "float32"


@pytest.mark.parametrize("shards", [2, 5])
def test_a_checkpoint_in_several_files(port: Port, checkpoints: Checkpoints, tmp_path: Path, shards: int) -> None:
    whole = checkpoints.folder(DESIGN.target)
    shutil.copy(whole / "config.json", tmp_path)
    tensors = list(target_tensors(DESIGN.target).items())
    for index in range(shards):
        save_file(dict(tensors[index::shards]), tmp_path / f"model-{index:05}-of-{shards:05}.safetensors")
    left, right = (dflash_fn.load_pair(folder, port=port, dtype="float32") for folder in (whole, tmp_path))
    texts = [decode_plainly(dflash_fn.prefill(pair, [5, 9], width=4), pair, 6) for pair in (left, right)]
    assert texts[0].emitted == texts[1].emitted
    assert differing(texts[0].logits[0], texts[1].logits[0]) == []


def test_a_tied_checkpoint_may_carry_its_head_too(port: Port, checkpoints: Checkpoints, tmp_path: Path) -> None:
    design = TargetDesign(tied=True)
    tensors = target_tensors(design)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    folder = write_checkpoint(tmp_path / "target", design.config, tensors)
    pairs = checkpoints.pair(port, design), dflash_fn.load_pair(folder, port=port, dtype="float32")
    texts = [decode_plainly(dflash_fn.prefill(pair, [5, 9], width=4), pair, 6) for pair in pairs]
    assert texts[0].emitted == texts[1].emitted


def test_a_loaded_pair_no_longer_needs_its_files(port: Port, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "target", DESIGN.target.config, target_tensors(DESIGN.target))
    pair = dflash_fn.load_pair(folder, port=port, dtype="float32")
    before = decode_plainly(dflash_fn.prefill(pair, [5, 9], width=4), pair, 6)
    file = folder / "model.safetensors"
    file.write_bytes(bytes(len(file.read_bytes())))
    shutil.rmtree(folder)
    after = decode_plainly(dflash_fn.prefill(pair, [5, 9], width=4), pair, 6)
    assert after.emitted == before.emitted
    assert differing(after.logits[0], before.logits[0]) == []


def test_a_tensor_in_two_files_is_refused(port: Port, checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoints.folder(DESIGN.target), tmp_path, dirs_exist_ok=True)
    other = {"lm_head.weight": np.zeros((48, 32), np.float32)}
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(errors.CheckpointError) as caught:
        dflash_fn.load_pair(tmp_path, port=port)
    assert str(caught.value) == (
        f"{tmp_path}: tensor 'lm_head.weight' is in both model.safetensors and other.safetensors; "
        "remove the file that does not belong to the checkpoint"
    )


def test_the_targets_folder_brings_the_tokenizer(port: Port) -> None:
    pair = dflash_fn.load_zoo("tiny-code", port=port)
    assert len(pair.tokenizer) <= pair.target.spec.vocab_size
    ids = pair.tokenizer.encode("def f")
    assert dflash_fn.prefill(pair, "def f").tokens == (tuple(ids),)
    assert dflash_fn.prefill(pair, ["def f", "x"]).tokens[0] == tuple(ids)
