"""Hybrids against mlx-lm's qwen3_5, and against upstream's decode on mlx, which patches a class to roll back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflash_fn
from dflash_fn.config import LayerKind
from dflash_fn.records import Pair
from dflash_fn.tolerances import bound
from tests.helpers.runs import run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

mx = pytest.importorskip("mlx.core")
mlx_utils = pytest.importorskip("mlx_lm.utils")
tree = pytest.importorskip("mlx.utils")

HYBRID = TargetDesign(
    family="qwen3_5", layers=5, interval=3, hidden=64, inner=64, head_dim=16, key_heads=2, value_heads=4, key_dim=16
)
DRAFT = DraftDesign(target=HYBRID, inner=64, head_dim=16, block_size=5, taps=(0, 3), mask=3)
IDS = np.random.default_rng(3).integers(0, 48, 40).tolist()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in transformers' layout, wrapped, since mlx-lm knows no text part alone."""
    made, known = tmp_path_factory.mktemp("wrapped"), checkpoints.folder(HYBRID)
    config = {"model_type": "qwen3_5", "text_config": HYBRID.config}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(load_file(known / "model.safetensors"), made / "model.safetensors", metadata={"format": "pt"})
    return made


def mlx_model(folder: Path) -> Any:
    model, _ = mlx_utils.load_model(folder)
    model.set_dtype(mx.float32)
    return model


def said_by_mlx_lm(model: Any) -> tuple[np.ndarray, list[Any]]:
    cache = model.make_cache()
    return np.array(model(mx.array([IDS]), cache))[0], cache


def said_by_port(pair: Pair) -> tuple[np.ndarray, Any]:
    port, cache = pair.port, pair.port.new_cache(pair.target, len(IDS))
    tokens = port.asarray(np.array([IDS]), pair.target.device)
    made = port.target_pass(pair.target, cache, tokens, taps=(), head=True, exact_rows=False)
    return port.to_numpy(made.logits)[0], port.export_cache(port.select(made.family, (len(IDS),)))


def assert_close(pair: Pair, theirs: np.ndarray) -> None:
    ours, _ = said_by_port(pair)
    distance = np.abs(ours - theirs).max(axis=-1) / np.abs(theirs).max(axis=-1)
    assert distance.max() <= bound(pair.target.dtype, "logits", pair.target.spec)


