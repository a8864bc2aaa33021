"""What is particular to the jax port; what all ports share is in tests/port."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors, policies, zoo
from dflash_fn.records import DecodeState, Pair
from tests.helpers.runs import decode_plainly, run, same
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pytest.importorskip("equinox")

PROMPTS = ["def add(a, b):", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n\ndef main():\n    "]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def pair(checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(dflash_fn.get_port("jax"), DraftDesign())


@contextmanager
def compilations(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Collect the names of what jax compiles meanwhile."""
    found: list[str] = []
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="jax"), jax.log_compiles():
        yield found
    lines = [record.getMessage() for record in caplog.records]
    found += [line.split()[1] for line in lines if line.startswith("Compiling ")]


# 64 bits on demand


def test_float64_is_float64(checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(dflash_fn.get_port("jax"), DraftDesign(), "float64")
    state = dflash_fn.prefill(pair, [1, 2, 3])
    assert pair.target.weights.head.dtype == "float64"
    assert run(state, pair, max_new_tokens=4).logits[0].dtype == np.float64


def test_float64_leaves_jax_as_it_was_and_as_it_is(checkpoints: Checkpoints) -> None:
    """Not only afterwards: a proposer runs in the middle of a decode."""
    pair, seen = checkpoints.pair(dflash_fn.get_port("jax"), DraftDesign(), "float64"), []

    def proposer(state: DecodeState, pair: Pair, size: int) -> Any:
        seen.append(str(jnp.ones(1).dtype))
        return pair.port.asarray(np.zeros((1, size - 1), dtype=np.int64), pair.target.device)

    run(dflash_fn.prefill(pair, [1, 2, 3]), pair, max_new_tokens=4, proposer=proposer)
    assert set(seen) == {"float32"}
    assert jnp.ones(1).dtype == "float32"
    assert not jax.config.jax_enable_x64


def test_float64_ends_with_an_error_too(checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(dflash_fn.get_port("jax"), DraftDesign(), "float64")
    cache = pair.port.new_cache(pair.target, 8)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        pair.port.target_pass(pair.target, cache, np.zeros((0, 4), np.int64), taps=(), head=True, exact_rows=False)
    assert not jax.config.jax_enable_x64


def test_whoever_sets_64_bits_gets_the_same_float32(pair: Pair) -> None:
    plain = run(dflash_fn.prefill(pair, [1, 2, 3]), pair, max_new_tokens=8)
    with jax.enable_x64(True):
        wide = run(dflash_fn.prefill(pair, [1, 2, 3]), pair, max_new_tokens=8)
    assert same(plain.logits[0], wide.logits[0])


def test_float64_policies_compute_in_float64(checkpoints: Checkpoints) -> None:
    """With jax's own arrays outside, all of this would need its 64-bit setting, and change or lose the last digits."""
    pair = checkpoints.pair(dflash_fn.get_port("jax"), DraftDesign(), "float64")
    xp = pair.port.xp
    third = pair.port.asarray(np.array([1 / 3]), pair.target.device)
    assert xp.sum(third * 2 < 2 / 3 + 1e-15, dtype=xp.int64) == 1
    assert pair.port.to_numpy(xp.concat([third, third]))[1] == 1 / 3


# Compilations


def test_a_decode_compiles_a_handful_of_functions_and_the_next_one_none(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    design = DraftDesign(target=TargetDesign(hidden=28, inner=44), inner=36)  # sizes that no other test has
    pair = checkpoints.pair(dflash_fn.get_port("jax"), design)
    with compilations(caplog) as first:
        run(dflash_fn.prefill(pair, [1, 2, 3]), pair, max_new_tokens=8)
    assert first.count("jit(layer_pass)") == 2  # the target's and the draft's
    assert len(first) <= 20, first
    with compilations(caplog) as later:
        for length, width in ((1, 1), (4, 9), (66, 16), (200, 64)):
            state = dflash_fn.prefill(pair, [token % 48 for token in range(length)], width=width)
            run(state, pair, max_new_tokens=8, block_size=min(width, 4))
    assert later == []


def test_twice_the_capacity_costs_one_more_of_each(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    design = DraftDesign(target=TargetDesign(hidden=28, inner=44), inner=36)
    pair = checkpoints.pair(dflash_fn.get_port("jax"), design)
    run(dflash_fn.prefill(pair, [1, 2, 3]), pair, max_new_tokens=8)
    with compilations(caplog) as found:
        run(dflash_fn.prefill(pair, [1, 2, 3] * 180), pair, max_new_tokens=8)
        run(dflash_fn.prefill(pair, [1, 2, 3] * 280), pair, max_new_tokens=8)
    assert found.count("jit(layer_pass)") == 2
    assert len(found) <= 6


# Bits: more than the contract asks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_bits_depend_on_no_shape_at_all(checkpoints: Checkpoints, dtype: str) -> None:
    """Tokens are computed one by one: width, block size, prefill chunks, capacity and rows change nothing."""
    pair = checkpoints.pair(dflash_fn.get_port("jax"), DraftDesign(), dtype)
    prompt = np.random.default_rng(3).integers(0, 48, 505).tolist()
    known = decode_plainly(dflash_fn.prefill(pair, prompt, width=1), pair, 12)
    for width in (3, 8, 16):
        tried = run(dflash_fn.prefill(pair, prompt, width=width), pair, max_new_tokens=12, block_size=min(width, 4))
        assert tried.emitted == known.emitted
        assert same(tried.logits[0], known.logits[0])
    rows = decode_plainly(dflash_fn.prefill(pair, [prompt[:7], prompt], width=2), pair, 12)
    assert same(rows.logits[1], known.logits[0])
    small = pair.port.prefill_width // 4
    narrow = replace(pair, port=replace(pair.port, prefill_width=small))  # pyright: ignore[reportArgumentType]
    assert same(decode_plainly(dflash_fn.prefill(narrow, prompt, width=1), narrow, 12).logits[0], known.logits[0])


def test_slots_beyond_the_length_may_hold_anything(pair: Pair) -> None:
    tokens = np.arange(5)[None]
    empty = pair.port.new_cache(pair.target, 8)
    poisoned = tuple(
        replace(row, held=tuple(replace(one, keys=one.keys * np.nan, values=one.values * np.nan) for one in row.held))
        for row in empty
    )
    made: list[Any] = [
        pair.port.target_pass(pair.target, cache, tokens, taps=(), head=True, exact_rows=False).logits
        for cache in (empty, poisoned)
    ]
    assert np.isfinite(made[0]).all()
    assert same(*made)


# Against torch


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_zoo_pair_decodes_as_it_does_on_torch(prompt: str) -> None:
    pytest.importorskip("torch")
    runs = []
    for port in ("jax", "torch"):
        pair = dflash_fn.load_zoo("tiny-code", port=port, dtype="float32")
        runs.append(run(dflash_fn.prefill(pair, prompt), pair, max_new_tokens=48))
    assert runs[0].emitted == runs[1].emitted
    assert runs[0].accepted() == runs[1].accepted()


def broken_folder(tmp_path: Path, how: str) -> Path:
    folder = tmp_path / how
    shutil.copytree(zoo.fetch("tiny-code").target, folder)
    config = json.loads((folder / "config.json").read_text())
    if how == "no file":
        (folder / "model.safetensors").unlink()
    elif how == "cut":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    else:
        config |= {
            "superfluous": {"num_hidden_layers": 5, "layer_types": config["layer_types"][:5]},
            "missing": {"num_hidden_layers": 7, "layer_types": config["layer_types"] + config["layer_types"][:1]},
            "shape": {"intermediate_size": 500},
        }[how]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("how", ["no file", "cut", "superfluous", "missing", "shape"])
def test_a_broken_checkpoint_is_the_same_error_as_on_torch(tmp_path: Path, how: str) -> None:
    pytest.importorskip("torch")
    folder, said = broken_folder(tmp_path, how), []
    for port in ("jax", "torch"):
        with pytest.raises(errors.CheckpointError) as caught:
            dflash_fn.load_pair(folder, port=port)
        said.append(str(caught.value))
    assert said[0] == said[1]


# The rest


@pytest.mark.parametrize(("option", "value"), [("dtype", "int8"), ("device", "tpu:7")])
def test_unknown_options_are_errors_that_list_the_known_ones(checkpoints: Checkpoints, option: str, value: str) -> None:
    known = {"dtype": "float32, bfloat16, float16, float64", "device": "cpu"}[option]
    options: dict[str, Any] = {option: value}
    with pytest.raises(errors.InputError, match=f"port jax .*'{value}'.*: {known}"):
        dflash_fn.load_pair(checkpoints.folder(TargetDesign()), port="jax", **options)


def test_no_object_is_claimed(pair: Pair) -> None:
    assert not pair.port.claims(pair.target.weights)
    assert not pair.port.claims(object())


def test_own_copies() -> None:
    from dflash_fn_jax.ops import own

    values = np.zeros(64, np.float32)
    array = own(values)
    values += 1
    assert not np.asarray(array).any()


def test_the_match_rule_runs_on_jax_arrays_too() -> None:
    """The port's namespace is numpy's; policies are held to jax's as well, which changes nothing in place."""
    rng = np.random.default_rng(0)
    logits, drafted = rng.normal(size=(6, 4, 3)).astype(np.float32), rng.integers(0, 3, (6, 3)).astype(np.int32)
    theirs = policies.match().rule(jnp, jnp.asarray(drafted), jnp.asarray(logits), None, {})
    ours = policies.match().rule(np, drafted, logits, None, {})
    assert np.array_equal(theirs.num_accepted, ours.num_accepted)
    assert np.array_equal(theirs.next_token, ours.next_token)
