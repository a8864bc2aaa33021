"""What a caller gets wrong is one named error, whose text says what was got, what was expected and what to do."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors
from dflash_fn.judging import judge
from dflash_fn.opening import extend, prefill
from dflash_fn.policies import Policy
from dflash_fn.port import Port
from dflash_fn.records import Array, DecodeState, Pair, Verdict
from dflash_fn.steps import narrowed
from tests.helpers import proposers
from tests.helpers.runs import differing, equal_probes, probe, run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, draft_tensors, target_tensors, write_checkpoint

DESIGN = DraftDesign(target=TargetDesign(max_context=64))
LOST = object()


@pytest.fixture(scope="module")
def pair(port: Port, checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(port, DESIGN)


def message(kind: type[errors.DflashError], act: Any, *arguments: Any, **options: Any) -> str:
    """Do what must fail; return what the error says."""
    with pytest.raises(kind) as caught:
        act(*arguments, **options)
    assert type(caught.value) is kind
    return str(caught.value)


# --- prompts ---


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([], "prompts: got none, expected at least one row"),
        ([[]], "row 0: the prompt is empty; expected at least one token"),
        ([[1], []], "row 1: the prompt is empty; expected at least one token"),
        ([-1], "row 0, token 0: got -1, expected an id from 0 to 47"),
        ([3, 48], "row 0, token 1: got 48, expected an id from 0 to 47"),
        ([True], "row 0, token 0: got True, expected an id from 0 to 47"),
        ([1, 1.5], "row 0, token 1: got 1.5, expected an id from 0 to 47"),
        ([[1], [2, 1.5]], "row 1, token 1: got 1.5, expected an id from 0 to 47"),
        ([[1], ["a"]], "row 1, token 0: got 'a', expected an id from 0 to 47"),
        ("def f", "row 0: got text, but the pair has no tokenizer; give token ids"),
        (["def f", "x"], "row 0: got text, but the pair has no tokenizer; give token ids"),
        ([1] * 64, "row 0: the prompt has 64 tokens; the target's context holds 64, one of which must be left for"),
        ([[1], [1] * 70], "row 1: the prompt has 70 tokens; the target's context holds 64, one of which must be left"),
    ],
)
def test_a_prompt_that_cannot_be_read(pair: Pair, prompts: Any, expected: str) -> None:
    assert message(errors.InputError, prefill, pair, prompts).startswith(expected)


SEQUENCES = "expected text, a sequence of token ids, or a sequence of these with one a row; of an array, give .tolist()"


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([1.5], "row 0: got 1.5 of type float, expected text or a sequence of token ids"),
        ([None], "row 0: got None of type NoneType, expected text or a sequence of token ids"),
        (5, f"prompts: got 5 of type int, {SEQUENCES}"),
        (None, f"prompts: got None of type NoneType, {SEQUENCES}"),
        (b"ab", f"prompts: got b'ab' of type bytes, {SEQUENCES}"),
        ([b"ab"], "row 0: got b'ab' of type bytes, expected text or a sequence of token ids"),
        ({1: 2}, f"prompts: got {{1: 2}} of type dict, {SEQUENCES}"),
        (np.array(5), f"prompts: got array(5) of type ndarray, {SEQUENCES}"),
        ([[1], 2], "row 1: got 2 of type int, expected text or a sequence of token ids"),
        ([1, [2]], "row 0, token 1: got [2], expected an id from 0 to 47"),
        (["w", 2], "row 0: got text, but the pair has no tokenizer; give token ids"),
        (np.array([1.5]), "row 0: got np.float64(1.5) of type float64, expected text or a sequence of token ids"),
    ],
)
def test_a_prompt_of_a_wrong_type(pair: Pair, prompts: Any, expected: str) -> None:
    assert message(errors.InputError, prefill, pair, prompts) == expected


def test_what_is_shown_of_a_prompt_is_short(pair: Pair) -> None:
    assert len(message(errors.InputError, prefill, pair, bytes(10**6))) < 250
    assert len(message(errors.InputError, prefill, pair, [1, list(range(10**5))])) < 250


@pytest.mark.parametrize("other", [None, "pair", LOST])
def test_what_is_no_pair(pair: Pair, other: Any) -> None:
    expected = f"pair: got an object of type {type(other).__name__}, expected a Pair, as load_pair returns it"
    assert message(errors.InputError, prefill, other, [1]) == expected
    assert message(errors.InputError, dflash_fn.decode, prefill(pair, [1]), other) == expected


@pytest.mark.parametrize("act", [dflash_fn.decode, dflash_fn.rounds, dflash_fn.propose])
def test_a_state_and_a_pair_that_are_swapped(pair: Pair, act: Any) -> None:
    assert message(errors.InputError, act, pair, prefill(pair, [1])) == (
        "state: got an object of type Pair, expected a DecodeState, as prefill returns it; state and pair are swapped"
    )
    assert message(errors.InputError, act, None, pair) == (
        "state: got an object of type NoneType, expected a DecodeState, as prefill returns it"
    )


@pytest.mark.parametrize(
    "prompts", [(1, 2), np.array([1, 2]), [np.int32(1), np.uint8(2)], [[1, 2]], np.array([[1, 2]])]
)
def test_prompts_in_any_container(pair: Pair, prompts: Any) -> None:
    assert prefill(pair, prompts).tokens == ((1, 2),)
    assert all(type(token) is int for token in prefill(pair, prompts).tokens[0])


def test_the_longest_prompt_leaves_room_for_one_token(pair: Pair) -> None:
    assert len(run(prefill(pair, [1] * 63), pair).emitted[0]) == 1


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], "extend: got tokens for 0 rows, expected at least one token, and one sequence for each of the state's 1"),
        (
            [[]],
            "extend: got tokens for 1 rows, expected at least one token, and one sequence for each of the state's 1",
        ),
        ([[1], [2]], "extend: got tokens for 2 rows, expected at least one token, and one sequence for each of the"),
        ([48], "row 0, token 0: got 48, expected an id from 0 to 47"),
        (5, f"tokens: got 5 of type int, {SEQUENCES}"),
        (None, f"tokens: got None of type NoneType, {SEQUENCES}"),
        ([1] * 62, "row 0: the prompt has 64 tokens; the target's context holds 64"),
    ],
)
def test_tokens_that_cannot_be_added(pair: Pair, tokens: Any, expected: str) -> None:
    assert message(errors.InputError, extend, prefill(pair, [1, 2]), pair, tokens).startswith(expected)


# --- options ---


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"width": 0}, "width: got 0, expected an integer from 1 to "),
        ({"width": 10**6}, "width: got 1000000, expected an integer from 1 to "),
        ({"width": 1.5}, "width: got 1.5, expected an integer"),
        ({"width": True}, "width: got True, expected an integer"),
        ({"seed": -1}, "seed: got -1, expected an integer from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed: got 18446744073709551616, expected an integer from 0 to 18446744073709551615"),
        ({"seed": [1, 2]}, "seed: got 2 seeds for 1 rows; expected one, or one a row"),
        ({"seed": "a"}, "seed: got 'a', expected an integer"),
        ({"seed": b"a"}, "seed: got b'a', expected an integer"),
        ({"seed": 1.5}, "seed: got 1.5, expected an integer"),
        ({"seed": None}, "seed: got None, expected an integer"),
        ({"seed": {1}}, "seed: got {1}, expected an integer"),
    ],
)
def test_an_option_of_prefill_that_makes_no_sense(pair: Pair, options: Any, expected: str) -> None:
    assert message(errors.InputError, prefill, pair, [1], **options).startswith(expected)


@pytest.mark.parametrize("call", [dflash_fn.decode, dflash_fn.rounds])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens: got -1, expected an integer of at least 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens: got 2.0, expected an integer"),
        ({"block_size": 0}, "block_size: got 0, expected an integer of at least 1"),
        ({"block_size": 5}, "block_size 5 is above the state's width 4; prefill with width=5 or more, or decode"),
        ({"stop_token_ids": 48}, "stop_token_ids: got 48, expected an integer from 0 to 47"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids: got -1, expected an integer from 0 to 47"),
        ({"stop_token_ids": "ab"}, "stop_token_ids: got 'a', expected an integer"),
        ({"stop_token_ids": b"a"}, "stop_token_ids: got b'a', expected an integer"),
        ({"stop_token_ids": 1.5}, "stop_token_ids: got 1.5, expected an integer"),
        ({"policy": "match"}, "policy: got 'match' of type str, expected a Policy, such as dflash_fn.match()"),
        ({"policy": dflash_fn.match}, "policy: got <function mat"),
        ({"proposer": 5}, "proposer: got 5, expected a function (state, pair, block size) -> drafted tokens"),
    ],
)
def test_an_option_of_decode_that_makes_no_sense_is_seen_by_the_call(
    pair: Pair, call: Any, options: Any, expected: str
) -> None:
    assert message(errors.InputError, call, prefill(pair, [1]), pair, **options).startswith(expected)


def test_a_state_that_is_narrower_than_the_draft_names_both_ways_out(pair: Pair) -> None:
    state = prefill(pair, [1], width=2)
    expected = "block_size 4 is above the state's width 2; prefill with width=4 or more, or decode with block_size=2"
    assert message(errors.InputError, dflash_fn.decode, state, pair).startswith(expected)
    assert len(run(state, pair, block_size=2, max_new_tokens=5).emitted[0]) == 5


def test_a_proposer_of_another_shape(pair: Pair) -> None:
    def short(state: DecodeState, pair: Pair, size: int) -> Array:
        return pair.port.asarray(np.zeros((1, size - 2), dtype=np.int64), pair.target.device)

    found = message(errors.InputError, dflash_fn.decode, prefill(pair, [1]), pair, proposer=short)
    assert found == "proposer: got tokens of shape (1, 2), expected (1, 3)"


@pytest.mark.parametrize("token", [-1, 48, 2**31 - 1])
def test_a_proposer_of_tokens_that_the_target_does_not_have(pair: Pair, token: int) -> None:
    def beyond(state: DecodeState, pair: Pair, size: int) -> Array:
        return pair.port.asarray(np.array([[0, token, 0]]), pair.target.device)

    found = message(errors.InputError, dflash_fn.decode, prefill(pair, [1]), pair, proposer=beyond)
    assert found == f"proposer: row 0, drafted token 1: got {token}, expected an id from 0 to 47"


@pytest.mark.parametrize("kind", [np.float32, np.bool_])
def test_a_proposer_of_what_are_no_ids(pair: Pair, kind: Any) -> None:
    def floats(state: DecodeState, pair: Pair, size: int) -> Array:
        return pair.port.asarray(np.ones((1, size - 1), dtype=kind), pair.target.device)

    found = message(errors.InputError, dflash_fn.decode, prefill(pair, [1]), pair, proposer=floats)
    assert found == f"proposer: got tokens of dtype {np.dtype(kind)}, expected integers"


@pytest.mark.parametrize("made", [np.zeros((1, 3), dtype=np.int64), [[0, 0, 0]], None])
def test_a_proposer_of_another_kind_of_array(pair: Pair, made: Any) -> None:
    if isinstance(made, type(pair.port.asarray(np.zeros(1), pair.target.device))):
        pytest.skip(f"port {pair.port.name} takes numpy's arrays as its own")
    found = message(errors.InputError, dflash_fn.decode, prefill(pair, [1]), pair, proposer=lambda *_: made)
    assert found == (
        f"proposer: got tokens of type {type(made).__name__}, expected an array of port {pair.port.name}; "
        "make it by pair.port.asarray(values, pair.target.device)"
    )


def test_a_proposer_of_narrow_integers_is_fine(pair: Pair) -> None:
    def narrow(state: DecodeState, pair: Pair, size: int) -> Array:
        return pair.port.asarray(np.zeros((1, size - 1), dtype=np.int32), pair.target.device)

    expected = run(prefill(pair, [1]), pair, max_new_tokens=6).emitted
    assert run(prefill(pair, [1]), pair, max_new_tokens=6, proposer=narrow).emitted == expected


# --- loading ---


def test_an_unknown_port() -> None:
    found = message(errors.UnknownPort, dflash_fn.get_port, "abacus")
    assert found == f"unknown port 'abacus'; installed ports: {', '.join(dflash_fn.port_names())}"


@pytest.mark.parametrize("other", [None, 5, LOST])
def test_what_is_no_port(checkpoints: Checkpoints, other: Any) -> None:
    found = message(errors.InputError, dflash_fn.load_pair, checkpoints.folder(DESIGN.target), port=other)
    assert found.startswith("port: got ")
    assert found.endswith(f"expected a port or the name of one: {', '.join(dflash_fn.port_names())}")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_empty_name_is_not_the_current_folder(
    port: Port, checkpoints: Checkpoints, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoints.folder(DESIGN.target if role == "target" else DESIGN))
    sources = {"target": checkpoints.folder(DESIGN.target), role: ""}
    assert message(errors.InputError, dflash_fn.load_pair, **sources, port=port) == (
        f"{role}: got '', which is no folder; expected a folder with config.json, a name of the zoo, or a hub id such "
        "as 'Qwen/Qwen3-8B'"
    )


def test_an_unknown_dtype_lists_the_known_ones(port: Port, checkpoints: Checkpoints) -> None:
    folder = checkpoints.folder(DESIGN.target)
    found = message(errors.InputError, dflash_fn.load_pair, folder, port=port, dtype="int3")
    assert found == f"port {port.name} does not run in dtype 'int3'; it runs in: {', '.join(port.info().dtypes)}"


def test_an_unknown_device_lists_the_known_ones(port: Port, checkpoints: Checkpoints) -> None:
    folder = checkpoints.folder(DESIGN.target)
    found = message(errors.InputError, dflash_fn.load_pair, folder, port=port, device="abacus:7")
    assert found == f"port {port.name} has no device 'abacus:7' here; it has: {', '.join(port.info().devices)}"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_object_that_is_no_model(port: Port, checkpoints: Checkpoints, role: str) -> None:
    sources = {"target": checkpoints.folder(DESIGN.target), role: LOST}
    found = message(errors.InputError, dflash_fn.load_pair, **sources, port=port)
    assert found == (
        f"{role}: got an object of type object, which port {port.name} cannot read; "
        "expected a folder, a hub id, or a model of that port's library that has its config with it"
    )


def test_a_draft_given_as_a_target(port: Port, checkpoints: Checkpoints) -> None:
    folder = checkpoints.folder(DESIGN)
    found = message(errors.UnsupportedModel, dflash_fn.load_pair, folder, port=port)
    assert found == f"{folder}: this is the config of a DFlash draft; expected a target, such as Qwen3-8B"


def test_a_target_given_as_a_draft(port: Port, checkpoints: Checkpoints) -> None:
    folder = checkpoints.folder(DESIGN.target)
    found = message(errors.UnsupportedModel, dflash_fn.load_pair, folder, folder, port=port)
    assert found.startswith(f"{folder}: this config is a target, not a draft")


MISFITS: dict[str, tuple[type[errors.PairMismatch], dict[str, Any], str]] = {
    "hidden size": (
        errors.HiddenSizeMismatch,
        {"hidden_size": 24},
        "the draft has hidden size 24, the target 32; the draft was made for another target",
    ),
    "vocabulary": (
        errors.VocabularyMismatch,
        {"vocab_size": 50},
        "the draft has a vocabulary of 50, the target of 48; the draft was made for another target",
    ),
    "tapped layer": (
        errors.TappedLayerMismatch,
        {"num_target_layers": 4, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 3]}},
        "the draft taps target layer 3; the target has layers 0 to 1",
    ),
    "depth": (
        errors.TargetLayersMismatch,
        {"num_target_layers": 4},
        "the draft was trained for a target of 4 layers; this one has 2",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_draft_of_another_target(port: Port, checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    kind, keys, expected = MISFITS[name]
    draft = write_checkpoint(tmp_path / "draft", DESIGN.config | keys, draft_tensors(DESIGN))
    target = checkpoints.folder(DESIGN.target)
    assert message(kind, dflash_fn.load_pair, target, draft, port=port) == expected


def test_a_mask_token_outside_the_vocabulary(port: Port, checkpoints: Checkpoints, tmp_path: Path) -> None:
    keys = {"dflash_config": {"mask_token_id": 48, "target_layer_ids": [0]}}
    draft = write_checkpoint(tmp_path / "draft", DESIGN.config | keys, draft_tensors(DESIGN))
    found = message(errors.ConfigError, dflash_fn.load_pair, checkpoints.folder(DESIGN.target), draft, port=port)
    assert found == f"{draft}: dflash_config.mask_token_id: got 48, expected an id below vocab_size, which is 48"


def test_parts_that_do_not_fit_are_refused_before_a_weight_is_read(
    port: Port, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(DESIGN.config | {"hidden_size": 24}))
    message(errors.HiddenSizeMismatch, dflash_fn.load_pair, checkpoints.folder(DESIGN.target), draft, port=port)


class Words:
    """A tokenizer of some size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {f"w{index}": index for index in range(self.size)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word[1:]) for word in text.split()]


