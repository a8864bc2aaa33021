"""What only the mlx port has: mlx-lm's models and formats, donated memory, lazy arrays and threads."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx.nn as nn
from dflash_fn_mlx import attention, namespace
from dflash_fn_mlx.quantized import Quantized, take_matrix
from dflash_fn_mlx.weights import arrays_of, open_reader
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_utils

import dflash_fn
from dflash_fn import errors
from dflash_fn.records import Model, Pair
from dflash_fn.sources import Source
from dflash_fn.tolerances import bound
from tests.helpers.runs import fetch, run, same
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
LLAMA = TargetDesign(hidden=64, inner=128, head_dim=16)
QWEN3 = replace(LLAMA, family="qwen3", seed=20, tied=True)
DRAFT = DraftDesign(target=LLAMA, inner=64, head_dim=16, block_size=8)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def mlx_model(folder: Path, dtype: str = "float32") -> Any:
    model, _ = mlx_utils.load_model(folder)
    model.set_dtype(DTYPES[dtype])
    return model


def said_by_mlx_lm(model: Any) -> np.ndarray:
    return np.array(model(mx.array([IDS])).astype(mx.float32))[0]


def said_by_port(pair: Pair) -> np.ndarray:
    port = pair.port
    cache = port.new_cache(pair.target, len(IDS))
    tokens = port.asarray(np.array([IDS]), pair.target.device)
    return port.to_numpy(port.target_pass(pair.target, cache, tokens, taps=(), head=True, exact_rows=False).logits)[0]


def size(model: Model[Any] | None) -> int:
    """Bytes of a model's weights, those counted twice that two projections share."""
    return sum(array.nbytes for array in arrays_of(model.weights)) if model else 0


def assert_close(pair: Pair, theirs: np.ndarray) -> None:
    ours = said_by_port(pair)
    distance = np.abs(ours - theirs).max(axis=-1) / np.abs(theirs).max(axis=-1)
    assert distance.max() <= bound(pair.target.dtype, "logits", pair.target.spec)


# --- mlx-lm's models ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "design", [LLAMA, replace(LLAMA, rope="llama3", bias=True), QWEN3], ids=["llama", "llama3", "qwen3"]
)
def test_logits_are_those_of_mlx_lm(checkpoints: Checkpoints, design: TargetDesign, dtype: str) -> None:
    folder = checkpoints.folder(design)
    pair = dflash_fn.load_pair(folder, port="mlx", dtype=dtype)
    assert_close(pair, said_by_mlx_lm(mlx_model(folder, dtype)))


def test_a_model_in_memory_is_used_in_place_and_left_as_it_was(checkpoints: Checkpoints) -> None:
    model = mlx_model(checkpoints.folder(LLAMA), "bfloat16")
    before = {name: fetch(dflash_fn.get_port("mlx"), array) for name, array in tree_flatten(model.parameters())}
    names, call, theirs = set(vars(model)) | set(model), type(model).__call__, said_by_mlx_lm(model)
    used = mx.get_active_memory()
    pair = dflash_fn.load_pair(model, port="mlx")
    assert mx.get_active_memory() - used < size(pair.target) / 8
    pair = replace(pair, draft=dflash_fn.load_pair(model, checkpoints.folder(DRAFT), port="mlx").draft)
    dflash_fn.decode(dflash_fn.prefill(pair, IDS), pair, max_new_tokens=20)
    assert pair.target.dtype == "bfloat16"
    assert set(vars(model)) | set(model) == names
    assert type(model).__call__ is call
    assert all(same(fetch(pair.port, array), before[name]) for name, array in tree_flatten(model.parameters()))
    assert said_by_mlx_lm(model).tobytes() == theirs.tobytes()


def test_a_model_in_memory_has_no_stop_ids_of_its_own(checkpoints: Checkpoints) -> None:
    pair = dflash_fn.load_pair(mlx_model(checkpoints.folder(LLAMA)), port="mlx")
    assert pair.target.spec.eos_token_ids == ()


