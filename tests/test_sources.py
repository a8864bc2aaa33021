"""Folders and hub ids: what is read of them, and what is said when there is nothing to read."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_fn import errors, zoo
from dflash_fn.sources import looks_like_hub_id, read_config, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK = """
import json, sys
from dflash_fn import errors
from dflash_fn.sources import resolve
for name, revision in json.loads(sys.argv[1]):
    try:
        source = resolve(name, role="target", revision=revision)
        print(json.dumps([source.name, source.config, source.folder.name]))
    except errors.DflashError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def message(kind: type[errors.DflashError], act: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        act(*arguments, **options)
    assert type(caught.value) is kind
    return str(caught.value)


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


# --- folders ---


def test_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"a": 1})
    for given in (tmp_path, str(tmp_path)):
        source = resolve(given, role="target")
        assert (source.name, source.config, source.folder, source.obj) == (str(tmp_path), {"a": 1}, tmp_path, None)


def test_a_folder_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "models" / "config.json", {})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/models", role="target").folder == tmp_path / "models"


def test_a_folder_that_looks_like_a_hub_id_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "owner" / "model" / "config.json", {"a": 1})
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/model", role="target").folder == Path("owner/model")


@pytest.mark.parametrize("eos", [5, [5, 6]])
def test_stop_tokens_come_from_the_generation_config_too(tmp_path: Path, eos: Any) -> None:
    write(tmp_path / "config.json", {"eos_token_id": 1})
    write(tmp_path / "generation_config.json", {"eos_token_id": eos, "temperature": 1})
    assert read_config(tmp_path) == {"eos_token_id": 1, "generation_eos_token_id": eos}


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": None}])
def test_a_generation_config_without_stop_tokens(tmp_path: Path, generation: Any) -> None:
    write(tmp_path / "config.json", {"a": 1})
    write(tmp_path / "generation_config.json", generation)
    assert read_config(tmp_path) == {"a": 1}


def test_a_folder_without_config(tmp_path: Path) -> None:
    expected = f"{tmp_path}: no config.json; expected a checkpoint folder"
    assert message(errors.CheckpointError, resolve, tmp_path, role="target") == expected


@pytest.mark.parametrize("text", ["", "{", '{"a": ', "nothing"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_that_is_no_json(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path / "config.json", {})
    file = write(tmp_path / name, text)
    assert message(errors.CheckpointError, resolve, tmp_path, role="draft").startswith(
        f"{file}: not readable as JSON ("
    )


def test_a_config_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "not readable as JSON" in message(errors.CheckpointError, resolve, tmp_path, role="draft")


@pytest.mark.parametrize(("value", "kind"), [([], "list"), (3, "int"), ("null", "NoneType")])
def test_a_config_that_is_no_object(tmp_path: Path, value: Any, kind: str) -> None:
    file = write(tmp_path / "config.json", value)
    expected = f"{file}: expected a JSON object, got {kind}"
    assert message(errors.CheckpointError, resolve, tmp_path, role="draft") == expected


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    found = message(errors.CheckpointError, resolve, tmp_path, role="draft")
    assert found.startswith(f"{tmp_path / 'config.json'}: cannot be read (")


def test_a_name_of_the_zoo_is_the_part_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for role in ("target", "draft"):
        found = resolve("tiny-code", role=role)
        assert found.name == "tiny-code"
        assert found.folder == zoo.fetch("tiny-code").target.with_name(role)
    (tmp_path / "tiny-code").mkdir()
    (tmp_path / "tiny-code" / "config.json").write_text("{}")
    assert resolve("tiny-code", role="target").folder == Path("tiny-code")


def test_a_pair_of_the_zoo_without_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "fetch", lambda name: zoo.Files(Path("somewhere"), None))
    assert message(errors.InputError, resolve, "smollm2-135m", role="draft") == (
        "draft: the zoo has none for 'smollm2-135m'; give a folder or a hub id"
    )


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "/no/such", "./a/b", "../a", "a/", "/a"])
def test_what_is_neither_folder_nor_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert message(errors.InputError, resolve, name, role="draft") == (
        f"draft: got {name!r}, which is no folder; expected a folder with config.json, "
        "a name of the zoo, or a hub id such as 'Qwen/Qwen3-8B'"
    )


