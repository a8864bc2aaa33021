"""Commands and flags of `dflash-fn`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dflash_fn import __version__
from dflash_fn.cli import exits
from dflash_fn.cli.block_size import block_size as read_block_size
from dflash_fn.cli.options import DEFAULT_PAIR, DTYPES, Options, PairOptions
from dflash_fn.cli.policy import PolicyOptions
from dflash_fn.cli.processes import check_alone, first_speaks

__all__ = ["app"]

# Commands are imported before `handled`, where Ctrl-C still ends the process at once.

app = typer.Typer(
    name="dflash-fn",
    help="Speculative decoding with DFlash drafts. Text and JSON go to stdout, everything else to stderr.",
    epilog="Exit codes: 0 fine; 1 a difference (--check, --prove, compare, trace check), or failed replies (bench); "
    "2 bad input; 130 Ctrl-C.",
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
Target = Annotated[str | None, typer.Option("--target", metavar="PATH", help="A checkpoint folder or hub id.")]
Draft = Annotated[str | None, typer.Option("--draft", metavar="PATH", help="A DFlash draft; replaces the pair's own.")]
Guess = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="PATH",
        help="A DFlash draft, replaces the pair's own; or ngram (no model), or both (ngram, else the pair's draft).",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="NAME", help=f"{', '.join(DTYPES)}. [default: the port's choice]")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Run on kernels that this machine's C++ compiler makes, once.")
]
BlockSize = Annotated[
    int | None, typer.Option("--block-size", metavar="B", help="Block size; 1 drafts nothing. [default: the draft's]")
]
PacedBlockSize = Annotated[
    Any,
    typer.Option(
        "--block-size",
        metavar="B|auto",
        parser=read_block_size,
        help="Block size; 1 drafts nothing, auto chooses it as it goes. [default: the draft's]",
    ),
]
Width = Annotated[
    int | None, typer.Option("--width", metavar="W", help="Rows that every verification runs, B or more.")
]
Budget = Annotated[int, typer.Option("--max-new-tokens", metavar="N", help="Budget of an answer.")]
Raw = Annotated[bool, typer.Option("--raw", help="No chat template, even if there is one.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Names every random number. [default: 0]")]
PolicyName = Annotated[
    str, typer.Option("--policy", metavar="NAME", help="What is kept of a block: a name, or module:attribute.")
]
Temperature = Annotated[float | None, typer.Option("--temperature", metavar="T", help="0 is greedy. [default: 0]")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="Sample from the K most probable tokens.")]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", help="Sample from those that make up P.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", metavar="P", help="Sample from those P times as probable as the best.")
]

trace = typer.Typer(
    help="Golden traces: record what every step of a decode saw and made, and hold another port against it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(trace, name="trace")

policies = typer.Typer(
    help="Acceptance policies: which there are, and several of them side by side.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(policies, name="policies")


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
    target: Target = None,
    draft: Guess = None,
    port: PortName = "torch",
    dtype: Dtype = None,
    device: Device = None,
    compiled: Compile = False,
    block_size: PacedBlockSize = None,
    width: Width = None,
    max_new_tokens: Budget = 128,
    raw: Raw = False,
    seed: Seed = None,
    policy: PolicyName = "match",
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    check: Annotated[bool, typer.Option("--check", help="Decode without the draft too, and compare.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Answer one line after another; /quit ends.")] = False,
    save_state: Annotated[
        str | None, typer.Option(metavar="FILE", help="Save the state after each answer, also one that Ctrl-C cut.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="FILE", help="Go on from a saved state; the prompt, if any, is added to it.")
    ] = None,
    device_map: Annotated[
        str | None, typer.Option(metavar="NAME", help="Spread the target's layers over devices: auto, balanced ...")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(metavar="N", help="Share each layer among the N processes that torchrun started.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, or answer it.

    The text is written as it is accepted; then come tau and the speed. Where the tokenizer has a chat template, the
    prompt is a user's message; elsewhere, and with --raw, the text goes on from it. A saved state is gone on with in
    the same way; without a prompt it is just decoded further.
    """
    load = PairOptions(pair, target, draft, port, dtype, device, compiled, device_map, tensor_parallel)
    options = Options(
        load, prompt, chat, check, raw, as_json, block_size, width, max_new_tokens, seed, save_state, resume,
        PolicyOptions(policy, temperature, top_k, top_p, min_p),
    )  # fmt: skip
    if chat:
        from dflash_fn.cli.chat import chat as command
    else:
        from dflash_fn.cli.generate import generate as command
    with exits.handled(), first_speaks(tensor_parallel):
        if tensor_parallel is None:
            check_alone("generate", ", or share the model by --tensor-parallel N")
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
    target: Target = None,
    draft: Draft = None,
    port: PortName = "torch",
    device: Device = None,
    compiled: Compile = False,
    as_json: Json = False,
) -> None:
    """Say what is installed; prove exactness.

    --prove takes a pair, in float32 and in bfloat16, and compares tokens and logits with and without its draft. The
    flags that name a pair or a device are for --prove alone.
    """
    from dflash_fn.cli.doctor import doctor as command

    with exits.handled():
        load = PairOptions(pair, target, draft, port, device=device, compile=compiled)
        command(load, proving=prove, as_json=as_json)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="A way to decode, such as ours,block=8,port=mlx.")],
    second: Annotated[str, typer.Argument(help="Another, such as transformers, or server,url=http://host:8000.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="FILE[:FIRST-LAST]", help="Rows of a JSONL file, as prompts too.")
    ] = None,
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    max_new_tokens: Budget = 64,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Decode the same prompts in two ways, and say whether rounding explains where they part.

    A way is ours, transformers (its generate), mlx-lm or server, with options after commas: dtype=, for ours port=,
    block=, width= and draft= (none, ngram, both, or a place), for a server url=, model=, api= and peak=. Exits with 1
    if a divergence is no near tie.
    """
    from dflash_fn.cli.compare import compare as command

    with exits.handled():
        check_alone("compare")
        command(
            (first, second),
            load=PairOptions(pair, target, draft),
            prompts=prompts or (),
            data=data or (),
            raw=raw,
            max_new_tokens=max_new_tokens,
            as_json=as_json,
        )


@app.command("serve-command")
def serve_command(
    server: Annotated[str, typer.Argument(help="vllm or sglang.")],
    target: Target = None,
    draft: Annotated[
        str | None, typer.Option("--draft", metavar="PATH", help="A DFlash draft, folder or hub id.")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", metavar="B", help="Block size, anchor included. [default: the draft's]"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help=f"{', '.join(DTYPES)}. [default: the target's]")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Where it is to listen. [default: the server's]")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Where it is to listen. [default: the server's]")] = None,
    as_json: Json = False,
) -> None:
    """Check a pair without its weights, and print the command that serves it.

    Sizes, vocabularies, tapped layers, mask token, block size and tokenizer must fit. The flags are those of vLLM 0.33
    and SGLang 0.5.23. Nothing is started.
    """
    from dflash_fn.cli.serve_command import ServeOptions, serve

    with exits.handled():
        serve(ServeOptions(server, target, draft, block_size, dtype, host, port), as_json=as_json)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="gsm8k, math500, humaneval, mbpp, mt-bench.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FILE[:FIRST-LAST]", help="Rows of a JSONL file, as they are or worded as NAME's; or a text."
        ),
    ] = None,
    source: Annotated[
        str, typer.Option(metavar="NAME", help="Where rows of a NAME come from: bundled (some), or hub (all).")
    ] = "bundled",
    limit: Annotated[int | None, typer.Option(metavar="N", help="The first N of each name or file.")] = None,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Shuffle each before that; 42 is upstream's order.")
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="A port (torch, mlx, jax), or openai for a server.")
    ] = "torch",
    pair: PairName = None,
    target: Target = None,
    draft: Guess = None,
    dtype: Dtype = None,
    device: Device = None,
    compiled: Compile = False,
    ways: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="generate, mlx-lm, upstream, plain, ngram, draft, both; also draft:8."),
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(metavar="B,B,...", help="Block sizes of draft (or ngram, both). [default: the draft's]"),
    ] = None,
    max_new_tokens: Budget = 128,
    raw: Raw = False,
    head: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a text of --data to go on from. [default: 64]")
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="The chat template's switch. [default: the template's]"),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Decode past stop tokens.")] = False,
    parts: Annotated[
        bool, typer.Option("--parts", help="Time parts of a step on CUDA and mlx too, which slows the steps.")
    ] = False,
    url: Annotated[str | None, typer.Option(metavar="URL", help="The server's address.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The server's model. [default: its only one]")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Questions that a server is asked at once. [default: 1]")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds without data after which a server has stalled.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep replies, a table and pictures in a folder.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in DIR.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    as_json: Json = False,
) -> None:
    """Ask the same questions in several ways of decoding, and compare what they take.

    Every way answers each question before the next one. Exits with 1 if a reply failed. Ctrl-C prints what there is.
    """
    from dflash_fn.cli.bench import bench as command
    from dflash_fn.cli.bench_options import BenchOptions

    wanted = BenchOptions(
        PairOptions(pair, target, draft, backend, dtype, device, compiled), names or (), data or (), source, limit,
        shuffle, ways, blocks, max_new_tokens, raw, head, thinking, ignore_eos, parts, url, model, concurrency, timeout,
        out, resume, markdown, as_json,
    )  # fmt: skip
    with exits.handled(several_rows=True):
        command(wanted)


@app.command()
def train(
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for everything that the run makes.")],
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="NAME", help="tiny-code, tiny-code-hybrid or smollm2-135m.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="PATH", help="A folder, hub id or zoo name to make a draft for.")
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option("--stage", metavar="NAME", help="corpus, target, data, features, fit, eval. [default: all]"),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="FILE", help="JSONL of prompts or conversations, or plain text."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="FILE", help="JSONL of prompts to keep out of the data.")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option, such as draft.fit.steps=500.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in DIR.")] = False,
    time_budget: Annotated[
        str | None, typer.Option("--time-budget", metavar="TIME", help="Pause after a time such as 90m; then --resume.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Of everything that is drawn.")] = None,
    port: PortName = "torch",
    device: Device = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", metavar="N", help="Of the CPU; the bits hang on them. [default: the port's]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a draft, and with a recipe its small target too.

    Stages whose results are there are skipped. A run that was killed goes on from its last checkpoint with --resume;
    Ctrl-C and --time-budget save before they stop.
    """
    from dflash_fn.cli.train import TrainRequest, stage_names
    from dflash_fn.cli.train import train as command

    request = TrainRequest(
        out, recipe, target, stage_names(stage or ()), tuple(data or ()), tuple(exclude or ()), tuple(change or ()),
        resume, time_budget, seed, port, device, threads, as_json,
    )  # fmt: skip
    with exits.handled(several_rows=True):
        command(request)


@trace.command("record")
def trace_record(
    file: Annotated[str, typer.Argument(help="Where to write the trace.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    port: PortName = "torch",
    dtype: Dtype = None,
    device: Device = None,
    compiled: Compile = False,
    block_size: BlockSize = None,
    width: Width = None,
    max_new_tokens: Budget = 32,
    raw: Raw = False,
    seed: Seed = None,
    policy: PolicyName = "match",
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    keep: Annotated[int, typer.Option(metavar="K", help="Logits to keep a slot; 0 keeps all.")] = 8,
    as_json: Json = False,
) -> None:
    """Decode, and write what every step saw and made to a file."""
    load = PairOptions(pair, target, draft, port, dtype, device, compiled)
    options = Options(
        load,
        prompt,
        raw=raw,
        json=as_json,
        block_size=block_size,
        width=width,
        max_new_tokens=max_new_tokens,
        seed=seed,
        policy=PolicyOptions(policy, temperature, top_k, top_p, min_p),
    )
    from dflash_fn.cli.trace import record as command

    with exits.handled():
        command(file, options, keep=keep)


@trace.command("check")
def trace_check(
    file: Annotated[str, typer.Argument(help="A trace.")],
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    port: PortName = "torch",
    dtype: Dtype = None,
    device: Device = None,
    compiled: Compile = False,
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="NAME", help="Its policy, where the trace's words do not name one of ours."),
    ] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    as_json: Json = False,
) -> None:
    """Replay a trace on a port and name the first quantity that differs.

    Where no flag says otherwise, the pair, the dtype, and a policy that has a name are those of the trace. Of a policy
    of your own, and of temperatures with six digits, say by flags what it was recorded with.
    """
    from dflash_fn.cli.trace import check as command

    load = PairOptions(pair, target, draft, port, dtype, device, compiled)
    with exits.handled(several_rows=True):
        command(file, load, PolicyOptions(policy or "", temperature, top_k, top_p, min_p), as_json=as_json)


@trace.command("view")
def trace_view(
    file: Annotated[str, typer.Argument(help="A trace.")],
    out: Annotated[str | None, typer.Option(metavar="FILE", help="The page. [default: FILE.html]")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    pair: Annotated[
        str | None, typer.Option(metavar="NAME", help="A zoo pair whose tokenizer to use. [default: the trace's]")
    ] = None,
    target: Target = None,
    port: Annotated[str, typer.Option(metavar="NAME", help="The port that reads the tokenizer.")] = "torch",
    ids: Annotated[bool, typer.Option("--ids", help="Tokens as ids, without a tokenizer.")] = False,
    as_json: Json = False,
) -> None:
    """Write a trace as one HTML page: the text by step, each block with what was kept of it, p and q, charts.

    The page needs no network and no other file.
    """
    from dflash_fn.cli.trace_view import ViewOptions
    from dflash_fn.cli.trace_view import view as command

    with exits.handled(several_rows=True):
        command(ViewOptions(file, out, show, pair, target, port, ids, as_json))


@trace.command("expect")
def trace_expect(
    file: Annotated[str, typer.Argument(help="A trace that `trace record --keep 0` made.")],
    as_json: Json = False,
) -> None:
    """Say how much every rule would keep of a trace's blocks, worked out from p and q without drawing."""
    from dflash_fn.cli.trace_expect import expect as command

    with exits.handled():
        command(file, as_json=as_json)


@policies.command("list")
def policies_list(as_json: Json = False) -> None:
    """List the policies that have names: lossless or not, whether they need q, and where they come from."""
    from dflash_fn.cli.policies import list_policies as command

    with exits.handled():
        command(as_json=as_json)


@policies.command("compare")
def policies_compare(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="FILE[:FIRST-LAST]", help="Rows of a JSONL file, as prompts too.")
    ] = None,
    names: Annotated[
        str, typer.Option("--policies", metavar="A,B,...", help="Names, or module:attribute; the first is the base.")
    ] = "all",
    temperature: Annotated[float, typer.Option(metavar="T", help="0 is greedy.")] = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Texts of each prompt.")] = 4,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The first seed. [default: 0]")] = None,
    max_new_tokens: Budget = 64,
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    port: PortName = "torch",
    dtype: Dtype = None,
    device: Device = None,
    compiled: Compile = False,
    block_size: BlockSize = None,
    width: Width = None,
    raw: Raw = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture too, .png or .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Run several policies on the same prompts and seeds, and compare them.

    What is compared: tau, what is kept by slot, how far the text's law is from the target's, and the time of a step;
    with intervals of 95 % over texts.
    """
    load = PairOptions(pair, target, draft, port, dtype, device, compiled)
    options = Options(
        load, "-", raw=raw, json=as_json, block_size=block_size, width=width, max_new_tokens=max_new_tokens, seed=seed,
        policy=PolicyOptions("match", temperature, top_k, top_p, min_p),
    )  # fmt: skip
    from dflash_fn.cli.policies import CompareOptions
    from dflash_fn.cli.policies import compare as command

    with exits.handled():
        command(options, CompareOptions(names, prompts or (), data or (), seeds, markdown, plot))