def test_an_object_that_is_no_model() -> None:
    with pytest.raises(errors.InputError, match="target: got an object of type Linear, which port mlx cannot read"):
        dflash_fn.load_pair(nn.Linear(4, 4), port="mlx")


def test_rotations_of_neighbours_are_refused(checkpoints: Checkpoints) -> None:
    model = mlx_model(checkpoints.folder(LLAMA))
    model.args = replace(model.args, rope_traditional=True)
    with pytest.raises(errors.UnsupportedModel, match="Model: rope_traditional: got true"):
        dflash_fn.load_pair(model, port="mlx")


# --- quantised formats ---

FORMATS: dict[str, tuple[TargetDesign, dict[str, Any]]] = {
    "4 bits": (LLAMA, {"group_size": 64, "bits": 4}),
    "3 bits": (LLAMA, {"group_size": 32, "bits": 3}),
    "8 bits, tied": (QWEN3, {"group_size": 32, "bits": 8}),
    "6 bits, with biases": (replace(LLAMA, bias=True), {"group_size": 64, "bits": 6}),
    "mxfp4": (LLAMA, {"group_size": None, "bits": None, "mode": "mxfp4"}),
    "nvfp4": (QWEN3, {"group_size": None, "bits": None, "mode": "nvfp4"}),
    "mixed": (LLAMA, {"group_size": 64, "bits": 4, "quant_predicate": lambda path, _: MIXED.get(path, True)}),
}
MIXED: dict[str, Any] = {
    "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 8},
    "model.layers.1.mlp.down_proj": False,
    "lm_head": False,
}


def quantized_folder(checkpoints: Checkpoints, kind: str, dtype: str, folder: Path) -> Path:
    """Write a folder as `mlx_lm.convert` does."""
    design, options = FORMATS[kind]
    config = json.loads((checkpoints.folder(design) / "config.json").read_text())
    model, config = mlx_utils.quantize_model(mlx_model(checkpoints.folder(design), dtype), config, **options)
    mlx_utils.save_model(folder, model)
    mlx_utils.save_config(config, folder / "config.json")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_folders_and_models_say_what_mlx_lm_says(
    checkpoints: Checkpoints, kind: str, dtype: str, tmp_path: Path
) -> None:
    folder = quantized_folder(checkpoints, kind, dtype, tmp_path)
    model, _ = mlx_utils.load_model(folder)
    pair = dflash_fn.load_pair(folder, port="mlx", dtype=dtype)
    assert any(isinstance(weight, Quantized) for weight in pair.target.weights.layers[0].out.weights)
    assert_close(pair, said_by_mlx_lm(model))
    in_memory = dflash_fn.load_pair(model, port="mlx")
    assert in_memory.target.dtype == dtype
    assert said_by_port(in_memory).tobytes() == said_by_port(pair).tobytes()