def mlx_folder(model: Any, made: Path) -> Path:
    """Write a model as mlx-lm stores it: the text part alone, norms with their 1, kernels the other way round."""
    made.mkdir()
    mx.save_safetensors(str(made / "model.safetensors"), dict(tree.tree_flatten(model.parameters())))
    (made / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": HYBRID.config}))
    return made


def test_logits_and_every_state(folder: Path) -> None:
    pair = dflash_fn.load_pair(folder, port="mlx")
    theirs, cache = said_by_mlx_lm(mlx_model(folder))
    assert_close(pair, theirs)
    _, held = said_by_port(pair)
    spec = pair.target.spec
    for layer in range(spec.num_layers):
        if spec.layer_kinds[layer] is LayerKind.DELTA:
            other = {"conv": np.array(cache[layer][0])[0], "recurrent": np.array(cache[layer][1])[0].swapaxes(1, 2)}
        else:
            keys, values = (np.array(x)[0, :, : len(IDS)].swapaxes(0, 1) for x in cache[layer].state[:2])
            other = {"keys": keys, "values": values}
        for name, known in other.items():
            found = held[f"{layer}.0.{name}"].values
            assert found.shape == known.shape
            assert (
                np.abs(found - known).max() <= bound("float32", "hidden", spec, layers=layer + 1) * np.abs(known).max()
            )


@pytest.mark.parametrize("port", ["torch", "mlx", "jax"])
def test_a_folder_in_mlx_lms_layout(port: str, folder: Path, tmp_path: Path) -> None:
    model = mlx_model(folder)
    pair = dflash_fn.load_pair(mlx_folder(model, tmp_path / "mlx"), port=port)
    assert_close(pair, said_by_mlx_lm(model)[0])


def test_a_model_in_memory_is_left_as_it_was(folder: Path, checkpoints: Checkpoints) -> None:
    """No module is replaced, no attribute of an object or a class is written, and it computes what it computed."""
    model = mlx_model(folder)
    theirs, _ = said_by_mlx_lm(model)
    modules = [model, *(module for _, module in model.named_modules())]
    before = [(set(vars(one)) | set(one), dict(vars(type(one)))) for one in modules]
    pair = dflash_fn.load_pair(model, checkpoints.folder(DRAFT), port="mlx")
    run(dflash_fn.prefill(pair, IDS), pair, max_new_tokens=9)
    for one, (names, attributes) in zip(modules, before, strict=True):
        assert set(vars(one)) | set(one) == names
        assert vars(type(one)) == attributes
    assert said_by_mlx_lm(model)[0].tobytes() == theirs.tobytes()
    assert_close(pair, theirs)


def test_a_quantised_model(folder: Path, tmp_path: Path) -> None:
    model, _ = mlx_utils.quantize_model(mlx_model(folder), {}, 32, 8)
    pair = dflash_fn.load_pair(model, port="mlx")
    assert_close(pair, said_by_mlx_lm(model)[0])
    assert_close(dflash_fn.load_pair(mlx_folder(model, tmp_path / "mlx"), port="mlx"), said_by_mlx_lm(model)[0])


# --- upstream ---


class Words:
    """What upstream asks of a tokenizer, of one that has no words."""

    eos_token_ids = frozenset()
    bos_token = None

    class detokenizer:  # noqa: N801 (the name that upstream asks for)
        last_segment = ""
        add_token = staticmethod(lambda token: None)
        finalize = staticmethod(lambda: None)


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Upstream's mlx code, reading folders and asking for no words."""
    made = pytest.importorskip("dflash.model_mlx", reason="needs upstream's package")
    monkeypatch.setattr(made, "snapshot_download", lambda name, **_: name)
    monkeypatch.setattr(made, "TokenizerWrapper", Words)
    return made


@pytest.mark.oracle
@pytest.mark.parametrize(
    "target",
    [
        TargetDesign(hidden=64, inner=64, head_dim=16),
        TargetDesign(family="qwen3", hidden=64, inner=64, layers=3, tied=True),
    ],
    ids=["llama", "qwen3"],
)
def test_plain_targets_too(target: TargetDesign, checkpoints: Checkpoints, upstream: Any) -> None:
    design = DraftDesign(target=target, inner=64, head_dim=16, block_size=5, taps=(0, 1), mask=3)
    folder = checkpoints.folder(target)
    draft, model = upstream.load_draft(str(checkpoints.folder(design))), mlx_model(folder)
    compare_with_upstream(upstream, model, draft, dflash_fn.load_pair(folder, checkpoints.folder(design), port="mlx"))


@pytest.mark.oracle
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"window": 6, "causal": False}], ids=["full", "mixed", "both"])
def test_tokens_and_accepted_counts_are_upstreams(
    folder: Path, checkpoints: Checkpoints, options: dict[str, Any], upstream: Any
) -> None:
    """With a window below the block size and no causality, upstream's two ports differ: this one sees all the block."""
    design = replace(DRAFT, **options)
    draft, model = upstream.load_draft(str(checkpoints.folder(design))), mlx_model(folder)
    pair = dflash_fn.load_pair(folder, checkpoints.folder(design), port="mlx")
    assert any(len(tokens) > 1 for tokens in compare_with_upstream(upstream, model, draft, pair))


def compare_with_upstream(upstream: Any, model: Any, draft: Any, pair: Pair) -> list[tuple[int, ...]]:
    """Compare the steps of both, and return upstream's."""
    theirs = list(upstream.stream_generate(model, draft, Words(), mx.array(IDS[:7]), max_tokens=40))
    found = run(dflash_fn.prefill(pair, IDS[:7]), pair, max_new_tokens=40)
    steps = [tuple(response.tokens) for response in theirs if response.tokens]
    whole = 40 - pair.block_size  # close to its budget upstream shortens the block
    emitted = [info.emitted[0] for info in found.infos]
    assert sum(steps, ())[:40] == found.emitted[0]
    short = next(index for index in range(len(steps)) if sum(map(len, steps[: index + 1])) > whole)
    assert emitted[:short] == steps[:short]
    return steps
