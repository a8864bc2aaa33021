"""`dflash-fn doctor`: what is installed, what would run, and (by `--prove`) whether the contract holds here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from dflash_fn.cli import exits, machine, prove, report, terminal
from dflash_fn.cli.options import PairOptions, check_load
from dflash_fn.cli.pairs import open_pair
from dflash_fn.cli.ports import look_at
from dflash_fn.errors import CacheFolderError, InputError

__all__ = ["doctor", "facts"]


def doctor(options: PairOptions, *, proving: bool, as_json: bool) -> None:
    """Run the command.

    Raises:
        typer.Exit: with the code of a difference.
        DflashError: of any kind.
    """
    check_load(options)
    if not proving:
        _check_unused(options)
    console = terminal.console(stderr=False)
    with terminal.status("looking around"):
        found = facts(options)
    if not as_json:
        show_facts(console, found)
    proved: list[prove.Proof] = []
    for proof in _proofs(options) if proving else ():
        proved.append(proof)
        if not as_json:
            console.print(proof_line(proof))
    same = sum(proof.identical for proof in proved)
    if as_json:
        report.print_object(found | ({"prove": [proof.as_object() for proof in proved]} if proving else {}))
    elif proving:
        console.print(f"{same} of {len(proved)} comparisons identical, tokens and logits, bit for bit")
    if same < len(proved):
        raise typer.Exit(exits.DIFFERENT)


def _check_unused(options: PairOptions) -> None:
    """Raise InputError for a flag that says what to prove where nothing is proved."""
    for name in ("pair", "target", "draft", "device"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name} says what --prove is to run; add --prove, or leave --{name} out")
    if options.compile:
        raise InputError("--compile says how --prove is to run; add --prove, or leave --compile out")


def facts(options: PairOptions) -> dict[str, Any]:
    """Collect what there is to know without loading a pair."""
    from dflash_fn import __version__

    entry = look_at(options.port)
    info = entry.info
    return {
        "dflash_fn": __version__,
        "versions": machine.versions(),
        "port": entry.as_object(),
        "device": options.device or (info.devices[0] if info else None),
        "threads": info.threads if info else None,
        "memory": asdict(machine.memory()),
        "cache": _cache(),
        "pairs": _pairs(),
    }


def _cache() -> dict[str, Any]:
    from dflash_fn.zoo import cache

    try:
        folder = cache.root()
    except CacheFolderError as error:
        return {"folder": None, "free": None, "problem": str(error)}
    return {"folder": str(folder), "free": machine.free_space(folder), "problem": None}


def _pairs() -> list[dict[str, Any]]:
    from dflash_fn import zoo

    return [asdict(zoo.entry(name)) | {"present": zoo.present(name)} for name in zoo.names()]


def _proofs(options: PairOptions) -> Iterator[prove.Proof]:
    """Compare in every dtype; the progress is the lines themselves."""
    for dtype in prove.DTYPES:
        pair = open_pair(replace(options, dtype=dtype), needs_draft="--prove compares with and without a draft")
        yield from prove.proofs(pair)


def show_facts(console: Console, found: dict[str, Any]) -> None:
    """Print the facts, one a line."""
    for name, value in _lines(found):
        terminal.print_entry(console, name, value)


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "dflash-fn", found["dflash_fn"]
    for name, version in found["versions"].items():
        yield name, version or "not installed"
    port = found["port"]
    yield "port", f"{port['name']} ({port['backend']})" if port["installed"] else f"cannot run: {port['problem']}"
    if port["installed"]:
        yield "devices", ", ".join(port["devices"])
        yield "dtypes", ", ".join(port["dtypes"])
        yield "threads", str(port["threads"])
        yield from (("note", note) for note in port["notes"])
    memory, cache = found["memory"], found["cache"]
    yield "memory", f"{gigabytes(memory['total'])}, {gigabytes(memory['available'])} available"
    yield "cache folder", cache["problem"] or f"{cache['folder']} ({gigabytes(cache['free'])} free)"
    for pair in found["pairs"]:
        state = "present" if pair["present"] else f"not fetched ({pair['size']})"
        yield f"pair {pair['name']}", f"{state}; {pair['description']}"


def gigabytes(size: int | None) -> str:
    """Return a size for people."""
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"


def proof_line(proof: prove.Proof) -> Text:
    """Say what one comparison came to."""
    tau = "-" if proof.tau is None else f"{proof.tau:.2f}"
    line = f"{proof.dtype}, width {proof.width}, tokens {proof.start} to {proof.end}, tau {tau}: "
    if proof.identical:
        return Text(line).append("identical", style="green")
    what = "logits" if proof.tokens_identical else "tokens"
    return Text(line).append(f"{what} differ from position {proof.first_difference}", style="bold red")
