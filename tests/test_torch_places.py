"""Targets on several devices: the plan, and on devices that torch only pretends to have, that nothing is in two places.

Fake tensors have a device and a shape and no numbers. What mixes devices raises on them as it would on real ones.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors
from dflash_fn.config import parse_target
from dflash_fn.port import PortInfo
from dflash_fn.records import Pair
from tests.helpers.runs import run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

torch = pytest.importorskip("torch")

from dflash_fn_torch import ops, placement, weights  # noqa: E402
from dflash_fn_torch.placement import map_in_memory, places_of  # noqa: E402
from dflash_fn_torch.port import TorchPort  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # noqa: E402 (needs torch)

DEVICES = ("cuda:0", "cuda:1", "cpu")
FAKE = ("lazy:0", "lazy:1", "cpu")
"""Of torch's kinds of devices, one that a build for CPUs lets fake tensors have and be cut into pieces."""

LLAMA = TargetDesign(layers=4)
SLIDING = TargetDesign(seed=20, family="qwen3", layers=4, tied=True, window=6)
HYBRID = TargetDesign(seed=4, family="qwen3_5", layers=4)
SPREAD = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.layers.2": "cpu", "": 1}
ASKED = {name: place if place == "cpu" else f"lazy:{place}" for name, place in SPREAD.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("places"))


def plan(device_map: dict[str, Any], design: TargetDesign = LLAMA) -> placement.Places:
    return places_of(device_map, parse_target(design.config, name="it"), DEVICES)


def test_a_map_gives_every_layer_a_place() -> None:
    found = plan(SPREAD)
    assert (found.embedding, found.layers, found.head) == ("cuda:0", ("cuda:0", "cuda:1", "cpu", "cuda:1"), "cuda:1")
    assert found.layout == (
        "layers 1 on cuda:0, 1 on cuda:1, 1 on cpu, 1 on cuda:1, embedding on cuda:0, head on cuda:1"
    )
    assert found.of("model.layers.2.mlp.up_proj.weight") == "cpu"
    assert found.of("model.embed_tokens.weight") == "cuda:0"
    assert found.of("model.norm.weight") == found.of("lm_head.weight") == "cuda:1"


def test_names_are_matched_module_by_module_and_the_longest_counts() -> None:
    eleven = TargetDesign(layers=11)
    found = plan({"model": "cpu", "model.layers.1": torch.device("cuda", 1), "lm_head": "cuda"}, eleven)
    assert found.layers == ("cpu", "cuda:1", *["cpu"] * 9)
    assert (found.embedding, found.head) == ("cpu", "cuda:0")
    inside = {f"model.layers.0.{part}": 1 for part in ("self_attn", "mlp", "input_layernorm")}
    assert plan({"": "cpu", **inside, "model.layers.0": 1}).layers[0] == "cuda:1"
    assert plan({"model.language_model.layers.3": 0, "": 1}, HYBRID).layers == ("cuda:1",) * 3 + ("cuda:0",)


def test_a_tied_head_is_where_its_embedding_is_unless_the_map_says_otherwise() -> None:
    tied = TargetDesign(tied=True)
    assert plan({"model.embed_tokens": 1, "": 0}, tied).head == "cuda:1"
    assert plan({"model.embed_tokens": 1, "lm_head": 0, "": 0}, tied).head == "cuda:0"
    assert plan({"": 0}).layout == "whole"


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"": "disk"}, "device_map: names device 'disk'; port torch has here: cuda:0, cuda:1, cpu"),
        ({"": 7}, "device_map: names device 'cuda:7'; port torch has here: cuda:0, cuda:1, cpu"),
        (
            {"lm_head": 0, "model.layers.0": 0},
            "device_map: says nothing of 'model.layers.1'; give it a place, or '' one for all the rest",
        ),
        (
            {"": 0, "model.layers.2.mlp": 1, "model.layers.2": 0},
            "device_map: puts parts of 'model.layers.2' on cuda:0 and cuda:1; a layer is on one device",
        ),
    ],
)
def test_maps_that_cannot_be_followed_are_refused(device_map: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InputError) as caught:
        plan(device_map)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("device_map", "got"),
    [("clever", "'clever'"), (3, "an object of type int"), ({1: "cpu"}, "an object of type dict")],
)
def test_what_is_no_map_is_refused(checkpoints: Checkpoints, device_map: Any, got: str) -> None:
    with pytest.raises(errors.InputError) as caught:
        dflash_fn.load_pair(checkpoints.folder(LLAMA), device_map=device_map)
    assert str(caught.value) == (
        f"device_map: got {got}, expected a map from names of modules to devices, "
        "or one of: auto, balanced, balanced_low_0, sequential"
    )


def test_device_and_map_exclude_each_other(checkpoints: Checkpoints) -> None:
    with pytest.raises(errors.InputError, match="device and device_map exclude each other; device_map says where"):
        dflash_fn.load_pair(checkpoints.folder(LLAMA), device="cpu", device_map={"": "cpu"})