@pytest.mark.parametrize("size", [49, 43, 1])
def test_a_tokenizer_of_another_vocabulary(port: Port, checkpoints: Checkpoints, size: int) -> None:
    folder = checkpoints.folder(DESIGN.target)
    found = message(errors.TokenizerMismatch, dflash_fn.load_pair, folder, port=port, tokenizer=Words(size))
    assert found == (
        f"the tokenizer has {size} tokens, the target's vocabulary 48; "
        "give the tokenizer that the target was trained with"
    )


@pytest.mark.parametrize("size", [44, 48])
def test_a_tokenizer_of_a_padded_vocabulary_is_fine(port: Port, checkpoints: Checkpoints, size: int) -> None:
    pair = dflash_fn.load_pair(checkpoints.folder(DESIGN.target), port=port, tokenizer=Words(size))
    assert prefill(pair, "w3 w1").tokens == ((3, 1),)


def test_a_draft_that_brings_another_tokenizer(port: Port, checkpoints: Checkpoints, tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", DESIGN.config, draft_tensors(DESIGN))
    file = draft / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"w0": 0, "w1": 2}}}))
    found = message(
        errors.TokenizerMismatch,
        dflash_fn.load_pair,
        checkpoints.folder(DESIGN.target),
        draft,
        port=port,
        tokenizer=Words(48),
    )
    assert found == f"{file}: gives tokens other ids than the target's tokenizer does"


