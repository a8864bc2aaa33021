"""Commands and flags of `dflash-fn`, and its entry point."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dflash_fn import __version__
from dflash_fn.cli import exits
from dflash_fn.cli.options import DEFAULT_PAIR, DTYPES, Options, PairOptions

__all__ = ["app", "run"]

app = typer.Typer(
    name="dflash-fn",
    help="Speculative decoding with DFlash drafts. Text and JSON go to stdout, everything else to stderr.",
    epilog="Exit codes: 0 fine; 1 --check or --prove found a difference; 2 bad input; 130 Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
PairName = Annotated[str | None, typer.Option("--pair", metavar="NAME", help=f"A zoo pair. [default: {DEFAULT_PAIR}]")]
PortName = Annotated[str, typer.Option("--port", metavar="NAME", help="The port that runs the pair.")]
Device = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="A device of the port. [default: its first]")
]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"dflash-fn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding with DFlash drafts. Text and JSON go to stdout, everything else to stderr."""
    del version


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.")] = None,
    pair: PairName = None,
    target: Annotated[str | None, typer.Option(metavar="PATH", help="A checkpoint folder or hub id.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="PATH", help="A DFlash draft; replaces the pair's own.")] = None,
    port: PortName = "torch",
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{', '.join(DTYPES)}. [default: the port's choice]")
    ] = None,
    device: Device = None,
    block_size: Annotated[
        int | None, typer.Option(metavar="B", help="Block size; 1 drafts nothing. [default: the draft's]")
    ] = None,
    width: Annotated[
        int | None, typer.Option(metavar="W", help="Rows that every verification runs, B or more.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Budget of an answer.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template, even if there is one.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Names every random number.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Decode without the draft too, and compare.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Answer one line after another; /quit ends.")] = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt, or answer it.

    The text is written as it is accepted; then come tau and the speed. Where the tokenizer has a chat template, the
    prompt is a user's message; elsewhere, and with --raw, the text goes on from it.
    """
    load = PairOptions(pair, target, draft, port, dtype, device)
    options = Options(load, prompt, chat, check, raw, as_json, block_size, width, max_new_tokens, seed)
    with exits.handled():
        if chat:
            from dflash_fn.cli.chat import chat as command
        else:
            from dflash_fn.cli.generate import generate as command
        command(options)


@app.command()
def ports(as_json: Json = False) -> None:
    """List ports, and which can run here."""
    from dflash_fn.cli.ports import ports as command

    with exits.handled():
        command(as_json=as_json)


@app.command()
def doctor(
    prove: Annotated[
        bool, typer.Option("--prove", help="Decode with and without a draft in several shapes, and compare.")
    ] = False,
    pair: PairName = None,
    port: PortName = "torch",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Say what is installed; prove exactness.

    --prove takes a pair, in float32 and in bfloat16, and compares tokens and logits with and without its draft.
    """
    from dflash_fn.cli.doctor import doctor as command

    with exits.handled():
        command(PairOptions(pair=pair, port=port, device=device), proving=prove, as_json=as_json)


def run() -> None:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        # Text is whatever the model writes; a terminal that lacks a letter must not end the run.
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(exits.INTERRUPTED)