def test_compiled_kernels_run_on_one_cpu(checkpoints: Checkpoints) -> None:
    spreads: list[dict[str, Any]] = [{"device_map": {"": "cpu"}}, {"mesh": 2}]
    for spread in spreads:
        with pytest.raises(errors.InputError, match=f"compile and {next(iter(spread))} exclude each other; compiled"):
            dflash_fn.load_pair(checkpoints.folder(LLAMA), compile=True, **spread)


@pytest.mark.parametrize("name", ["mlx", "jax"])
def test_ports_of_one_device_refuse(checkpoints: Checkpoints, name: str) -> None:
    try:
        port = dflash_fn.get_port(name)
    except errors.BackendMissing as error:
        pytest.skip(str(error))
    spreads: list[dict[str, Any]] = [{"device_map": {"": "cpu"}}, {"mesh": 2}]
    for options in spreads:
        with pytest.raises(errors.InputError) as caught:
            dflash_fn.load_pair(checkpoints.folder(LLAMA), port=port, **options)
        assert str(caught.value) == f"port {name} keeps a model on one device; device_map and mesh are for port torch"


def test_a_mesh_by_number_needs_torchrun(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(errors.InputError) as caught:
        dflash_fn.load_pair(checkpoints.folder(LLAMA), mesh=2)
    assert str(caught.value) == (
        "tensor parallel: asked for 2 processes, and this is one of 1; start 2 of them: torchrun --nproc-per-node 2 ..."
    )


def test_without_accelerate_a_strategy_says_what_to_install(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(errors.BackendMissing) as caught:
        dflash_fn.load_pair(checkpoints.folder(LLAMA), device_map="auto")
    assert str(caught.value) == (
        "device_map: 'auto' needs accelerate, which is not installed; run: "
        f"{errors.install_line('devices')}, or give a map from names of modules to devices"
    )


@pytest.mark.parametrize("design", [LLAMA, SLIDING, HYBRID], ids=["llama", "sliding", "hybrid"])
def test_accelerates_map_is_followed(design: TargetDesign) -> None:
    pytest.importorskip("accelerate")
    spec = parse_target(design.config, name="it")
    size = sum(values.nbytes for values in _tensors(design).values())
    made = placement.map_of("balanced", design.config, torch.float32, {0: size, 1: size, "cpu": size})
    found = places_of(made, spec, DEVICES)
    assert set(found.layers) == {"cuda:0", "cuda:1"}
    assert list(found.layers) == sorted(found.layers)
    assert found.embedding == "cuda:0"


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate would choose the GPUs")
@pytest.mark.parametrize("strategy", placement.STRATEGIES)
def test_each_strategy_works_where_there_is_a_cpu_alone(checkpoints: Checkpoints, strategy: str) -> None:
    pytest.importorskip("accelerate")
    pair = dflash_fn.load_pair(checkpoints.folder(SLIDING), device_map=strategy)
    assert (pair.target.weights.places, pair.target.layout) == (("cpu",) * 4, "whole")


def test_a_model_that_transformers_dispatched_is_read_where_it_lies(checkpoints: Checkpoints) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    folder = checkpoints.folder(LLAMA)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map={"model": "cpu", "lm_head": "cpu"})
    held, read = (dflash_fn.load_pair(source, dtype="float32") for source in (model, folder))
    mine, theirs = (run(dflash_fn.prefill(pair, [5, 9, 2]), pair, max_new_tokens=6) for pair in (held, read))
    assert (mine.emitted, mine.logits[0].tobytes()) == (theirs.emitted, theirs.logits[0].tobytes())


def _tensors(design: TargetDesign) -> dict[str, np.ndarray]:
    from tests.helpers.tiny import target_tensors

    return target_tensors(design)


@pytest.mark.parametrize("design", [LLAMA, HYBRID], ids=["llama", "hybrid"])
@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"model.layers.0": "cpu", "model": "cpu", "lm_head": "cpu"}])
def test_a_map_with_one_device_changes_no_bit(
    checkpoints: Checkpoints, design: TargetDesign, device_map: dict[str, Any]
) -> None:
    draft = DraftDesign(design, taps=(1, 3))
    folders = checkpoints.folder(design), checkpoints.folder(draft)
    pair = dflash_fn.load_pair(*folders, device_map=device_map)
    assert pair.target.weights.places == ("cpu",) * 4
    mine, plain = (run(dflash_fn.prefill(p, [5, 9, 2]), p, max_new_tokens=12) for p in (pair, _plain(folders)))
    assert mine.emitted == plain.emitted
    assert mine.logits[0].tobytes() == plain.logits[0].tobytes()
    dflash_fn.decode(mine.last, _plain(folders), max_new_tokens=1)  # its states are those of any pair on that device


def _plain(folders: tuple[Path, Path]) -> Pair:
    return dflash_fn.load_pair(*folders, device="cpu")


