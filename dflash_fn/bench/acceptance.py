"""tau of the lossless rules at temperature > 0, side by side on the same prompts and seeds.

The match rule with drafts that know nothing of the target's random numbers, with a shared uniform and with shared
Gumbel noise; token rejection; block verification. Intervals are 95 %, from the jackknife over (prompt, seed), of five
or more (`dflash_fn.bench.estimates`): steps of one text are not independent, texts are. Beside them stands what each
rule would keep on the blocks of the token rejection run, worked out from p and q without drawing
(`dflash_fn.expected`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_fn.bench.common import add_pair_options, load, markdown, prompt_ids, track
from dflash_fn.bench.estimates import Estimate, ratio
from dflash_fn.expected import ACCEPTANCE, expected_accepted
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.policies import Policy, block_verification, match, token_rejection
from dflash_fn.prompts import read_rows
from dflash_fn.records import Array, Pair, Verdict
from dflash_fn.sampling import Sampling, probabilities

__all__ = ["Way", "main"]


@dataclass(slots=True)
class Way:
    """A rule, and what it came to.

    Attributes:
        policy: the rule.
        key: its name in `dflash_fn.expected`, or None.
        texts: (tokens emitted, steps) of each prompt and seed, the opening step left out.
        seconds: of all of them.
    """

    policy: Policy
    key: str | None = None
    texts: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0


def ways(sampling: Sampling) -> dict[str, Way]:
    """Return the rules to compare; the recorded one comes last but one."""
    return {
        "match, argmax drafts": Way(match(sampling, drafts="argmax")),
        "match, independent draws": Way(match(sampling, drafts="independent"), "match_independent"),
        "match, shared uniform": Way(match(sampling, noise="inverse"), "match_inverse"),
        "match, shared Gumbel noise": Way(match(sampling), "match_gumbel"),
        "token rejection": Way(token_rejection(sampling), "token_rejection"),
        "block verification": Way(block_verification(sampling), "block_verification"),
    }


def recording(policy: Policy, pair: Pair, sampling: Sampling, kept: dict[str, list[float]]) -> Policy:
    """Return a policy that says the same, and notes for each block what every rule would keep of it on average."""

    def rule(xp: Any, drafted: Array, logits: Array, q: Array | None, uniforms: Mapping[str, Array]) -> Verdict:
        if drafted.shape[1]:
            assert q is not None
            arrays = drafted, probabilities(xp, logits, sampling), q
            tokens, p, drawn = (pair.port.to_numpy(array)[0] for array in arrays)
            for name in ACCEPTANCE:
                kept[name].append(1.0 + expected_accepted(name, tokens, p, drawn))
        return policy.rule(xp, drafted, logits, q, uniforms)

    return replace(policy, rule=rule)


def _run(way: Way, policy: Policy, pair: Pair, ids: list[int], seed: int, options: argparse.Namespace) -> None:
    state = prefill(pair, ids, seed=seed)
    begun = time.perf_counter()
    infos = [
        info
        for _, info in rounds(state, pair, policy=policy, max_new_tokens=options.tokens, stop_token_ids=())
        if info.step > 0
    ]
    way.seconds += time.perf_counter() - begun
    # a block that the budget cut says nothing of the rule
    full = infos[:-1]
    if full:
        way.texts.append((sum(len(info.emitted[0]) for info in full), len(full)))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.acceptance", description=__doc__)
    add_pair_options(parser)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each text")
    parser.add_argument("--seeds", type=int, default=1, help="texts of each prompt")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float)
    options = parser.parse_args(arguments)
    pair, sampling = load(options, options.dtype), Sampling(options.temperature, top_p=options.top_p)
    made, kept = ways(sampling), {name: [] for name in ACCEPTANCE}
    prompts = [prompt_ids(pair, prompt, raw=options.raw) for _, prompt in read_rows(options.data)]
    for ids in track(prompts, "prompts"):
        for seed in range(options.seeds):
            for name, way in made.items():
                noting = name == "token rejection"
                policy = recording(way.policy, pair, sampling, kept) if noting else way.policy
                _run(way, policy, pair, ids, seed, options)
    _report(made, kept)
    return 0


def _report(made: dict[str, Way], kept: dict[str, list[float]]) -> None:
    rows = []
    for name, way in made.items():
        tau = ratio(way.texts)
        blocks = kept[way.key] if way.key else []
        mean = f"{sum(blocks) / len(blocks):.3f}" if blocks else ""
        steps = sum(taken for _, taken in way.texts)
        rows.append([name, _written(tau), mean, steps, f"{1e3 * way.seconds / steps:.0f}"])
    head = ["rule", "tau", "expected on token rejection's blocks", "steps", "ms a step"]
    print(markdown(head, rows))  # noqa: T201


def _written(tau: Estimate | None) -> str:
    if tau is None:
        return "-"
    return f"{tau.value:.3f}" if tau.half is None else f"{tau.value:.3f} ± {tau.half:.3f}"


if __name__ == "__main__":
    sys.exit(main())