def test_a_quantised_target_keeps_the_contract(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = quantized_folder(checkpoints, "4 bits", "float32", tmp_path)
    pair = dflash_fn.load_pair(folder, checkpoints.folder(DRAFT), port="mlx")
    plain = run(dflash_fn.prefill(pair, IDS), pair, max_new_tokens=24, block_size=1)
    found = run(dflash_fn.prefill(pair, IDS), pair, max_new_tokens=24)
    assert found.emitted == plain.emitted
    assert same(found.logits[0], plain.logits[0])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_draft_with_fewer_bits_changes_no_text(bits: int) -> None:
    target, draft = (
        Path(dflash_fn.__file__).parent / "zoo" / "pairs" / "tiny-code" / name for name in ("target", "draft")
    )
    whole, small = (dflash_fn.load_pair(target, draft, port="mlx", draft_bits=given) for given in (None, bits))
    expected, found = (
        run(dflash_fn.prefill(pair, "def add(a, b):"), pair, max_new_tokens=24) for pair in (whole, small)
    )
    assert found.emitted == expected.emitted
    assert same(found.logits[0], expected.logits[0])
    assert sum(count or 0 for count in found.accepted()) > 0
    assert size(small.draft) < size(whole.draft) * (bits + 2) / 32


def test_bits_that_a_draft_cannot_have(checkpoints: Checkpoints) -> None:
    target, draft = checkpoints.folder(LLAMA), checkpoints.folder(DRAFT)
    with pytest.raises(errors.InputError, match="cannot be quantised to 7 bits; mlx has 2, 3, 4, 5, 6, 8"):
        dflash_fn.load_pair(target, draft, port="mlx", draft_bits=7)
    odd = checkpoints.folder(replace(DRAFT, inner=40))
    with pytest.raises(
        errors.InputError, match=r"'layers\.0\.mlp\.down_proj\.weight' has 40 inputs; quantised, they come"
    ):
        dflash_fn.load_pair(target, odd, port="mlx", draft_bits=4)


def test_a_format_that_is_not_mlx_s(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = quantized_folder(checkpoints, "4 bits", "float32", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization"]
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(errors.UnsupportedModel, match="in the format 'gptq', which port mlx does not read"):
        dflash_fn.load_pair(folder, port="mlx")


def test_shapes_of_no_format(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = quantized_folder(checkpoints, "4 bits", "float32", tmp_path)
    reader = open_reader(Source("it", {}, folder=folder), mx.float32)
    with pytest.raises(errors.CheckpointError, match="it: 'lm_head' has 16 bits in groups of 16, by its shapes"):
        take_matrix(reader, "lm_head", 48, 16)


# --- memory and threads ---


def test_the_ordinary_loop_copies_nothing_and_a_fork_copies_once(checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(dflash_fn.get_port("mlx"), DRAFT)
    room = 20_000
    begun = dflash_fn.prefill(pair, IDS)
    begun = replace(
        begun,
        target_cache=pair.port.reserve(begun.target_cache, room),
        draft_cache=pair.port.reserve(begun.draft_cache, room),
    )
    one = begun.target_cache.buffer.keys[0].nbytes
    state = dflash_fn.decode(begun, pair, max_new_tokens=9, stop_token_ids=())
    held, counts = mx.get_active_memory(), state.target_cache.buffer.counts
    mx.reset_peak_memory()
    state = dflash_fn.decode(state, pair, max_new_tokens=40, stop_token_ids=())
    assert counts.copies == 0
    assert mx.get_peak_memory() - held < one / 2
    assert abs(mx.get_active_memory() - held) < one / 8
    fork = dflash_fn.decode(begun, pair, max_new_tokens=9, stop_token_ids=())
    assert fork.target_cache.buffer.counts.copies == 1
    assert mx.get_peak_memory() - held > 4 * one
    assert fork.tokens[0] == state.tokens[0][: len(fork.tokens[0])]


def test_a_state_may_be_made_in_one_thread_and_used_in_another(checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(dflash_fn.get_port("mlx"), DRAFT)
    expected = dflash_fn.decode(dflash_fn.prefill(pair, IDS), pair, max_new_tokens=30, stop_token_ids=()).tokens
    begun = dflash_fn.decode(dflash_fn.prefill(pair, IDS), pair, max_new_tokens=7, stop_token_ids=())
    found = []

    def work() -> None:
        found.append(dflash_fn.decode(begun, pair, max_new_tokens=10, stop_token_ids=()))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 3
    for state in found:
        assert dflash_fn.decode(state, pair, max_new_tokens=13, stop_token_ids=()).tokens == expected


# --- parts ---


def test_queries_that_are_padded_for_metal_change_nothing() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        mx.array(rng.normal(size=shape).astype(np.float32)) for shape in ((1, 4, 5, 16), (1, 2, 64, 16), (1, 2, 64, 16))
    )
    seen = mx.array(rng.random((1, 1, 5, 64)).astype(np.float32)) < 0.5
    attended = mx.fast.scaled_dot_product_attention
    alone = attended(q, k, v, scale=0.25, mask=seen)
    padded = attended(attention.pad_queries(q, 9), k, v, scale=0.25, mask=attention.pad_queries(seen, 9))
    assert padded.shape == (1, 4, 9, 16)
    assert np.array(padded)[:, :, :5].tobytes() == np.array(alone).tobytes()


def test_the_namespace_says_what_numpy_says() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 7)).astype(np.float32)
    a, b = namespace, namespace.asarray
    assert np.array_equal(a.argmax(b(x), axis=-1), x.argmax(-1))
    assert np.array_equal(a.cumulative_prod(b(x), axis=1), x.cumprod(1))
    assert np.array_equal(a.cumulative_sum(b(x > 0).astype(mx.int32), axis=1), (x > 0).cumsum(1))
    assert np.array_equal(a.sum(b(x > 0), axis=1, dtype=mx.int32), (x > 0).sum(1))
    assert np.array_equal(
        a.take_along_axis(b(x), b(np.array([[6], [0], [2]])), axis=1), x[[0, 1, 2], [6, 0, 2]][:, None]
    )
    assert np.array_equal(a.concat([b(x), b(x)], axis=1), np.concatenate([x, x], 1))
    assert np.array_equal(a.where(b(x) > 0, b(x), 0), np.where(x > 0, x, 0))


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1), None])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_reductions_of_nothing_never_reach_mlx(shape, keepdims, axis, monkeypatch) -> None:
    """Its CPU build may loop for ever over them, depending on what lay in memory before."""
    for name in ("sum", "all", "any"):
        real = getattr(mx, name)
        monkeypatch.setattr(mx, name, lambda x, real=real, **options: real(x, **options) if x.size else 1 / 0)
        expected = getattr(np, name)(np.zeros(shape, dtype=np.int32), axis=axis, keepdims=keepdims)
        made = getattr(namespace, name)(mx.zeros(shape, dtype=mx.int32), axis=axis, keepdims=keepdims)
        assert np.array_equal(np.array(made), expected), name
        assert (made.dtype == mx.bool_) == (name != "sum")


