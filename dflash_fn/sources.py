"""Where a model comes from: a folder, the zoo, a hub id, or an object in memory; all of them become a `Source`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_fn import errors

__all__ = ["Source", "read_config", "resolve"]

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")

WEIGHTS = ".safetensors"

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]{0,95}", re.ASCII)
HUB_ID_REFUSED = re.compile(r"--|\.\.|[.-](/|$)|\.git$")


@dataclass(frozen=True, slots=True)
class Source:
    """A place to read a model from; exactly one of `folder` and `obj` is set.

    Attributes:
        name: what the user called it, for messages.
        config: its config.json, as parsed by `json`.
        folder: a checkpoint folder with config.json and *.safetensors.
        obj: a model object of the port's library.
    """

    name: str
    config: dict[str, Any]
    folder: Path | None = None
    obj: Any = None


def resolve(source: str | Path, *, role: str, revision: str | None = None, weights: bool = True) -> Source:
    """Find a checkpoint and read its config; download it first where `source` is a hub id.

    Args:
        source: a folder that holds config.json, the name of a pair of the zoo, whose part of that role is meant, or a
            hub id such as `Qwen/Qwen3-8B`.
        role: `target` or `draft`, for messages.
        revision: branch, tag or commit of a hub id.
        weights: whether a download has to bring them.

    Raises:
        CheckpointError: the folder holds no readable config.json.
        DownloadError: the hub cannot be reached, or has no such model.
        InputError: none of these, or a pair without a draft.
    """
    path = _folder(source) or _zoo_folder(str(source), role)
    if path is not None:
        return Source(str(source), read_config(path), folder=path)
    if not looks_like_hub_id(str(source)):
        raise errors.InputError(
            f"{role}: got {str(source)!r}, which is no folder; expected a folder with config.json, "
            "a name of the zoo, or a hub id such as 'Qwen/Qwen3-8B'"
        )
    folder = download(str(source), role=role, revision=revision, weights=weights)
    return Source(str(source), read_config(folder), folder=folder)


def _zoo_folder(name: str, role: str) -> Path | None:
    """Return the folder of a zoo pair's target or draft, fetched first where it must be; None for any other name."""
    from dflash_fn import zoo

    if name not in zoo.names():
        return None
    files = zoo.fetch(name)
    folder = files.draft if role == "draft" else files.target
    if folder is None:
        raise errors.InputError(f"{role}: the zoo has none for {name!r}; give a folder or a hub id")
    return folder


def looks_like_hub_id(name: str) -> bool:
    """Whether a name has the form `owner/model`, by the hub's rules for names."""
    return bool(HUB_ID.fullmatch(name)) and not HUB_ID_REFUSED.search(name)


def _folder(source: str | Path) -> Path | None:
    """Return the folder that is meant, or None; an empty name means none, though to pathlib it is the current one."""
    if not str(source):
        return None
    try:
        path = Path(source).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long a name, no such user, a null byte
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder, with the stop tokens of generation_config.json where there is one."""
    config = _read_json(folder / "config.json")
    extra = folder / "generation_config.json"
    if extra.is_file():
        eos = _read_json(extra).get("eos_token_id")
        if eos is not None:
            config["generation_eos_token_id"] = eos
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise errors.CheckpointError(f"{path.parent}: no {path.name}; expected a checkpoint folder") from None
    except OSError as error:
        raise errors.CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise errors.CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise errors.CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def download(name: str, *, role: str, revision: str | None, weights: bool = True) -> Path:
    """Fetch a hub checkpoint into the hub's own cache and return its folder."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise errors.BackendMissing(
            f"{role}: {name!r} is a hub id, and huggingface-hub is not installed; run: {errors.install_line('torch')}"
        ) from None
    try:
        wanted = [pattern for pattern in HUB_FILES if weights or not pattern.endswith(WEIGHTS)]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except LocalEntryNotFoundError:
        raise errors.DownloadError(
            f"{role}: {name!r} is not in the cache and the hub cannot be reached; "
            "connect once, or give a folder that holds the checkpoint"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise errors.DownloadError(f"{role}: {name!r} could not be fetched from the hub: {reason}") from None
