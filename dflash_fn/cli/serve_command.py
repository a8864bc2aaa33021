"""`dflash-fn serve-command`: the command that starts a server with a pair, once the pair is known to fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import typer

from dflash_fn.cli import report, terminal
from dflash_fn.errors import InputError

__all__ = ["ServeOptions", "serve"]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `serve-command` was asked for; None is a flag that was not given."""

    server: str
    target: str | None = None
    draft: str | None = None
    block_size: int | None = None
    dtype: str | None = None
    host: str | None = None
    port: int | None = None


def serve(options: ServeOptions, *, as_json: bool) -> None:
    """Check and print: the command on stdout, what to know of the pair on stderr.

    Raises:
        DflashError: of any kind.
    """
    from dflash_fn.serving import serve_command, shell_lines

    if options.target is None or options.draft is None:
        raise InputError("serve-command needs a pair: give --target and --draft, each a folder or a hub id")
    with terminal.status("checking the pair"):
        made = serve_command(
            options.server,
            options.target,
            options.draft,
            block_size=options.block_size,
            dtype=options.dtype,
            host=options.host,
            port=options.port,
        )
    if as_json:
        report.print_object(asdict(made) | {"command": made.words, "notes": list(made.notes)})
        return
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(shell_lines(made.command))
