"""Our law of a text against transformers' `generate` with do_sample, by enumeration on a tiny model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dflash_fn
from dflash_fn.policies import Policy, match
from dflash_fn.records import Pair, Verdict
from dflash_fn.sampling import Sampling
from tests.helpers.fixtures import checkpoints
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

__all__ = ["checkpoints"]

VOCAB, PROMPT = 5, [1, 3, 0]
DESIGN = DraftDesign(target=TargetDesign(vocab=VOCAB), mask=2)


def law_of_generate(model: Any, ids: list[int], sampling: Sampling) -> np.ndarray:
    """What `generate` draws its next token from: its own scores, after its own warpers."""
    made = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=True,
        max_new_tokens=1,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return torch.softmax(made.scores[0].double(), dim=-1)[0].numpy()


def steered(sampling: Sampling, numbers: list[float]) -> Policy:
    """The match rule with given numbers in place of the target stream's, for positions from the prompt's end on."""
    policy, used = match(sampling, noise="inverse", drafts="argmax"), iter([0, 1])

    def rule(xp: Any, drafted: Any, logits: Any, q: Any, uniforms: Any) -> Verdict:
        first, given = next(used), uniforms["target"]
        row = [*numbers[first:], *[0.5] * given.shape[1]][: given.shape[1]]
        return policy.rule(xp, drafted, logits, q, {"target": torch.tensor([row], dtype=given.dtype)})

    return replace(policy, rule=rule)


@pytest.mark.parametrize(
    "sampling", [Sampling(0.8), Sampling(1.5, top_k=3), Sampling(1.2, top_p=0.8, min_p=0.1)], ids=str
)
def test_every_interval_of_the_uniforms_gives_generates_token(checkpoints: Checkpoints, sampling: Sampling) -> None:
    """The intervals are those of `generate`'s law; in the middle of each we emit its token, so the laws are one."""
    port = dflash_fn.get_port("torch")
    pair: Pair = checkpoints.pair(port, DESIGN)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints.folder(DESIGN.target), dtype=torch.float32)
    state, seen = dflash_fn.prefill(pair, PROMPT, width=4), set()
    first = law_of_generate(model, PROMPT, sampling)
    for one in np.flatnonzero(first > 1e-4).tolist():
        second = law_of_generate(model, [*PROMPT, one], sampling)
        for other in np.flatnonzero(second > 1e-4).tolist():
            numbers = [float(law[:token].sum() + law[token] / 2) for law, token in ((first, one), (second, other))]
            policy = steered(sampling, numbers)
            found = dflash_fn.decode(state, pair, policy=policy, max_new_tokens=2, stop_token_ids=())
            assert found.tokens[0][len(PROMPT) :] == (one, other)
            seen.add((one, other))
    assert len(seen) > 4
    assert seen <= set(itertools.product(range(VOCAB), repeat=2))
