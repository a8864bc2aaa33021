"""`dflash-fn policies`: which there are, and several of them on the same prompts and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dflash_fn.cli import policies_report, report, terminal
from dflash_fn.cli.options import Options, check_options, check_place
from dflash_fn.cli.pairs import block_and_width, open_pair
from dflash_fn.cli.policy import PolicyOptions, policy_of
from dflash_fn.errors import InputError

if TYPE_CHECKING:
    from dflash_fn.bench.policy_runs import Contender
    from dflash_fn.records import Pair

__all__ = ["CompareOptions", "compare", "list_policies"]


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What `policies compare` was asked for, beside what `generate` takes.

    Attributes:
        names: of the policies, with commas between them.
        prompts: given as arguments.
        data: JSONL files and rows.
        seeds: texts of each prompt.
        markdown: whether tables are to be Markdown.
        plot: where a picture goes; None makes none.
    """

    names: str
    prompts: Sequence[str] = ()
    data: Sequence[str] = ()
    seeds: int = 1
    markdown: bool = False
    plot: str | None = None


def list_policies(*, as_json: bool) -> None:
    """Print what is known of the policies that have names."""
    from dflash_fn.policies.catalogue import catalogue

    found = catalogue()
    if as_json:
        report.print_object({"policies": [asdict(one) for one in found]})
    else:
        policies_report.show_list(terminal.console(stderr=False), found)


def compare(options: Options, wanted: CompareOptions) -> None:
    """Run the command.

    Raises:
        DflashError: of any kind.
    """
    from dflash_fn.bench.policy_runs import results_of

    contenders = _contenders(options, wanted)
    _check(options, wanted)
    prompts = _prompts(wanted)
    pair = open_pair(options.load, needs_draft="policies compare judges what a draft proposes")
    block_size, width = block_and_width(options, pair)
    _run(options, wanted, contenders, pair, prompts, block_size, width)
    setting = policies_report.Setting(
        pair=pair.name, port=pair.port.name, dtype=pair.target.dtype, device=pair.target.device,
        sampling=str(contenders[0].policy.sampling), block_size=block_size, width=width,
        max_new_tokens=options.max_new_tokens, prompts=[name for name, _ in prompts],
        seeds=list(range(options.first_seed, options.first_seed + wanted.seeds)),
    )  # fmt: skip
    results = results_of(contenders)
    if options.json:
        report.print_object(policies_report.as_object(setting, results))
    elif wanted.markdown:
        print_markdown = terminal.console(stderr=False)
        print_markdown.print(policies_report.as_markdown(setting, results), soft_wrap=True)
    else:
        policies_report.show(terminal.console(stderr=False), setting, results)
    if wanted.plot is not None:
        from dflash_fn.bench.policy_plot import plot

        plot(results, setting.line, wanted.plot)


def _contenders(options: Options, wanted: CompareOptions) -> list[Contender]:
    from dflash_fn.bench.policy_runs import Contender
    from dflash_fn.policies.named import POLICIES

    names = list(POLICIES) if wanted.names == "all" else [name.strip() for name in wanted.names.split(",")]
    if not all(names):
        raise InputError(f"--policies {wanted.names!r}: expected names with commas between them, or all")
    if len(set(names)) != len(names):
        raise InputError(f"--policies {wanted.names}: names one of them twice")
    asked = options.policy
    rest = (asked.temperature, asked.top_k, asked.top_p, asked.min_p)
    return [Contender(name, policy_of(PolicyOptions(name, *rest))) for name in names]


def _check(options: Options, wanted: CompareOptions) -> None:
    check_options(options)
    if wanted.seeds < 1:
        raise InputError(f"--seeds: got {wanted.seeds}, expected 1 or more")
    if options.block_size == 1 or options.max_new_tokens < 2:
        raise InputError("policies compare judges drafted tokens; --block-size and --max-new-tokens must be 2 or more")
    if options.json and wanted.markdown:
        raise InputError("--json and --markdown exclude each other")
    if wanted.plot is not None:
        from dflash_fn.bench.policy_plot import check_plot

        check_place("--plot", wanted.plot)
        check_plot(wanted.plot)


def _prompts(wanted: CompareOptions) -> list[tuple[str, str]]:
    from dflash_fn.prompts import read_rows

    named = [(f"prompt {index}", text) for index, text in enumerate(wanted.prompts, start=1)]
    found = [*named, *read_rows(wanted.data)]
    if not found or not all(text for _, text in found):
        raise InputError("no prompts, or an empty one; give some, or --data FILE")
    return found


def _run(
    options: Options, wanted: CompareOptions, contenders: Sequence[Contender], pair: Pair,
    prompts: Sequence[tuple[str, str]], block_size: int, width: int,
) -> None:  # fmt: skip
    """Run all policies on a text before the next one, so that a machine that slows down slows all of them."""
    from dflash_fn import decode, prefill
    from dflash_fn.bench.policy_runs import run_text
    from dflash_fn.text import encoded

    encodings = [encoded(pair.tokenizer, text, raw=options.raw) for _, text in prompts]
    # the first step of a process pays for what the others find warm
    decode(prefill(pair, encodings[0], width=width), pair, max_new_tokens=4, block_size=block_size)
    with terminal.progress("comparing", len(prompts) * wanted.seeds) as advance:
        for ids in encodings:
            for seed in range(options.first_seed, options.first_seed + wanted.seeds):
                for one in contenders:
                    run_text(one, pair, ids, seed=seed, width=width, block_size=block_size,
                             max_new_tokens=options.max_new_tokens)  # fmt: skip
                advance()