def test_a_model_in_memory_brings_its_map() -> None:
    assert map_in_memory(SimpleNamespace(hf_device_map={"model": 0, "lm_head": 1})) == {"model": 0, "lm_head": 1}
    assert map_in_memory(SimpleNamespace(hf_device_map={"": "cpu"})) is None
    assert map_in_memory(SimpleNamespace()) is None


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two devices beside the CPU, all of them without memory; only shapes and devices are computed."""
    monkeypatch.setattr(TorchPort, "info", lambda self: PortInfo("torch", "fake", FAKE, ("float32",), 1))
    monkeypatch.setattr(weights, "_read_file", functools.partial(read_really, weights._read_file))
    monkeypatch.setattr(ops, "packs", lambda dtype: False)  # oneDNN's layout has no fake
    ops._rope_table.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    ops._rope_table.cache_clear()


def read_really(read: Any, file: Path) -> Any:
    with unset_fake_temporarily():  # what files hold is real, and becomes fake when it is moved
        return read(file)


def devices_of(tensors: Any) -> list[str]:
    return [str(tensor.device) for tensor in tensors]


@pytest.mark.parametrize("exact_rows", [False, True])
@pytest.mark.parametrize("design", [LLAMA, SLIDING, HYBRID], ids=["llama", "sliding", "hybrid"])
@pytest.mark.usefixtures("pretended")
def test_every_tensor_of_a_layer_is_in_its_place(
    checkpoints: Checkpoints, design: TargetDesign, exact_rows: bool
) -> None:
    draft = DraftDesign(design, taps=(0, 1, 3), window=5)
    pair = dflash_fn.load_pair(checkpoints.folder(design), checkpoints.folder(draft), device_map=ASKED, dtype="float32")
    target, port, layers = pair.target, pair.port, ("lazy:0", "lazy:1", "cpu", "lazy:1")
    head = "lazy:0" if design.tied else "lazy:1"
    assert (target.device, target.weights.places, str(target.weights.head.device)) == (head, layers, head)
    assert pair.draft
    assert pair.draft.device == head
    for layer, place in zip(target.weights.layers, layers, strict=True):
        held = [layer.input_norm, layer.post_norm, *layer.qkv.weights, *layer.out.weights, *layer.gate_up.weights]
        assert set(devices_of([*held, *layer.down.weights])) == {place}
    cache = port.join_rows((port.new_cache(target, 64), port.new_cache(target, 64)))
    check_cache(cache, design, layers)
    made = port.target_pass(
        target,
        cache,
        torch.zeros(2, 8, dtype=torch.int64, device=head),
        taps=(0, 1, 3),
        head=True,
        exact_rows=exact_rows,
    )
    assert devices_of([made.logits, made.features]) == [head, head]
    after = port.select(made.family, (3, 8))
    check_cache(after, design, layers)
    drafts = port.new_cache(pair.draft, 64)
    context = port.draft_context(
        pair.draft, port.join_rows((drafts, drafts)), made.features, (3, 8), exact_rows=exact_rows
    )
    block = torch.zeros(2, 4, dtype=torch.int64, device=head)
    guessed = port.draft_pass(pair.draft, target, context, block, exact_rows=exact_rows)
    assert str(guessed.device) == head
    check_cache(port.reserve(port.split_rows(after)[0], 2000), design, layers)


def check_cache(cache: Any, design: TargetDesign, layers: tuple[str, ...]) -> None:
    kinds = [kind.value for kind in cache.kinds]
    full = [place for place, kind in zip(layers, kinds, strict=True) if kind == "full_attention"]
    sliding = [place for place, kind in zip(layers, kinds, strict=True) if kind == "sliding_attention"]
    delta = [place for place, kind in zip(layers, kinds, strict=True) if kind == "linear_attention"]
    assert devices_of(cache.full.buffer.keys) == devices_of(cache.full.buffer.values) == full
    if sliding:
        assert devices_of(cache.recent.sliding.buffer.keys) == sliding
    for place, states in zip(delta, cache.recent.states, strict=True):
        assert set(devices_of([t for state in states for t in (state.conv, state.recurrent)])) == {place}


@pytest.mark.usefixtures("pretended")
def test_a_layer_in_another_place_than_its_hidden_states_would_be_noticed(checkpoints: Checkpoints) -> None:
    pair = dflash_fn.load_pair(checkpoints.folder(LLAMA), device_map=ASKED, dtype="float32")
    object.__setattr__(pair.target.weights, "places", ("lazy:0",) * 4)
    cache = pair.port.new_cache(pair.target, 64)
    with pytest.raises(RuntimeError):  # what it says depends on the operation that meets two devices
        pair.port.target_pass(
            pair.target,
            cache,
            torch.zeros(1, 4, dtype=torch.int64, device="lazy:1"),
            taps=(),
            head=True,
            exact_rows=False,
        )


@pytest.mark.usefixtures("pretended")
def test_offloaded_tensors_are_refused(checkpoints: Checkpoints) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**_llama()))
    model.hf_device_map = {"model": "lazy:0", "lm_head": "cpu"}
    with pytest.raises(errors.InputError, match=r"offloaded and has no data here; give the checkpoint's folder and a"):
        dflash_fn.load_pair(model)


def _llama() -> dict[str, Any]:
    return {key: value for key, value in LLAMA.config.items() if key not in ("architectures", "model_type")}
