"""The command that serves a pair, and pairs that no command is given for."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_fn import errors, sources, zoo
from dflash_fn.cli.commands import app
from dflash_fn.serving import serve_command, shell_lines
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def pair():
    return zoo.fetch("tiny-code")


def run(*arguments: object):
    return CliRunner().invoke(app, ["serve-command", *map(str, arguments)])


def test_vllm(pair):
    done = run("vllm", "--target", pair.target, "--draft", pair.draft, "--port", 8001)
    assert done.exit_code == 0, done.output
    lines = done.stdout.split(" \\\n  ")
    assert lines[0] == f"vllm serve {pair.target}"
    assert lines[1] == "--dtype bfloat16"
    option, value = shlex.split(lines[2])
    assert option == "--speculative-config"
    assert json.loads(value) == {"method": "dflash", "model": str(pair.draft), "num_speculative_tokens": 7}
    assert lines[3:] == ["--per-request-spec-decode-metrics detailed", "--port 8001\n"]


def test_sglang(pair):
    done = run(
        "sglang", "--target", pair.target, "--draft", pair.draft, "--block-size", 4, "--dtype", "float16", "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["command"] == [
        "python", "-m", "sglang.launch_server",
        "--model-path", str(pair.target),
        "--dtype", "float16",
        "--speculative-algorithm", "DFLASH",
        "--speculative-draft-model-path", str(pair.draft),
        "--speculative-num-draft-tokens", "4",
    ]  # fmt: skip
    assert (found["server"], found["block_size"], found["dtype"]) == ("sglang", 4, "float16")
    assert found["notes"][0].startswith("the draft was saved in ")


def test_a_shell_reads_the_words_back(pair):
    made = serve_command("vllm", pair.target, pair.draft, host="::1")
    assert made.words[-2:] == ["--host", "::1"]
    odd = [("vllm", "serve", "my model's"), ("--speculative-config", '{"model": "a b", "n": "$HOME"}')]
    for command in (made.command, odd):
        told = subprocess.run(["sh", "-c", f"printf '%s\\n' {shell_lines(command)}"], capture_output=True, text=True)
        assert told.stdout.splitlines() == [word for entry in command for word in entry]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tgi"], "server: got 'tgi', expected one of: vllm, sglang"),
        (["vllm", "--block-size", "9"], "block size: got 9, expected 2 to 8, for which the draft was trained"),
        (["vllm", "--block-size", "1"], "block size: got 1, expected 2 to 8"),
        (["vllm", "--port", "99999"], "port: got 99999, expected 1 to 65535"),
        (["sglang", "--port", "-1"], "port: got -1, expected 1 to 65535"),
        (["vllm", "--dtype", "int8"], "dtype: got 'int8', expected one of: float32, bfloat16, float16"),
    ],
)
def test_bad_input(pair, arguments, message):
    done = run(*arguments, "--target", pair.target, "--draft", pair.draft)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {message}")


def test_no_pair(pair):
    for arguments in (["--target", pair.target], ["--draft", pair.draft]):
        done = run("vllm", *arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith("error: serve-command needs a pair: give --target and --draft")


def test_a_draft_given_as_target(pair):
    with pytest.raises(errors.UnsupportedModel):
        serve_command("vllm", pair.draft, pair.draft)
    with pytest.raises(errors.UnsupportedModel, match="this config is a target, not a draft"):
        serve_command("vllm", pair.target, pair.target)


def changed(folder: Path, to: Path, **values: object) -> Path:
    """Copy a checkpoint without its weights, with other values in its config."""
    to.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json":
            (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    for key, value in values.items():
        (config["dflash_config"] if key in config.get("dflash_config", {}) else config)[key] = value
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"hidden_size": 512}, errors.HiddenSizeMismatch),
        ({"vocab_size": 4096}, errors.VocabularyMismatch),
        ({"num_target_layers": 9}, errors.TargetLayersMismatch),
    ],
)
def test_drafts_of_other_targets(pair, tmp_path, values, error):
    with pytest.raises(error):
        serve_command("vllm", pair.target, changed(pair.draft, tmp_path / "draft", **values))


def test_weights_are_not_read(pair, tmp_path):
    target, draft = changed(pair.target, tmp_path / "target"), changed(pair.draft, tmp_path / "draft")
    assert not list(tmp_path.rglob("*.safetensors"))
    assert serve_command("sglang", target, draft).block_size == 8


def test_tokenizers(pair, tmp_path):
    target = changed(pair.target, tmp_path / "target")
    for file in target.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(errors.InputError, match="there is no tokenizer in it, which a server needs"):
        serve_command("vllm", target, pair.draft)
    draft = changed(pair.draft, tmp_path / "draft")
    words = json.loads((pair.target / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(errors.TokenizerMismatch, match="gives tokens other ids"):
        serve_command("vllm", pair.target, draft)


def test_quantized_targets(pair, tmp_path):
    mlx = changed(pair.target, tmp_path / "mlx", quantization={"bits": 4, "group_size": 64})
    with pytest.raises(errors.UnsupportedModel, match="mlx's own format, which neither server reads"):
        serve_command("vllm", mlx, pair.draft)
    awq = changed(pair.target, tmp_path / "awq", quantization_config={"quant_method": "awq", "bits": 4})
    assert serve_command("vllm", awq, pair.draft).dtype == "auto"


def test_a_shorter_draft_is_noted(pair, tmp_path):
    draft = changed(pair.draft, tmp_path / "draft", max_position_embeddings=512)
    done = run("vllm", "--target", pair.target, "--draft", draft)
    assert done.exit_code == 0
    assert "note: the draft was made for 512 positions, the target for 2048; expect less" in done.stderr


def test_hub_ids_need_their_configs_alone(pair, monkeypatch):
    wanted = []

    def cached(name, revision, allow_patterns):
        wanted.append(allow_patterns)
        return str(pair.target if name == "me/target" else pair.draft)

    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    made = serve_command("vllm", "me/target", "me/draft")
    assert made.words[:3] == ["vllm", "serve", "me/target"]
    assert json.loads(made.words[6])["model"] == "me/draft"
    assert all("*.json" in patterns and "*.safetensors" not in patterns for patterns in wanted)
    sources.resolve("me/target", role="target")
    assert "*.safetensors" in wanted[-1]


def test_hub_ids_that_cannot_be_had(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def absent(name, revision, allow_patterns):
        raise LocalEntryNotFoundError("no")

    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    with pytest.raises(errors.DownloadError, match="target: 'me/target' is not in the cache and the hub cannot be"):
        serve_command("vllm", "me/target", "me/draft")


def test_hybrids(tmp_path):
    made = Checkpoints(tmp_path)
    target = TargetDesign(family="qwen3_5")
    folders = made.folder(target), made.folder(DraftDesign(target))
    with pytest.raises(errors.InputError, match="there is no tokenizer in it"):  # all else fits
        serve_command("sglang", *folders)
    with pytest.raises(errors.TargetLayersMismatch):
        serve_command("sglang", made.folder(replace(target, layers=4)), folders[1])
