"""The command that starts a server with a pair: checked here first, without weights, then written in its own flags.

Servers find a pair that does not fit late, after they have read the weights, or never: a draft of another target only
accepts nothing. What can be told from two configs and a tokenizer is told here at once.

Source:
    vLLM 0.33 (https://docs.vllm.ai, "Speculative Decoding"; `vllm/config/speculative.py`): `--speculative-config`,
    whose `num_speculative_tokens` counts drafted tokens, the block size less 1, as in upstream's own commands;
    `--per-request-spec-decode-metrics`, documented since 0.32. SGLang 0.5.23 (`srt/arg_groups/fields/spec.py`,
    `speculative_hook.py`; https://docs.sglang.io, "Speculative Decoding"): `--speculative-num-draft-tokens` counts the
    anchor too and is for DFlash the block size; `--speculative-dflash-block-size` is another name for it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_fn import errors
from dflash_fn.config import DraftSpec, TargetSpec, parse_draft, parse_target
from dflash_fn.load import check_pair, check_tokenizer, read_tokenizer
from dflash_fn.registry import get_port, port_names
from dflash_fn.sources import Source, resolve
from dflash_fn.tolerances import UNIT

__all__ = ["SERVERS", "ServeCommand", "any_tokenizer", "serve_command", "shell_lines"]

SERVERS = ("vllm", "sglang")
"""Servers whose commands are known."""

MOST_PORTS = 65535
"""TCP has no port above."""


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """A server's command for a pair that fits.

    Attributes:
        server: one of `SERVERS`.
        target: as it was given.
        draft: as it was given.
        block_size: B, the anchor included.
        dtype: that the server is told; `auto` where the target is quantized.
        command: the words of the command, an option and its value together in one entry.
        notes: what to know of the pair, for people.
    """

    server: str
    target: str
    draft: str
    block_size: int
    dtype: str
    command: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The words of the command, as a process takes them."""
        return [word for entry in self.command for word in entry]


def serve_command(
    server: str,
    target: str | Path,
    draft: str | Path,
    *,
    block_size: int | None = None,
    dtype: str | None = None,
    host: str | None = None,
    port: int | None = None,
) -> ServeCommand:
    """Check a pair, and return the command that serves it.

    Args:
        server: `vllm` or `sglang`.
        target: a folder or hub id; its config and tokenizer are read, and its weights are not.
        draft: the same for a DFlash draft.
        block_size: B, the anchor included; None takes the draft's.
        dtype: of weights and activations; None takes the target's own.
        host: to listen on; None leaves it to the server.
        port: the same.

    Raises:
        InputError: no such server, block size, dtype or port, or a target without a tokenizer.
        DownloadError: a hub id that is neither cached nor reachable.
        ConfigError, UnsupportedModel: a config.json that lacks a key, that nothing here runs, or that servers cannot.
        PairMismatch: the two do not fit each other, or a tokenizer does not fit them.

    Example:
        >>> from dflash_fn import zoo
        >>> pair = zoo.fetch("tiny-code")
        >>> made = serve_command("sglang", pair.target, pair.draft)
        >>> made.command[-1]
        ('--speculative-num-draft-tokens', '8')
    """
    if server not in SERVERS:
        raise errors.InputError(f"server: got {server!r}, expected one of: {', '.join(SERVERS)}")
    if port is not None and not 1 <= port <= MOST_PORTS:
        raise errors.InputError(f"port: got {port}, expected 1 to {MOST_PORTS}")
    places = resolve(target, role="target", weights=False), resolve(draft, role="draft", weights=False)
    spec, draft_spec = _fitting(*places)
    size = _block_size(draft_spec, block_size)
    kind = _dtype(spec, dtype)
    listens = [("--host", host)] if host is not None else []
    listens += [("--port", str(port))] if port is not None else []
    write = _vllm if server == "vllm" else _sglang
    command = (*write(str(target), str(draft), size, kind), *listens)
    notes = tuple(_notes(spec, draft_spec, kind))
    return ServeCommand(server, str(target), str(draft), size, kind, command, notes)


def _fitting(target: Source, draft: Source) -> tuple[TargetSpec, DraftSpec]:
    spec, draft_spec = parse_target(target.config, name=target.name), parse_draft(draft.config, name=draft.name)
    check_pair(spec, draft_spec)
    tokenizer = any_tokenizer(target)
    if tokenizer is None:
        raise errors.InputError(f"target {target.name}: there is no tokenizer in it, which a server needs")
    check_tokenizer(spec, tokenizer, draft)
    for one, role in ((spec, target), (draft_spec, draft)):
        if one.quantization == "mlx":
            raise errors.UnsupportedModel(
                f"{role.name}: is quantized in mlx's own format, which neither server reads; give the original"
            )
    return spec, draft_spec


def any_tokenizer(source: Source) -> Any:
    """Read a source's tokenizer by the first port that can run here; None if it holds none.

    Raises:
        BackendMissing: no port can run here.
        CheckpointError: the tokenizer cannot be read.
    """
    for name in port_names():
        try:
            port = get_port(name)
        except errors.BackendMissing:
            continue
        return read_tokenizer(port, source)
    raise errors.BackendMissing(f"a tokenizer needs a port that can run here; run: {errors.install_line('torch')}")


def _block_size(draft: DraftSpec, given: int | None) -> int:
    size = given if given is not None else draft.block_size
    if not 2 <= size <= draft.block_size:
        raise errors.InputError(
            f"block size: got {size}, expected 2 to {draft.block_size}, for which the draft was trained"
        )
    return size


def _dtype(target: TargetSpec, given: str | None) -> str:
    if given is None:
        return target.dtype if target.quantization is None else "auto"
    if given not in UNIT:
        raise errors.InputError(f"dtype: got {given!r}, expected one of: {', '.join(UNIT)}")
    return given


def _vllm(target: str, draft: str, block_size: int, dtype: str) -> tuple[tuple[str, ...], ...]:
    speculation = {"method": "dflash", "model": draft, "num_speculative_tokens": block_size - 1}
    return (
        ("vllm", "serve", target),
        ("--dtype", dtype),
        ("--speculative-config", json.dumps(speculation)),
        ("--per-request-spec-decode-metrics", "detailed"),
    )


def _sglang(target: str, draft: str, block_size: int, dtype: str) -> tuple[tuple[str, ...], ...]:
    return (
        ("python", "-m", "sglang.launch_server"),
        ("--model-path", target),
        ("--dtype", dtype),
        ("--speculative-algorithm", "DFLASH"),
        ("--speculative-draft-model-path", draft),
        ("--speculative-num-draft-tokens", str(block_size)),
    )


def _notes(target: TargetSpec, draft: DraftSpec, dtype: str) -> list[str]:
    notes = []
    if dtype not in ("auto", draft.dtype):
        notes.append(f"the draft was saved in {draft.dtype} and runs in {dtype}")
    if draft.max_context < target.max_context:
        notes.append(
            f"the draft was made for {draft.max_context} positions, the target for {target.max_context}; "
            "expect less to be accepted beyond"
        )
    return notes


def shell_lines(command: Sequence[Sequence[str]]) -> str:
    r"""Write a command for a POSIX shell, an option a line.

    Example:
        >>> print(shell_lines([("serve", "my model"), ("--port", "1")]))
        serve 'my model' \
          --port 1
    """
    return " \\\n  ".join(shlex.join(entry) for entry in command)
