"""Tensor parallel: several real processes by gloo, against one process, and against themselves without a draft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import dflash_fn
from dflash_fn import errors, tolerances
from dflash_fn.cli.commands import app
from dflash_fn.cli.processes import first_speaks
from dflash_fn.records import Pair
from tests.helpers.runs import run
from tests.helpers.tiny import DraftDesign, TargetDesign, draft_tensors, target_tensors, write_checkpoint

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

from tests.helpers.share_worker import CASES, PROMPTS, TOKENS, WAYS, folders  # noqa: E402 (needs torch.distributed)

ROOT = Path(__file__).resolve().parents[1]
ODD = DraftDesign(TargetDesign(heads=3, kv_heads=3, inner=33), heads=3, kv_heads=3)


@dataclass(frozen=True)
class Shared:
    """What the processes of one run said, in the order of their ranks."""

    root: Path
    said: list[dict[str, Any]]
    logits: list[dict[str, np.ndarray]]


def write_pair(root: Path, name: str, design: DraftDesign) -> None:
    target, draft = folders(root, name)
    write_checkpoint(target, design.target.config, target_tensors(design.target))
    write_checkpoint(draft, design.config, draft_tensors(design))


def single(root: Path, name: str) -> Pair:
    return dflash_fn.load_pair(*folders(root, name), dtype=CASES[name].dtype)


def paths() -> dict[str, str]:
    found = os.pathsep.join([str(ROOT), str(ROOT / "ports"), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": found}


def started(root: Path, count: int) -> Shared:
    environment = {**os.environ, **paths(), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-W", "error", "-m", "tests.helpers.share_worker", str(root)]
    processes = [
        subprocess.Popen([*line, str(rank), str(count)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    try:
        for process in processes:
            _, complaints = process.communicate(timeout=200)
            assert process.returncode == 0, complaints
    finally:
        for process in processes:
            process.kill()
    said = [json.loads((root / f"said-{count}-{rank}.json").read_text()) for rank in range(count)]
    return Shared(root, said, [dict(np.load(root / f"logits-{count}-{rank}.npz")) for rank in range(count)])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all cases, and of each a state that one process saved."""
    root = tmp_path_factory.mktemp("shares")
    write_pair(root, "odd", ODD)
    for name, case in CASES.items():
        write_pair(root, name, case.design)
        pair = single(root, name)
        state = dflash_fn.decode(dflash_fn.prefill(pair, PROMPTS["rows"]), pair, max_new_tokens=5, stop_token_ids=())
        dflash_fn.save_state(root / f"{name}-single.state", state, pair)
    return root


@pytest.fixture(scope="module")
def two(root: Path) -> Shared:
    return started(root, 2)


@pytest.fixture(scope="module")
def four(root: Path) -> Shared:
    return started(root, 4)


def check_contract(shared: Shared, name: str) -> None:
    for said in shared.said:
        for key in PROMPTS:
            assert said[name][key]["same"] == dict.fromkeys(WAYS[key], True), (name, key)


def check_ranks(shared: Shared, name: str) -> None:
    first, *others = shared.said
    for said, logits in zip(others, shared.logits[1:], strict=True):
        assert {**said[name], "layout": ""} == {**first[name], "layout": ""}
        for key, values in logits.items():
            assert values.tobytes() == shared.logits[0][key].tobytes(), key


def check_one_process(shared: Shared, name: str) -> None:
    pair, spec = single(shared.root, name), single(shared.root, name).target.spec
    within = tolerances.bound(CASES[name].dtype, "logits", spec)
    for key, prompt in PROMPTS.items():
        made = run(dflash_fn.prefill(pair, prompt), pair, max_new_tokens=TOKENS)
        assert [tuple(row) for row in shared.said[0][name][key]["emitted"]] == list(made.emitted), key
        for row, logits in enumerate(made.logits):
            theirs = shared.logits[0][f"{name}.{key}.{row}"]
            assert np.all(np.abs(theirs - logits).max(-1) <= within * np.abs(logits).max(-1)), (key, row)


@pytest.mark.parametrize("name", CASES)
def test_p01_with_and_without_a_draft_in_two_processes(two: Shared, name: str) -> None:
    """P01: tokens and the bits of logits do not depend on the proposals, in models that two processes share too."""
    check_contract(two, name)


@pytest.mark.parametrize("name", CASES)
def test_both_processes_hold_the_same_bits(two: Shared, name: str) -> None:
    check_ranks(two, name)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == "float32"])
def test_two_processes_say_what_one_says(two: Shared, name: str) -> None:
    check_one_process(two, name)


