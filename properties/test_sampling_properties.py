"""P07: at temperature > 0 the text is a function of (seed, prompt), whatever the draft and the block size."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import dflash_fn
from dflash_fn.policies import budget, confidence_cut, match
from dflash_fn.policies.match import Noise
from dflash_fn.port import Port
from dflash_fn.sampling import Sampling
from tests.helpers.runs import decode_plainly, differing, run
from tests.helpers.strategies import PROPOSERS, loaded, prompts, settings_on
from tests.helpers.tiny import Checkpoints, without_draft

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.1, 1.0),
    min_p=st.none() | st.floats(0.0, 0.5),
)
NOISES: st.SearchStrategy[Noise] = st.sampled_from(["inverse", "gumbel"])


@settings(max_examples=max(1, settings().max_examples // 6))  # two decodes each, and on jax every design compiles
@given(data=st.data())
def test_p07_text_and_bits_are_those_of_no_draft(port: Port, checkpoints: Checkpoints, data: st.DataObject) -> None:
    """P07: with the match rule, any sampling, any draft however it draws, any proposal, any block size."""
    setting = data.draw(settings_on(port))
    pair, ids = loaded(checkpoints, port, setting), data.draw(prompts(setting.vocab))
    lone, seed = without_draft(pair), data.draw(st.integers(0, 2**64 - 1))
    sampling, noise = data.draw(SAMPLINGS), data.draw(NOISES)
    plain = decode_plainly(
        dflash_fn.prefill(lone, ids, width=setting.width, seed=seed), lone, 12, policy=match(sampling, noise=noise)
    )
    policy = match(sampling, noise=noise, drafts=data.draw(st.sampled_from(["shared", "independent", "argmax"])))
    wrap = data.draw(st.sampled_from(["none", "budget", "cut"]))
    policy = {"none": policy, "budget": budget(policy, 2), "cut": confidence_cut(policy, 0.2)}[wrap]
    name = data.draw(st.sampled_from(sorted(PROPOSERS)))
    found = run(
        dflash_fn.prefill(pair, ids, width=setting.width, seed=seed),
        pair,
        max_new_tokens=12,
        block_size=setting.block_size,
        proposer=PROPOSERS[name]([[*ids, *plain.emitted[0]]], 0),
        policy=policy,
    )
    assert found.emitted == plain.emitted
    assert differing(found.logits[0], plain.logits[0]) == []
