"""`dflash-fn trace view`: a trace as a page for the browser."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_fn.cli import report, signals, terminal
from dflash_fn.cli.options import check_place
from dflash_fn.errors import CacheFolderError, InputError

if TYPE_CHECKING:
    from dflash_fn.trace import Trace

__all__ = ["ViewOptions", "view"]


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """What `trace view` was asked for; None is a flag that was not given.

    Attributes:
        file: the trace.
        out: where the page goes; None puts it beside the trace.
        show: whether a browser is to open it.
        pair: a zoo pair whose tokenizer writes the tokens.
        target: a folder or hub id, in its place.
        port: which reads the tokenizer.
        ids: whether tokens are to be shown as ids.
        json: whether stdout gets a JSON object.
    """

    file: str
    out: str | None = None
    show: bool = False
    pair: str | None = None
    target: str | None = None
    port: str = "torch"
    ids: bool = False
    json: bool = False


def view(options: ViewOptions) -> None:
    """Run the command.

    Raises:
        DflashError: of any kind.
    """
    from dflash_fn.trace import read_trace, render_page

    out = options.out or f"{options.file}.html"
    _check(options, out)
    trace = read_trace(options.file)
    place = _place(options, trace)
    with terminal.status("writing the page"):
        page = render_page(trace, None if place is None else _tokenizer(place, options.port)).encode()
    try:
        Path(out).write_bytes(page)
    except OSError as error:
        raise CacheFolderError(f"--out {out}: cannot be written ({error.strerror or error})") from None
    _tell(options, out, len(page), place)
    if options.show:
        webbrowser.open(Path(out).resolve().as_uri())


def _check(options: ViewOptions, out: str) -> None:
    if options.pair is not None and options.target is not None:
        raise InputError("--pair and --target exclude each other")
    if options.ids and (options.pair is not None or options.target is not None):
        raise InputError("--ids needs no tokenizer; leave --pair and --target out")
    check_place("--out", out)
    if Path(out).exists() and Path(out).samefile(options.file):
        raise InputError(f"--out {out}: is the trace itself; give the name of another file")


def _place(options: ViewOptions, trace: Trace) -> Any:
    """Return where the tokenizer is: what a flag says, or the trace's own pair where it can be had without a download.

    None shows ids.
    """
    from dflash_fn import zoo

    if options.ids:
        return None
    if options.target is not None:
        from dflash_fn.sources import resolve

        return resolve(options.target, role="target").folder
    name = options.pair
    if name is None and trace.pair in zoo.names() and zoo.present(trace.pair):
        name = trace.pair
    return None if name is None else zoo.fetch(name).target


def _tokenizer(place: Any, port: str) -> Any:
    from dflash_fn import get_port

    with signals.at_once():
        return get_port(port).load_tokenizer(place)


def _tell(options: ViewOptions, out: str, size: int, place: Any) -> None:
    if options.json:
        report.print_object({"file": out, "bytes": size, "tokens_as": "ids" if place is None else "text"})
        return
    note = "" if place or options.ids else "; tokens as ids, --pair or --target names a tokenizer"
    terminal.console(stderr=False).print(f"{out}: {size} bytes{note}")
