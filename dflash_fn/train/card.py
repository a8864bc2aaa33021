"""The model card of a trained pair: data, recipe, figures, licence, all from what the run wrote down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_fn.train.options import TrainOptions

__all__ = ["card"]

PROMPT_LINES = 6
"""Lines of a prompt that a sample shows."""

MARK = "▶"
"""Where a prompt ends and an answer begins."""

UNSETTLED = "whoever passes the draft on looks at the licences of its target and of what it learnt from"

LIMITS = "One run, one seed. tau depends on the text: loops flatter it, so it is split by how repetitive answers are."


def card(options: TrainOptions, facts: Mapping[str, Any]) -> str:
    """Return a model card in Markdown.

    Args:
        options: of the run.
        facts: what its stages wrote: `corpus`, `target`, `data`, `fit`, `eval`; those that are missing are left out.
    """
    parts = [
        f"# {options.name}",
        _intro(options, facts),
        _section("Data", [*_corpus(facts.get("corpus")), *_texts(options, facts.get("data"))]),
        _section("Training", _training(options, facts)),
        _section("Figures", _figures(options, facts.get("eval") or {})),
        _section("Samples", _samples((facts.get("eval") or {}).get("samples") or [])),
        _section("Limits", [LIMITS]),
        _section("Licence", [_licence(options)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _licence(options: TrainOptions) -> str:
    whose = f"{options.licence}, of the weights." if options.licence else f"Not settled; {UNSETTLED}."
    return f"{whose} Trained by `dflash-fn train`: draft/training.json."


def _section(title: str, lines: list[str]) -> str:
    return f"## {title}\n\n" + "\n".join(lines) if lines else ""


def _intro(options: TrainOptions, facts: Mapping[str, Any]) -> str:
    draft, target = options.draft, options.target
    made = facts.get("fit") or {}
    layers = f"{draft.layers} layers, taps {', '.join(map(str, draft.taps))}, block size {draft.block_size}"
    size = f", {made['parameters'] / 1e6:.1f} M parameters" if "parameters" in made else ""
    whose = f"`{options.source}`" if target is None else f"a target of {target.layers} layers ({target.architecture})"
    both = ", both trained here" if target else ""
    lines = [f"A DFlash draft for {whose}{both}: {layers}, mask token {draft.mask_token_id}{size}."]
    made = facts.get("target") or {}
    if target and "parameters" in made:
        lines.append(
            f"The target: {made['parameters'] / 1e6:.1f} M parameters, embedding and head untied, hidden "
            f"{target.hidden}, MLP {target.inner}, {target.heads} query and {target.kv_heads} key-value heads of "
            f"{target.head_dim}, context {target.max_context}. What it writes looks like its data and means nothing."
        )
    return "\n".join(lines)


def _corpus(known: Mapping[str, Any] | None) -> list[str]:
    if not known:
        return []
    lines = [
        (
            f"* {known['files']} Python files, {known['bytes'] / 1e6:.1f} MB, {known['tokens'] / 1e6:.1f} M tokens of "
            f"a byte-level BPE of {known['vocabulary']}, after runs of lines that occurred before were dropped; "
            f"digest `{known['digest']}`."
        ),
        f"* Standard library of Python {known['python']} (PSF-2.0)." if known.get("python") else "",
        *(f"* {entry['name']} ({entry['licence']}), sha256 `{entry['sha256'][:16]}`" for entry in known["packages"]),
        f"* Held out, never trained on: {', '.join(f'`{name}`' for name in known['held_out'])}.",
        f"* {len(known['near'])} files left out because they share a run of words with a prompt that is kept out.",
    ]
    return [line for line in lines if line]


def _texts(options: TrainOptions, known: Mapping[str, Any] | None) -> list[str]:
    if not known:
        return []
    kept_out = ", ".join(f"`{name.rpartition('/')[2]}`" for name in options.exclude)
    return [
        (
            f"* The draft learns from {known['texts']} answers ({known['answer_tokens']} tokens) that the target wrote "
            f"greedily (`{options.text.kind}`); digest `{known['digest']}`."
        ),
        f"* Dropped: {known['loops']} loops, {known['duplicates']} duplicates, {known['near']} near a prompt.",
        (
            f"* Kept out: no text shares {options.shared_words} words in a row with a prompt of these files "
            f"({known['prompts']} prompts): {kept_out}. Case, layout and punctuation do not count."
            if kept_out
            else "* Kept out: nothing; no prompts were named (`exclude`)."
        ),
    ]


def _training(options: TrainOptions, facts: Mapping[str, Any]) -> list[str]:
    lines = []
    made, target = facts.get("target"), options.target
    if made and target:
        lines.append(
            f"* Target: {made['steps']} steps of {target.batch} x {target.sequence} tokens, {target.fit.optimiser}, "
            f"rate {target.fit.rate:g}; last loss {made['loss']:.3f}."
        )
    made, draft = facts.get("fit"), options.draft
    if made:
        lines.append(
            f"* Draft: {made['steps']} steps of {draft.sequences} x {draft.anchors} blocks, slot weights with gamma "
            f"{draft.gamma:g}, {1 - draft.kl:g} cross-entropy + {draft.kl:g} KL to the target, start `{draft.start}`, "
            f"rate {draft.fit.rate:g}; last loss {made['loss']:.3f}."
        )
        lines.append(f"* Seed {options.seed}, {made['threads']} threads, {made['backend']}.")
    return lines


def _figures(options: TrainOptions, known: Mapping[str, Any]) -> list[str]:
    if not known:
        return []
    sets = known.get("sets", {})
    if not sets:
        return ["Nothing was measured: the run names no prompts (`eval.prompts`)."]
    first = options.eval.first
    lines = [
        (
            f"tau is the mean of emitted tokens a step; greedy, block size {options.eval.block_size}, "
            f"{options.eval.max_new_tokens} tokens an answer."
        ),
        "",
        (
            f"| prompts | n | tau | first {first} tokens | by share of distinct 4-grams (n) | mean share | "
            "n-grams alone |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_row(name, found) for name, found in sets.items()),
        "",
    ]
    if known.get("bits_per_byte") is not None:
        lines.append(
            f"* Target on held-out files, first {options.eval.head_bytes} bytes: {known['bits_per_byte']} bits a byte."
        )
    if known.get("exact") is not None:
        lines.append(f"* The same text as without the draft: {'yes' if known['exact'] else 'NO'}.")
    if known.get("speed"):
        found, kernels = known["speed"], " on compiled kernels" if options.compile else ""
        lines.append(
            f"* {found['draft_tokens_per_second']} tokens a second with the draft{kernels}, "
            f"{found['plain_tokens_per_second']} at width 1 without, in one run: {found.get('times', 0):.2f} times."
        )
    return lines


def _samples(shown: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the first answers of each set as they are, each behind the end of its prompt."""
    if not shown:
        return []
    lines = [f"Greedy answers, not chosen: the first of each set. Up to {PROMPT_LINES} lines of the prompt, `{MARK}`."]
    for one in shown:
        prompt = one["prompt"].split("\n")[-PROMPT_LINES:]
        # an answer may hold a fence of its own
        lines += ["", f"{one['name']}:", "", "````python", "\n".join(prompt) + MARK + one["answer"], "````"]
    return lines


def _row(name: str, found: Mapping[str, Any]) -> str:
    split = "; ".join(f"{key}: {_number(one['tau'])} ({one['prompts']})" for key, one in found["by_distinct"].items())
    cells = (
        name,
        found["prompts"],
        _number(found["tau"]),
        _number(found["tau_first"]),
        split,
        _number(found.get("distinct")),
        _number(found.get("ngrams")),
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