def test_caches_and_heads_are_shares(two: Shared) -> None:
    for rank, said in enumerate(two.said):
        assert said["llama"]["layout"] == f"share {rank + 1} of 2"
        assert said["llama"]["heads"] == [[2], 24]
        assert said["hybrid"]["heads"] == [[1], 24]
        assert said["qwen3"]["heads"] == [[1], 37]  # an odd vocabulary is held by each


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == "float32"])
def test_states_move_between_one_process_and_two(two: Shared, name: str) -> None:
    pair, said = single(two.root, name), two.said[0][name]
    assert said["resumed_alike"]
    moved = dflash_fn.load_state(two.root / f"{name}-shared.state", pair)
    here = run(moved, pair, max_new_tokens=8).emitted
    again = run(dflash_fn.load_state(two.root / f"{name}-single.state", pair), pair, max_new_tokens=8).emitted
    assert [tuple(row) for row in said["resumed"]] == [tuple(row) for row in said["moved"]] == list(here) == list(again)


def test_what_cannot_be_shared_is_refused(two: Shared) -> None:
    expected = {
        "type": "mesh: got an object of type str, expected a torch DeviceMesh, or a number of processes",
        "number": "tensor parallel: asked for 3 processes, and this is one of 2; "
        "start 3 of them: torchrun --nproc-per-node 3 ...",
        "shape": "mesh: got one of shape [1, 2] among 2 processes; every process is to hold one share, "
        "give init_device_mesh('cpu', (2,))",
        "target": "target: 2 processes cannot share its 3 key and value heads equally; "
        "numbers of processes that can share all of it: 1, 3",
        "draft": "draft: 2 processes cannot share its 3 key and value heads equally; "
        "numbers of processes that can share all of it: 1",
        "device": "device and mesh exclude each other; mesh says where the weights go",
        "both": "device_map and mesh exclude each other; a mesh has a device for each process",
        "state": "state: was made with layout whole, and this pair has layout share 1 of 2; use the pair that it was "
        "made with, or carry it over by save_state and load_state, or prefill again",
    }
    assert two.said[0]["refused"] == expected


def test_a_model_in_memory_is_shared_as_its_folder_is(two: Shared) -> None:
    for said in two.said:
        assert said["memory"] == said["llama"]["short"]["emitted"]


def test_generate_under_torchrun_speaks_once_and_says_what_one_process_says() -> None:
    question = ["generate", "def add(a, b):", "--max-new-tokens", "12", "--json"]
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dflash_fn"]
    shared = spoken([*line, *question, "--tensor-parallel", "2", "--check"])
    check = shared.pop("check")
    assert (check["tokens_identical"], check["logits_identical"]) == (True, True)
    alone = json.loads(CliRunner().invoke(app, question).stdout)
    assert {key: shared[key] for key in shared if not key.endswith("_s")} == {
        key: alone[key] for key in alone if not key.endswith("_s")
    }


def spoken(line: list[str]) -> dict[str, Any]:
    environment = {**os.environ, **paths(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_processes_but_the_first_are_silent_and_end_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, heard in (("0", "said\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        ended = end_in_an_error()
        assert capsys.readouterr() == (heard, "")
        if rank == "1":
            assert ended == 2  # as the first process ends, where the error is told


def end_in_an_error() -> int | None:
    try:
        with first_speaks(2):
            typer.echo("said")
            raise errors.InputError("no")
    except errors.InputError:
        return None
    except typer.Exit as ended:
        return ended.exit_code


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--tensor-parallel", "2", "--device-map", "auto"],
            "error: --device-map and --tensor-parallel exclude each other; each says where the weights go",
        ),
        (["--tensor-parallel", "0"], "error: --tensor-parallel: got 0, expected 1 or more"),
        (
            ["--tensor-parallel", "2", "--block-size", "auto"],
            "error: --tensor-parallel: several processes time a step differently; give --block-size a number",
        ),
        (
            ["--tensor-parallel", "2", "--chat"],
            "error: --tensor-parallel: several processes cannot read one stdin; give the prompt on the command line",
        ),
        (["--port", "mlx", "--device-map", "auto"], "error: port mlx keeps a model on one device; device_map and mesh"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(flags: list[str], message: str) -> None:
    if "mlx" in flags:
        pytest.importorskip("mlx.core")
    prompt = [] if "--chat" in flags else ["it"]
    result = CliRunner().invoke(app, ["generate", *prompt, *flags])
    assert result.exit_code == 2
    assert result.stderr.startswith(message)


@pytest.mark.slow
def test_p01_in_four_processes(four: Shared) -> None:
    """P01: from three processes on, a ring's all-reduce adds in another order in each part of a message."""
    check_contract(four, "llama")
    check_ranks(four, "llama")
    check_one_process(four, "llama")
