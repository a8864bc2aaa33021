"""Models in memory: read, used, and left exactly as they were."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import dflash_fn
from dflash_fn import errors
from tests.helpers.runs import decode_plainly, differing, run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DESIGNS = {
    "llama": TargetDesign(),
    "tied": TargetDesign(tied=True),
    "bias": TargetDesign(bias=True),
    "qwen3": TargetDesign(family="qwen3", seed=20),
}
PROMPT = [5, 9, 2, 7]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def model_of(folder: Path, dtype: str = "float32") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def look(model: Any) -> tuple[dict[str, Any], list[Any]]:
    """Everything that could be changed: tensors with their place in memory, and what every module is and has."""
    tensors = {
        name: (tensor.data_ptr(), tensor.requires_grad, tensor.dtype, tensor.clone())
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    modules = [
        (name, type(module), set(vars(module)), set(vars(type(module))), module.training, _hooks(module))
        for name, module in model.named_modules()
    ]
    return tensors, [*modules, copy.deepcopy(model.config.to_dict())]


def _hooks(module: Any) -> list[int]:
    return [len(value) for name, value in vars(module).items() if name.endswith("_hooks")]


def forward(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits


@pytest.mark.parametrize("name", DESIGNS)
def test_a_model_in_memory_is_left_as_it_was(checkpoints: Checkpoints, name: str) -> None:
    design = DESIGNS[name]
    model = model_of(checkpoints.folder(design))
    before, logits = look(model), forward(model)
    pair = dflash_fn.load_pair(model, checkpoints.folder(DraftDesign(target=design)))
    run(dflash_fn.prefill(pair, [PROMPT, [3]]), pair, max_new_tokens=12)
    with pytest.raises(errors.InputError):
        dflash_fn.decode(dflash_fn.prefill(pair, PROMPT), pair, block_size=99)
    after = look(model)
    assert after[1] == before[1]
    assert after[0].keys() == before[0].keys()
    for key, (*facts, values) in before[0].items():
        *facts_now, values_now = after[0][key]
        assert facts_now == facts
        assert torch.equal(values_now.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(forward(model), logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", DESIGNS)
def test_a_model_in_memory_says_what_its_folder_says(checkpoints: Checkpoints, name: str, dtype: str) -> None:
    folder = checkpoints.folder(DESIGNS[name])
    pairs = dflash_fn.load_pair(model_of(folder, dtype)), dflash_fn.load_pair(folder, dtype=dtype)
    assert pairs[0].target.dtype == dtype
    left, right = (decode_plainly(dflash_fn.prefill(pair, PROMPT, width=4), pair, 16) for pair in pairs)
    assert left.emitted == right.emitted
    assert differing(left.logits[0], right.logits[0]) == []


def test_a_model_in_memory_keeps_the_contract(checkpoints: Checkpoints) -> None:
    design = DraftDesign(block_size=8)
    pair = dflash_fn.load_pair(model_of(checkpoints.folder(design.target)), checkpoints.folder(design))
    plain = decode_plainly(dflash_fn.prefill(pair, PROMPT), pair, 24)
    found = run(dflash_fn.prefill(pair, PROMPT), pair, max_new_tokens=24)
    assert found.emitted == plain.emitted
    assert differing(found.logits[0], plain.logits[0]) == []


def test_gradients_of_a_model_in_memory_do_not_grow(checkpoints: Checkpoints) -> None:
    model = model_of(checkpoints.folder(TargetDesign()))
    assert all(parameter.requires_grad for parameter in model.parameters())
    pair = dflash_fn.load_pair(model)
    found = run(dflash_fn.prefill(pair, PROMPT), pair, max_new_tokens=4)
    assert not found.infos[-1].logits.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_stop_tokens_and_name_of_a_model_in_memory(checkpoints: Checkpoints) -> None:
    model = model_of(checkpoints.folder(TargetDesign(eos=(4, 6))))
    pair = dflash_fn.load_pair(model)
    assert pair.target.spec.eos_token_ids == (4, 6)
    assert pair.name == "LlamaForCausalLM"


def test_a_module_without_a_config_is_no_draft(checkpoints: Checkpoints) -> None:
    design = DraftDesign()
    with pytest.raises(errors.InputError, match="draft: got an object of type Linear, which port torch cannot read"):
        dflash_fn.load_pair(model_of(checkpoints.folder(design.target)), torch.nn.Linear(2, 2))


def test_a_dtype_that_nothing_runs_in(checkpoints: Checkpoints) -> None:
    with pytest.raises(errors.UnsupportedModel) as caught:
        dflash_fn.load_pair(model_of(checkpoints.folder(TargetDesign()), "float64"))
    assert str(caught.value) == ('LlamaForCausalLM: dtype: got "float64"; supported are float32, bfloat16, float16')