def test_a_tokenizer_that_cannot_be_read(port: Port, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "target", DESIGN.target.config, target_tensors(DESIGN.target))
    (folder / "tokenizer.json").write_text("{")
    found = message(errors.CheckpointError, dflash_fn.load_pair, folder, port=port)
    assert found.startswith(f"{folder}: its tokenizer cannot be read (")


# --- weight files ---


def spoilt(folder: Path, change: Mapping[str, np.ndarray | None]) -> Path:
    """Write the target with some tensors changed, or left out where the change is None."""
    tensors = {**target_tensors(DESIGN.target), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return write_checkpoint(folder / "target", DESIGN.target.config, kept)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lm_head.weight": None}, "no tensor 'lm_head.weight'; the checkpoint does not fit its config"),
        (
            {"model.layers.1.mlp.up_proj.weight": np.zeros((40, 32), np.float32)},
            "tensor 'model.layers.1.mlp.up_proj.weight' has shape [40, 32]; its config asks for [48, 32]",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)},
            "1 tensors that its config gives no use for, such as model.layers.0.self_attn.q_proj.bias",
        ),
        (
            {"model.layers.2.mlp.up_proj.weight": np.zeros((48, 32), np.float32)},
            "1 tensors that its config gives no use for, such as model.layers.2.mlp.up_proj.weight",
        ),
    ],
    ids=["missing", "shape", "bias", "layer"],
)
def test_tensors_that_do_not_fit_the_config(port: Port, tmp_path: Path, change: Any, expected: str) -> None:
    folder = spoilt(tmp_path, change)
    assert message(errors.CheckpointError, dflash_fn.load_pair, folder, port=port) == f"{folder}: {expected}"


