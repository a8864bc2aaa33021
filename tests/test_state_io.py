"""States in files: what is loaded goes on bit for bit as what was saved would have, and bad files are named errors."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from safetensors.numpy import save_file

import dflash_fn
from dflash_fn import container, errors
from dflash_fn.container import Bits
from dflash_fn.records import DecodeState, Pair, StopReason
from tests.helpers.fixtures import checkpoints
from tests.helpers.runs import equal_probes, probe, run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, without_draft

__all__ = ["checkpoints"]

DESIGN = DraftDesign(target=TargetDesign(layers=3), seed=107, taps=(0, 2, 1))
QWEN3 = DraftDesign(target=TargetDesign(seed=20, family="qwen3", window=4), window=3, rope="yarn", taps=(1, 0))
DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = [[7, 11, 5, 30, 2], [9] * 12, [1]]


@pytest.fixture(scope="module")
def pair(checkpoints: Checkpoints) -> Pair:
    return checkpoints.pair(dflash_fn.get_port("torch"), DESIGN)


@pytest.fixture
def saved(pair: Pair, tmp_path: Path) -> Path:
    """A good file."""
    state = run(dflash_fn.prefill(pair, PROMPTS, width=6), pair, max_new_tokens=3).last
    dflash_fn.save_state(tmp_path / "state", state, pair)
    return tmp_path / "state"


def ids_of(count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, 48, count).tolist()


def again(state: DecodeState, pair: Pair, folder: Path, loader: Pair | None = None) -> DecodeState:
    dflash_fn.save_state(folder / "state", state, pair)
    return dflash_fn.load_state(folder / "state", loader or pair)


def check_same(left: DecodeState, right: DecodeState, pair: Pair, other: Pair | None = None) -> None:
    """Compare two states, and everything that can be seen to follow from them; the right one may have another pair."""
    sides = [(left, pair), (right, other or pair)]
    for name in ("tokens", "step", "seed", "stop", "width", "exact_rows"):
        assert getattr(left, name) == getattr(right, name)
    pending = [state.context_features.counts if state.context_features else None for state in (left, right)]
    assert pending[0] == pending[1]
    assert equal_probes(*(probe(*side) for side in sides))
    runs = [run(*side, max_new_tokens=9) for side in sides]
    assert runs[0].emitted == runs[1].emitted
    assert [info.drafted for info in runs[0].infos] == [info.drafted for info in runs[1].infos]
    assert equal_probes(runs[0].logits, runs[1].logits)


# round trips


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("design", [DESIGN, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("generated", [0, 1, 7])
def test_what_is_loaded_is_what_was_saved(
    checkpoints: Checkpoints, design: DraftDesign, dtype: str, generated: int, tmp_path: Path
) -> None:
    pair = checkpoints.pair(dflash_fn.get_port("torch"), design, dtype)
    state = dflash_fn.prefill(pair, PROMPTS, width=6, seed=[1, 2**64 - 1, 0])
    state = run(state, pair, max_new_tokens=generated).last
    assert (state.context_features is None) == (generated == 0)
    check_same(state, again(state, pair, tmp_path), pair)


@pytest.mark.parametrize("first", [1, 9, 255, 256, 257, 300])
@pytest.mark.parametrize("generated", [0, 6])
def test_extending_after_loading_is_extending_before_saving(
    pair: Pair, first: int, generated: int, tmp_path: Path
) -> None:
    state = run(dflash_fn.prefill(pair, ids_of(first), width=6), pair, max_new_tokens=generated).last
    loaded = again(state, pair, tmp_path)
    left, right = (dflash_fn.extend(one, pair, ids_of(20)) for one in (state, loaded))
    check_same(left, right, pair)
    check_same(left, again(left, pair, tmp_path), pair)


def test_rows_that_stopped_and_rows_as_if_alone(pair: Pair, tmp_path: Path) -> None:
    state = dflash_fn.prefill(pair, PROMPTS, width=5, exact_rows=True)
    state = run(state, pair, max_new_tokens=8, stop_token_ids=(4,)).last
    assert set(state.stop) == {StopReason.STOP_TOKEN, StopReason.MAX_NEW_TOKENS}
    check_same(state, again(state, pair, tmp_path), pair)


def test_without_a_draft(pair: Pair, tmp_path: Path) -> None:
    lone = without_draft(pair)
    state = run(dflash_fn.prefill(lone, PROMPTS, width=4), lone, max_new_tokens=4).last
    check_same(state, again(state, lone, tmp_path), lone)


def test_a_model_in_memory_is_the_same_pair_as_its_folder(checkpoints: Checkpoints, pair: Pair, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = checkpoints.folder(DESIGN.target)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    other = dflash_fn.load_pair(model, checkpoints.folder(DESIGN))
    state = run(dflash_fn.prefill(pair, PROMPTS), pair, max_new_tokens=4).last
    check_same(state, again(state, pair, tmp_path, other), pair, other)


def test_a_copy_of_the_checkpoint_is_the_same_pair(checkpoints: Checkpoints, pair: Pair, tmp_path: Path) -> None:
    elsewhere = Checkpoints(tmp_path / "elsewhere").pair(pair.port, DESIGN)
    state = run(dflash_fn.prefill(pair, PROMPTS), pair, max_new_tokens=4).last
    check_same(state, again(state, pair, tmp_path, elsewhere), pair, elsewhere)


def test_saving_leaves_the_state_alone(pair: Pair, tmp_path: Path) -> None:
    state = run(dflash_fn.prefill(pair, PROMPTS), pair, max_new_tokens=4).last
    before = probe(state, pair)
    again(state, pair, tmp_path)
    assert equal_probes(before, probe(state, pair))


def test_a_file_is_replaced(pair: Pair, saved: Path) -> None:
    state = dflash_fn.prefill(pair, [4, 5], width=4)
    dflash_fn.save_state(saved, state, pair)
    check_same(state, dflash_fn.load_state(saved, pair), pair)
    assert [path.name for path in saved.parent.iterdir()] == ["state"]


@pytest.mark.skipif(os.name == "nt", reason="there are no named pipes in the file system")
def test_what_is_no_file_is_never_replaced(saved: Path, pair: Pair, tmp_path: Path) -> None:
    """As root, a file moved onto /dev/null would take its place for all of the machine."""
    state, pipe = dflash_fn.load_state(saved, pair), tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(errors.CacheFolderError, match="pipe: is a device or a pipe, which cannot be replaced; give"):
        dflash_fn.save_state(pipe, state, pair)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_is_followed(saved: Path, pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, place = tmp_path / "link", tmp_path / "elsewhere" / "state"
    link.symlink_to(place)
    state = dflash_fn.load_state(saved, pair)
    dflash_fn.save_state(link, state, pair)
    assert link.is_symlink()
    assert dflash_fn.load_state(place, pair).tokens == state.tokens


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_file_has_the_mode_of_any_other_file(pair: Pair, tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        dflash_fn.save_state(tmp_path / "state", dflash_fn.prefill(pair, [4, 5]), pair)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == mode


def test_arguments_in_another_order(pair: Pair, tmp_path: Path) -> None:
    state, file = dflash_fn.prefill(pair, [4, 5]), tmp_path / "state"
    order, kept = "expected the path of a file; the arguments are", "as load_pair returns it"
    swapped = (
        "state: got an object of type Pair, expected a DecodeState, as prefill returns it; state and pair are swapped"
    )
    asked: list[tuple[Any, tuple[Any, ...], str]] = [
        (dflash_fn.save_state, (state, pair, file), f"path: got DecodeState, {order} (path, state, pair)"),
        (dflash_fn.save_state, (file, pair, state), swapped),
        (dflash_fn.save_state, ("", state, pair), f"path: got '', {order} (path, state, pair)"),
        (dflash_fn.load_state, (pair, file), f"path: got Pair, {order} (path, pair)"),
        (dflash_fn.load_state, (file, state), f"pair: got an object of type DecodeState, expected a Pair, {kept}"),
    ]
    for act, arguments, expected in asked:
        with pytest.raises(errors.InputError) as caught:
            act(*arguments)
        assert str(caught.value) == expected
    assert not file.exists()


# the wrong file


def refused(path: Path, pair: Pair) -> str:
    """Load a file that cannot be; return the message, less the path that it begins with."""
    with pytest.raises(errors.StateFileError) as caught:
        dflash_fn.load_state(path, pair)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_another_pair(checkpoints: Checkpoints, pair: Pair, saved: Path) -> None:
    other = checkpoints.pair(pair.port, replace(DESIGN, target=replace(DESIGN.target, seed=18)))
    text = refused(saved, other)
    assert text.startswith(f"was saved with another target (pair {pair.name!r}, target digest ")
    other = checkpoints.pair(pair.port, replace(DESIGN, seed=1))
    assert refused(saved, other).startswith(f"was saved with another draft (pair {pair.name!r}, draft digest ")
    assert "this pair's is None" in refused(saved, without_draft(pair))


def test_another_dtype(checkpoints: Checkpoints, pair: Pair, saved: Path) -> None:
    other = checkpoints.pair(pair.port, DESIGN, "bfloat16")
    assert refused(saved, other) == (
        "was saved in float32, the pair is loaded in bfloat16; load it with dtype='float32'"
    )


def test_no_file(pair: Pair, tmp_path: Path) -> None:
    assert refused(tmp_path / "none", pair) == "no such file"
    assert refused(tmp_path, pair).startswith("not a whole file that dflash_fn wrote (")


def test_a_file_of_something_else(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_file({"a": np.zeros(3, dtype=np.float32)}, path)
    assert refused(path, pair) == "a safetensors file, but not one that dflash_fn wrote"
    save_file({"a": np.zeros(3, dtype=np.float32)}, path, metadata={"dflash_fn": "{"})
    assert refused(path, pair) == "a safetensors file, but not one that dflash_fn wrote"
    container.write(path, "trace", {}, {"a": Bits("float32", np.zeros(1, dtype=np.float32))})
    assert refused(path, pair) == "holds a trace, expected a state"
    path.write_text("hello")
    assert refused(path, pair).startswith("not a whole file that dflash_fn wrote (")
    path.write_bytes(b"")
    assert refused(path, pair).startswith("not a whole file that dflash_fn wrote (")


def test_a_newer_file(pair: Pair, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(container, "VERSION", 7)
        dflash_fn.save_state(saved, dflash_fn.prefill(pair, [1]), pair)
    assert refused(saved, pair) == "was written in format 7; this version of dflash_fn reads up to 1"


# damaged files


def test_a_file_that_was_cut_anywhere(pair: Pair, saved: Path) -> None:
    whole = saved.read_bytes()
    for end in [0, 1, 7, 8, 9, *random.Random(0).sample(range(len(whole)), 40)]:
        saved.write_bytes(whole[:end])
        assert refused(saved, pair).startswith("not a whole file that dflash_fn wrote (")
    saved.write_bytes(whole + b"\0")
    assert refused(saved, pair).startswith("not a whole file that dflash_fn wrote (")


def keys_of_the_header(whole: bytes) -> set[int]:
    """Return where the names of the two fields stand that are read before the digest is compared."""
    places = [(whole.index(name), len(name)) for name in (b"kind", b"version")]
    return {start + i for start, length in places for i in range(length)}


@pytest.mark.parametrize("seed", range(3))
def test_one_bit_of_the_header_that_flipped(pair: Pair, saved: Path, seed: int) -> None:
    whole, rng = saved.read_bytes(), random.Random(seed)
    places = sorted(set(range(8 + int.from_bytes(whole[:8], "little"))) - keys_of_the_header(whole))
    for place in rng.sample(places, 60):
        saved.write_bytes(flipped(whole, place, rng.randrange(8)))
        assert refused(saved, pair)


@pytest.mark.parametrize("name", [b"kind", b"version"])
def test_one_bit_of_the_names_of_kind_and_version_that_flipped(pair: Pair, saved: Path, name: bytes) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(flipped(whole, whole.index(name), 0))
    assert refused(saved, pair)


def test_one_bit_of_the_data_that_flipped(pair: Pair, saved: Path) -> None:
    whole, rng = saved.read_bytes(), random.Random(0)
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in [start, len(whole) - 1, *rng.sample(range(start, len(whole)), 60)]:
        saved.write_bytes(flipped(whole, place, rng.randrange(8)))
        assert refused(saved, pair) == "was changed after it was written; its digest does not match"


def flipped(whole: bytes, place: int, bit: int) -> bytes:
    return whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]


def test_a_header_that_was_edited_by_hand(pair: Pair, saved: Path) -> None:
    whole = saved.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"]["dflash_fn"] = header["__metadata__"]["dflash_fn"].replace('"step": ', '"step": 1')
    text = json.dumps(header).encode()
    saved.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    assert refused(saved, pair) == "was changed after it was written; its digest does not match"


# files that cannot be written


def cannot_be_written(path: Path, pair: Pair) -> str:
    with pytest.raises(errors.CacheFolderError) as caught:
        dflash_fn.save_state(path, dflash_fn.prefill(pair, [1]), pair)
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot be written (")
    return message.removeprefix(f"{path}: cannot be written (")


def test_a_folder_that_is_not_there(pair: Pair, tmp_path: Path) -> None:
    assert cannot_be_written(tmp_path / "none" / "state", pair) == "No such file or directory)"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="this user may write everywhere")
def test_a_folder_that_is_read_only(pair: Pair, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert cannot_be_written(tmp_path / "state", pair) == "Permission denied)"
    tmp_path.chmod(0o700)


def fails(number: int) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full(pair: Pair, saved: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    whole = saved.read_bytes()
    owner = os if call == "fsync" else Path
    with monkeypatch.context() as patched:
        patched.setattr(owner, call, fails(28))
        assert cannot_be_written(saved, pair) == "No space left on device)"
    assert [path.name for path in saved.parent.iterdir()] == ["state"]
    assert saved.read_bytes() == whole


def test_ctrl_c_while_writing(pair: Pair, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*args: Any) -> None:
        raise KeyboardInterrupt

    whole = saved.read_bytes()
    monkeypatch.setattr(os, "fsync", pressed)
    with pytest.raises(KeyboardInterrupt):
        dflash_fn.save_state(saved, dflash_fn.prefill(pair, [1]), pair)
    assert [path.name for path in saved.parent.iterdir()] == ["state"]
    assert saved.read_bytes() == whole


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from dflash_fn import container
def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)
os.fsync = kill
container.write(Path(sys.argv[1]), "state", {}, {"a": container.Bits("float32", np.zeros(9, dtype=np.float32))})
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is another thing there")
def test_a_process_that_is_killed_while_writing_leaves_the_old_file(pair: Pair, saved: Path) -> None:
    whole = saved.read_bytes()
    done = subprocess.run([sys.executable, "-c", KILLED, str(saved)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert saved.read_bytes() == whole
    assert dflash_fn.load_state(saved, pair).tokens
