"""Hybrids against transformers' qwen3_5: hidden states, logits, and every state of a gated delta net."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_fn import Pair, errors, load_pair, prefill
from dflash_fn.config import LayerKind
from dflash_fn.tolerances import UNIT, bound
from tests.helpers.parity_models import SIZES, distance, in_dtype, random_model, said_by_port, said_by_transformers
from tests.helpers.runs import run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

DTYPES = sorted(UNIT)
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "one-group": {"linear_num_key_heads": 6},
    "long-kernel": {"linear_conv_kernel_dim": 7},
    "mixed": {"layer_types": ["full_attention", "linear_attention"] * 2 + ["linear_attention"]},
    "whole-heads-turn": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
}
CHUNKS = ((24, 8, 1, 7), (1,) * 40, (40,))


def hybrid(name: str, seed: int = 1, **changes: Any) -> Any:
    return random_model(transformers.Qwen3_5TextConfig(**{**SIZES, **DELTA, **VARIANTS[name], **changes}), seed)


def text_of(size: int) -> list[int]:
    return np.random.default_rng(size).integers(0, 64, size).tolist()


def compare(pair: Pair, model: Any, ids: list[int], chunks: tuple[int, ...]) -> None:
    spec, dtype = pair.target.spec, pair.target.dtype
    ours, theirs = said_by_port(pair, ids, chunks), said_by_transformers(model, ids)
    for layer, (mine, other) in enumerate(zip(ours.hidden, theirs.hidden, strict=True), start=1):
        assert distance(mine, other) <= bound(dtype, "hidden", spec, layers=layer), f"layer {layer - 1}"
    assert distance(ours.logits, theirs.logits) <= bound(dtype, "logits", spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_and_logits(name: str, dtype: str) -> None:
    model = in_dtype(hybrid(name), dtype)
    pair = load_pair(model, port="torch")
    for chunks in CHUNKS:
        compare(pair, model, text_of(40), chunks)


def test_the_comparison_can_fail() -> None:
    """Norms without their 1 are seen in the first layer."""
    model = hybrid("plain")
    pair = load_pair(model, port="torch")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.add_(0.01)
    with pytest.raises(AssertionError, match="layer 0"):
        compare(pair, model, text_of(40), (40,))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 40])
@pytest.mark.parametrize("name", ["plain", "long-kernel"])
def test_every_state_of_every_layer(name: str, length: int) -> None:
    """After prefill in one go, and after single tokens: conv and recurrent states, keys and values."""
    model = hybrid(name)
    pair, ids = load_pair(model, port="torch"), text_of(length + 1)
    with torch.inference_mode():
        theirs = model(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
    port, spec = pair.port, pair.target.spec
    assert spec.delta is not None
    for held in (prefill(pair, ids, width=4).target_cache, stepped(pair, ids)):
        arrays = {key: torch.tensor(bits.values) for key, bits in port.export_cache(held).items()}
        for layer in spec.layers_of(LayerKind.DELTA):
            conv = theirs.get_conv_state(layer, state_idx=0)[0].T[-(spec.delta.kernel - 1) :]
            conv = torch.nn.functional.pad(conv, (0, 0, spec.delta.kernel - 1 - len(conv), 0))
            state = theirs.get_recurrent_state(layer, state_idx=0)[0]
            assert near(arrays[f"{layer}.0.conv"], conv, spec, layer)
            assert near(arrays[f"{layer}.0.recurrent"], state, spec, layer)
        for layer in spec.layers_of(LayerKind.FULL):
            assert near(arrays[f"{layer}.0.keys"], theirs.layers[layer].keys[0].transpose(0, 1), spec, layer)
            assert near(arrays[f"{layer}.0.values"], theirs.layers[layer].values[0].transpose(0, 1), spec, layer)


def stepped(pair: Pair, ids: list[int]) -> Any:
    cache = pair.port.new_cache(pair.target, len(ids))
    for token in ids[:-1]:
        made = pair.port.target_pass(pair.target, cache, torch.tensor([[token]]), taps=(), head=False, exact_rows=False)
        cache = pair.port.select(made.family, (1,))
    return cache


def near(ours: Any, theirs: Any, spec: Any, layer: int) -> bool:
    assert ours.shape == theirs.shape
    apart = float((ours.double() - theirs.double()).abs().max())
    return apart <= bound("float32", "hidden", spec, layers=layer + 1) * max(float(theirs.abs().max()), 1e-30)


def test_a_model_in_memory_is_left_as_it_was() -> None:
    """No module is replaced, no attribute of an object or a class is written, and it computes what it computed."""
    model = hybrid("plain")
    ids = torch.tensor([text_of(12)])
    modules = list(model.modules())
    before = [dict(vars(one)) for one in modules], [dict(vars(type(one))) for one in modules]
    with torch.inference_mode():
        theirs = model(ids).logits
    pair = load_pair(model, port="torch")
    run(prefill(pair, text_of(12)), pair, max_new_tokens=6)
    after = [dict(vars(one)) for one in model.modules()], [dict(vars(type(one))) for one in model.modules()]
    for old, new in zip(before, after, strict=True):
        for one, other in zip(old, new, strict=True):
            assert one.keys() == other.keys()
            assert all(one[key] is other[key] for key in one)
    assert list(model.modules()) == modules
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, theirs)


# --- checkpoints ---


def wrapped_folder(folder: Path, model: Any) -> Path:
    """Write a model as part of one that also sees, with layers that predict further tokens."""
    tensors = {f"model.language_model.{key.removeprefix('model.')}": x for key, x in model.state_dict().items()}
    tensors["lm_head.weight"] = tensors.pop("model.language_model.lm_head.weight")
    tensors |= {"model.visual.patch_embed.proj.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(2)}
    folder.mkdir()
    safetensors.save_file({key: x.clone() for key, x in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": model.config.to_dict(),
        "vision_config": {},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_folder_of_the_text_model(tmp_path: Path) -> None:
    model = hybrid("plain")
    model.save_pretrained(tmp_path)
    compare(load_pair(tmp_path, device="cpu"), model, text_of(40), (40,))


@pytest.mark.parametrize("port", ["torch", "mlx", "jax"])
def test_a_folder_of_a_model_that_also_sees(port: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its text part is read, and what is left out is named."""
    model, ids = hybrid("plain"), text_of(9)
    folder = wrapped_folder(tmp_path / "it", model)
    with caplog.at_level(logging.INFO, logger="dflash_fn"):
        try:
            pair = load_pair(folder, port=port, device="cpu")
        except errors.BackendMissing as error:
            pytest.skip(str(error))
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: 1 tensors of a vision tower are not read: only the text part is run",
        f"{folder}: 1 tensors of layers that predict further tokens are not read: only the text part is run",
    ]
    logits = run(prefill(pair, ids), pair, max_new_tokens=1).logits[0]
    theirs = said_by_transformers(model, ids).logits[-1:]
    assert distance(torch.tensor(logits), theirs) <= bound("float32", "logits", pair.target.spec)


def test_a_tensor_of_another_part_that_is_unknown_is_an_error(tmp_path: Path) -> None:
    model = hybrid("plain")
    model.save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    safetensors.save_file({**tensors, "model.audio.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(errors.CheckpointError, match=r"1 tensors that its config gives no use for.*model\.audio"):
        load_pair(tmp_path, device="cpu")