@pytest.mark.parametrize(
    "name",
    ["", "my folder/model", "a--b/c", "a/b.git", "~no-such-user/x", "a/" + "b" * 300, "a" * 300],
    ids=["empty", "blank", "dashes", "git", "user", "long id", "long path"],
)
def test_what_neither_the_system_nor_the_hub_takes_for_a_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message(errors.InputError, resolve, name, role="draft") == (
        f"draft: got {name!r}, which is no folder; expected a folder with config.json, "
        "a name of the zoo, or a hub id such as 'Qwen/Qwen3-8B'"
    )


@pytest.mark.parametrize(
    "name",
    ["a/b", "Qwen/Qwen3-8B", "a/b.c", "a/b..c", "a/b--c", "a/b-", "a/b.", "a./b", "-a/b", "a/.b", "a/b.git", "a/b git",
     "a/" + "b" * 96, "a/" + "b" * 97, "ä/b", "_a/_b"],
)  # fmt: skip
def test_the_rules_for_names_are_the_hubs_own(name: str) -> None:
    validators = pytest.importorskip("huggingface_hub.utils")
    try:
        validators.validate_repo_id(name)
    except validators.HFValidationError:
        assert not looks_like_hub_id(name)
    else:
        assert looks_like_hub_id(name)


@pytest.mark.parametrize(("name", "is_one"), [("Qwen/Qwen3-8B", True), ("a/b.c", True), ("a", False), ("a/b/c", False)])
def test_what_looks_like_a_hub_id(name: str, is_one: bool) -> None:
    assert looks_like_hub_id(name) is is_one


# --- the hub: a cache of its own layout, and a server of our own ---


def ask(*asked: tuple[str, str | None], **variables: str) -> list[Any]:
    """Resolve names in a fresh interpreter, since the hub's library reads its variables when it is imported."""
    pytest.importorskip("huggingface_hub")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
    command = [sys.executable, "-c", ASK, json.dumps(asked)]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def cached(root: Path, name: str, config: Any) -> None:
    """Lay a model into a hub cache as the hub's library does."""
    folder = root / f"models--{name.replace('/', '--')}"
    write(folder / "refs" / "main", COMMIT)
    write(folder / "snapshots" / COMMIT / "config.json", config)


def test_a_cached_hub_id_is_found_without_a_network(tmp_path: Path) -> None:
    cached(tmp_path, "owner/model", {"a": 1})
    found = ask(
        ("owner/model", None),
        ("owner/model", COMMIT),
        ("owner/other", None),
        ("owner/model", "v2"),
        HF_HUB_CACHE=str(tmp_path),
        HF_HUB_OFFLINE="1",
    )
    assert found[:2] == [["owner/model", {"a": 1}, COMMIT]] * 2
    missing = (
        "is not in the cache and the hub cannot be reached; connect once, or give a folder that holds the checkpoint"
    )
    assert found[2] == ["DownloadError", f"target: 'owner/other' {missing}"]
    assert found[3] == ["DownloadError", f"target: 'owner/model' {missing}"]


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    cached(tmp_path, "owner/model", {"a": 1})
    found = ask(
        ("owner/model", None),
        ("owner/other", None),
        HF_HUB_CACHE=str(tmp_path),
        HF_ENDPOINT="http://127.0.0.1:9",
    )
    assert found[0] == ["owner/model", {"a": 1}, COMMIT]
    assert found[1][0] == "DownloadError"
    assert "'owner/other' is not in the cache and the hub cannot be reached" in found[1][1]


class Nothing(http.server.BaseHTTPRequestHandler):
    """A hub that has no model, and says so as the real one does."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def empty_hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nothing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_that_has_no_such_model(tmp_path: Path, empty_hub: str) -> None:
    (found,) = ask(("owner/model", None), HF_HUB_CACHE=str(tmp_path), HF_ENDPOINT=empty_hub)
    assert found[0] == "DownloadError"
    assert found[1].startswith("target: 'owner/model' could not be fetched from the hub: 404")
    assert "\n" not in found[1]


def test_without_the_hubs_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    found = message(errors.BackendMissing, resolve, "owner/model", role="draft")
    assert found == (
        "draft: 'owner/model' is a hub id, and huggingface-hub is not installed; "
        'run: pip install "dflash-fn[torch]" (in a checkout: pip install ".[torch]")'
    )