def test_ties_go_to_the_first_index_in_every_dtype() -> None:
    x = np.zeros((1, 3000), dtype=np.float32)
    x[0, [17, 900, 2999]] = 1.0
    for dtype in DTYPES.values():
        assert namespace.argmax(namespace.asarray(x).astype(dtype), axis=-1).tolist() == [17]


def test_uniforms_stay_below_one() -> None:
    values = np.array([0.0, 0.1, 0.5, 1.0 - 2.0**-53, 1e-300])
    held = np.array(namespace.asarray(values))
    assert held.dtype == np.float32
    assert (held <= values).all()
    assert held.max() < 1.0
    assert np.array_equal(held, values.astype(np.float32) - (values.astype(np.float32) > values) * np.spacing(held))


def test_tokens_and_accepted_counts_are_those_of_the_torch_port() -> None:
    pytest.importorskip("torch")
    pairs = [dflash_fn.load_zoo("tiny-code", port=port, dtype="float32") for port in ("torch", "mlx")]
    for prompt in (
        "def fibonacci(n):\n",
        "class Stack:\n    def __init__(self",
        "def add(a, b):\n    return a + b\n\n\ndef sub(",
    ):
        torch_run, mlx_run = (run(dflash_fn.prefill(pair, prompt), pair, max_new_tokens=64) for pair in pairs)
        assert mlx_run.emitted == torch_run.emitted
        assert mlx_run.accepted() == torch_run.accepted()
        scale = np.abs(torch_run.logits[0]).max(axis=-1)
        distance = np.abs(mlx_run.logits[0] - torch_run.logits[0]).max(axis=-1) / scale
        assert distance.max() <= bound("float32", "logits", pairs[0].target.spec)