def test_what_old_checkpoints_carry_along_is_ignored(port: Port, tmp_path: Path) -> None:
    spare = np.zeros(4, np.float32)
    folder = spoilt(tmp_path, {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": spare for i in range(2)})
    assert dflash_fn.load_pair(folder, port=port).target.spec.num_layers == 2


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_a_weight_file_that_is_cut_short(port: Port, tmp_path: Path, kept: int) -> None:
    file = spoilt(tmp_path, {}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    found = message(errors.CheckpointError, dflash_fn.load_pair, file.parent, port=port)
    assert found.startswith(f"{file}: not a whole safetensors file (")
    assert found.endswith("); fetch it again")


def test_a_weight_file_of_garbage(port: Port, tmp_path: Path) -> None:
    file = spoilt(tmp_path, {}) / "model.safetensors"
    file.write_bytes(np.random.default_rng(0).bytes(4096))
    assert "not a whole safetensors file" in message(
        errors.CheckpointError, dflash_fn.load_pair, file.parent, port=port
    )


def test_a_folder_without_weights(port: Port, tmp_path: Path) -> None:
    folder = spoilt(tmp_path, {})
    (folder / "model.safetensors").unlink()
    found = message(errors.CheckpointError, dflash_fn.load_pair, folder, port=port)
    assert found == f"{folder}: no *.safetensors file; expected a checkpoint in that format"


def test_a_folder_without_config(port: Port, tmp_path: Path) -> None:
    found = message(errors.CheckpointError, dflash_fn.load_pair, tmp_path, port=port)
    assert found == f"{tmp_path}: no config.json; expected a checkpoint folder"


# --- models that produce nonsense ---


def broken_pair(
    port: Port, folder: Path, token: int, value: float, dtype: str = "float32", max_context: int = 64
) -> Pair:
    """A pair whose target's embedding of one token is `value` throughout."""
    design = replace(DESIGN, target=replace(DESIGN.target, max_context=max_context), max_context=max_context)
    tensors = target_tensors(design.target)
    tensors["model.embed_tokens.weight"][token] = value
    target = write_checkpoint(folder / "target", design.target.config, tensors)
    draft = write_checkpoint(folder / "draft", design.config, draft_tensors(design))
    return dflash_fn.load_pair(target, draft, port=port, dtype=dtype)


def test_overflow_in_half_precision_names_row_step_and_way_out(port: Port, tmp_path: Path) -> None:
    if "float16" not in port.info().dtypes:
        pytest.skip(f"port {port.name} does not run in float16")
    pair = broken_pair(port, tmp_path, 7, 1e5, "float16")
    state = prefill(pair, [[1, 2], [3, 7]])
    assert message(errors.NonFiniteError, dflash_fn.decode, state, pair) == (
        f"row 1, step 0: the target's logits hold NaN or infinity (port {port.name}, float16); "
        "load the pair in bfloat16 or float32"
    )


def test_nan_in_float32_points_at_the_weights(port: Port, tmp_path: Path) -> None:
    pair = broken_pair(port, tmp_path, 7, np.nan)
    assert message(errors.NonFiniteError, dflash_fn.decode, prefill(pair, [7]), pair) == (
        f"row 0, step 0: the target's logits hold NaN or infinity (port {port.name}, float32); check the weights"
    )


def test_nan_in_the_draft_is_no_silent_rejection(port: Port, checkpoints: Checkpoints, tmp_path: Path) -> None:
    tensors = draft_tensors(DESIGN)
    tensors["norm.weight"][:] = np.nan
    draft = write_checkpoint(tmp_path / "draft", DESIGN.config, tensors)
    pair = dflash_fn.load_pair(checkpoints.folder(DESIGN.target), draft, port=port, dtype="float32")
    assert message(errors.NonFiniteError, dflash_fn.decode, prefill(pair, [7]), pair) == (
        f"row 0, step 1: the draft's logits hold NaN or infinity (port {port.name}, float32); check the weights"
    )


def test_a_row_that_has_ended_no_longer_raises(port: Port, tmp_path: Path) -> None:
    pair = broken_pair(port, tmp_path, 7, np.nan)
    state = prefill(pair, [[1, 2], [3, 7]])
    stopped = replace(state, stop=(None, dflash_fn.StopReason.STOP_TOKEN))
    assert len(run(stopped, pair, max_new_tokens=1).emitted[0]) == 1


@pytest.mark.parametrize("bad", [[7] * 20, [1, 2] * 200 + [7] * 20], ids=["short", "long"])
@pytest.mark.parametrize("decoded", [0, 6])
def test_a_state_is_as_good_as_new_after_another_of_its_forks_failed(
    port: Port, tmp_path: Path, decoded: int, bad: list[int]
) -> None:
    pair = broken_pair(port, tmp_path, 7, np.nan, max_context=1024)
    state = run(prefill(pair, [1]), pair, max_new_tokens=decoded).last if decoded else prefill(pair, [1])
    untouched = run(prefill(pair, [1]), pair, max_new_tokens=decoded).last if decoded else prefill(pair, [1])
    before, longer = (
        run(untouched, pair, max_new_tokens=9),
        run(extend(untouched, pair, [2, 3]), pair, max_new_tokens=9),
    )
    message(errors.NonFiniteError, dflash_fn.decode, extend(state, pair, bad), pair)
    gc.collect()  # the failed fork's caches, which the traceback kept, let go of the buffer
    after, extended = run(state, pair, max_new_tokens=9), run(extend(state, pair, [2, 3]), pair, max_new_tokens=9)
    for expected, found in ((before, after), (longer, extended)):
        assert found.emitted == expected.emitted
        assert differing(found.logits[0], expected.logits[0]) == []


def test_rows_are_as_good_as_new_after_the_longer_one_of_a_fork_failed(port: Port, tmp_path: Path) -> None:
    pair = broken_pair(port, tmp_path, 7, np.nan)
    prompts = [[1, 2, 5], [1]]
    before = run(prefill(pair, prompts), pair, max_new_tokens=6).emitted
    state = prefill(pair, prompts)
    message(errors.NonFiniteError, dflash_fn.decode, extend(state, pair, [[2], [7] * 20]), pair)
    gc.collect()
    assert run(state, pair, max_new_tokens=6).emitted == before
    bad = prefill(pair, [[1, 2, 5], [7] * 20])
    message(errors.NonFiniteError, dflash_fn.decode, bad, pair)
    stopped = replace(bad, stop=(None, dflash_fn.StopReason.STOP_TOKEN))
    assert run(stopped, pair, max_new_tokens=6).emitted[0] == before[0]


@pytest.mark.parametrize("block_size", [2, 4])
def test_a_drafted_token_that_breaks_the_target_is_only_rejected(port: Port, tmp_path: Path, block_size: int) -> None:
    pair = broken_pair(port, tmp_path, 7, np.nan)
    expected = run(prefill(pair, [1]), pair, max_new_tokens=8, block_size=1)
    assert 7 not in expected.emitted[0]
    found = run(prefill(pair, [1]), pair, max_new_tokens=8, block_size=block_size, proposer=proposers.constant(7))
    assert found.emitted == expected.emitted
    assert differing(found.logits[0], expected.logits[0]) == []
    assert [info.block_size for info in found.infos] == [1] * 8  # such a block is taken again with nothing drafted
    assert {info.drafted for info in found.infos} == {((),)}


def test_the_limit_of_p01_is_what_verify_says_of_a_block_with_nan(port: Port, tmp_path: Path) -> None:
    """A slot whose keys and values are not finite may spoil earlier slots too; `verify` leaves that to `step`."""
    pair = broken_pair(port, tmp_path, 7, np.nan)
    state = replace(run(prefill(pair, [1]), pair, max_new_tokens=1).last, stop=(None,))
    proposal = dflash_fn.propose(state, pair, proposer=proposers.constant(7))
    branches = dflash_fn.verify(state, pair, proposal)
    assert not np.isfinite(port.to_numpy(branches.logits)[0, 1:4]).any()
    found = message(errors.NonFiniteError, judge, state, pair, dflash_fn.match(), proposal, branches)
    assert found.startswith("row 0, step 1: the target's logits hold NaN or infinity")
    alone = narrowed(proposal, 1)
    assert np.isfinite(port.to_numpy(dflash_fn.verify(state, pair, alone).logits)[0, 0]).all()


def test_an_anchor_that_breaks_the_target_is_an_error_with_and_without_a_draft(port: Port, tmp_path: Path) -> None:
    pair = broken_pair(port, tmp_path, 7, np.nan)
    state = run(prefill(pair, [1]), pair, max_new_tokens=3).last
    broken = replace(state, tokens=((*state.tokens[0][:-1], 7),))
    expected = "row 0, step 3: the target's logits hold NaN or infinity"
    for size in (1, 4):
        found = message(errors.NonFiniteError, dflash_fn.decode, replace(broken, step=3), pair, block_size=size)
        assert found.startswith(expected)


# --- no call leaves anything behind ---


def test_two_pairs_used_in_turn_do_not_disturb_each_other(port: Port, checkpoints: Checkpoints) -> None:
    pairs = [checkpoints.pair(port, replace(DESIGN, taps=taps)) for taps in ((0, 1), (1,))]
    prompts = [[5, 9, 2, 7, 4, 11], [7, 4]]
    alone = [run(prefill(pair, ids), pair, max_new_tokens=12) for pair, ids in zip(pairs, prompts, strict=True)]
    turns = [
        dflash_fn.rounds(prefill(pair, ids), pair, max_new_tokens=12, stop_token_ids=())
        for pair, ids in zip(pairs, prompts, strict=True)
    ]
    together = [[], []]
    for left, right in zip(*turns, strict=False):
        together[0].append(left[1])
        together[1].append(right[1])
    for expected, found in zip(alone, together, strict=True):
        assert [info.drafted for info in found] == [info.drafted for info in expected.infos[: len(found)]]
        assert [info.emitted for info in found] == [info.emitted for info in expected.infos[: len(found)]]


def test_one_pair_in_a_worker_thread_and_another_here(port: Port, checkpoints: Checkpoints) -> None:
    pairs = [checkpoints.pair(port, replace(DESIGN, taps=taps)) for taps in ((0, 1), (1,))]
    expected = [run(prefill(pair, [5, 9, 2]), pair, max_new_tokens=30).emitted for pair in pairs]
    found = {}

    def work(index: int) -> None:
        found[index] = run(prefill(pairs[index], [5, 9, 2]), pairs[index], max_new_tokens=30).emitted

    worker = threading.Thread(target=work, args=(1,))
    worker.start()
    work(0)
    worker.join()
    assert [found[0], found[1]] == expected


def test_an_error_inside_a_policy_leaves_nothing_behind(pair: Pair) -> None:
    def fails(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        if drafted.shape[1]:
            raise RuntimeError("no verdict")
        return dflash_fn.match().rule(xp, drafted, logits, q, uniforms)

    state = run(prefill(pair, [5, 9, 2]), pair, max_new_tokens=3).last
    before, expected = probe(state, pair), run(prefill(pair, [5, 9, 2]), pair, max_new_tokens=12)
    with pytest.raises(RuntimeError, match="no verdict"):
        dflash_fn.decode(state, pair, policy=Policy("fails", fails, lossless=False))
    assert equal_probes(before, probe(state, pair))
    assert run(state, pair, max_new_tokens=9).last.tokens == expected.last.tokens


def test_a_second_prompt_that_is_shorter_than_the_first(pair: Pair) -> None:
    expected = run(prefill(pair, [3, 4]), pair, max_new_tokens=9).emitted
    run(prefill(pair, list(range(40))), pair, max_new_tokens=9)
    assert run(prefill(pair, [3, 4]), pair, max_new_tokens=9).emitted == expected


# --- policies ---


@pytest.mark.parametrize(
    ("count", "token", "expected"),
    [
        (4, 0, "row 0: policy 'careless' accepted 4 of 3 drafted tokens and emits token 0; expected 0 to 3, and an id"),
        (-1, 0, "row 0: policy 'careless' accepted -1 of 3 drafted tokens"),
        (
            0,
            48,
            "row 0: policy 'careless' accepted 0 of 3 drafted tokens and emits token 48; expected 0 to 3, and an id",
        ),
    ],
)
def test_a_verdict_that_cannot_be_is_refused(pair: Pair, count: int, token: int, expected: str) -> None:
    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        nothing = xp.sum(drafted, axis=-1, dtype=drafted.dtype) * 0
        if drafted.shape[1] == 0:  # the opening step, where it behaves
            return Verdict(nothing, nothing)
        return Verdict(nothing + count, nothing + token)

    state = prefill(pair, [3, 4, 5], width=4)
    policy = Policy("careless", rule, lossless=False)
    text = message(
        errors.InputError,
        dflash_fn.decode,
        state,
        pair,
        policy=policy,
        max_new_tokens=8,
        stop_token_ids=(),
        block_size=4,
    )
    assert text.startswith(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tuple", "policy 'odd': its rule returned tuple, expected a Verdict"),
        ("none", "policy 'odd': its rule returned NoneType, expected a Verdict"),
        ("numbers", "policy 'odd': the num_accepted of its verdict is int, expected an array of [1] integers, made by"),
        ("columns", "policy 'odd': the next_token of its verdict is shape [1, 1] and dtype "),
        ("floats", "policy 'odd': the num_accepted of its verdict is shape [1] and dtype "),
    ],
)
def test_what_is_no_verdict_is_named(pair: Pair, kind: str, expected: str) -> None:
    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Any:
        good = dflash_fn.match().rule(xp, drafted, logits, q, uniforms)
        made: dict[str, Any] = {
            "tuple": (good.num_accepted, good.next_token),
            "none": None,
            "numbers": Verdict(0, 0),
            "columns": Verdict(good.num_accepted, good.next_token[:, None]),
            "floats": Verdict(xp.astype(good.num_accepted, xp.float32), good.next_token),
        }
        return made[kind]

    text = message(
        errors.InputError, dflash_fn.decode, prefill(pair, [3, 4]), pair, policy=Policy("odd", rule, lossless=False)
    )
    assert text.startswith(expected)
