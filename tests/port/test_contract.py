"""P01 by example: any draft, block size and proposal gives the tokens and the bits of the logits of no draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors
from dflash_fn.port import Port
from dflash_fn.records import Pair, Proposer
from tests.helpers import proposers
from tests.helpers.fixtures import DTYPES, need_dtype
from tests.helpers.runs import Run, decode_plainly, differing, fetch, run
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign, without_draft

BORDERS = (256, 384, 512)
"""Key counts around which some kernel changes the order of its sums, if it is asked for them as they are."""
EVEN = TargetDesign(inner=64, hidden=64, head_dim=16)
"""A target whose sizes are multiples of every vector width, as those of real models are."""


def prompt_of(length: int, vocab: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, vocab, length).tolist()


def plain(pair: Pair, prompt: list[int], width: int, count: int) -> Run:
    lone = without_draft(pair)
    return decode_plainly(dflash_fn.prefill(lone, prompt, width=width), lone, count)


def check(pair: Pair, prompt: list[int], width: int, count: int, proposer: Proposer | None = None) -> Run:
    """Compare a decode with the plain one, and return it."""
    expected = plain(pair, prompt, width, count)
    proposer = proposer or proposers.corrupted([[*prompt, *expected.emitted[0]]], seed=5, rate=0.15)
    found = run(
        dflash_fn.prefill(pair, prompt, width=width), pair, max_new_tokens=count, block_size=width, proposer=proposer
    )
    assert found.emitted == expected.emitted
    assert differing(found.logits[0], expected.logits[0]) == []
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("border", BORDERS)
def test_bits_hold_across_key_counts(port: Port, checkpoints: Checkpoints, border: int, width: int, dtype: str) -> None:
    need_dtype(port, dtype)
    pair = checkpoints.pair(port, EVEN, dtype)
    found = check(pair, prompt_of(border - 14, 48), width, 26)
    assert any(found.accepted())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4, 8, 16])
def test_bits_hold_whatever_the_buffers_held_before(
    port: Port, checkpoints: Checkpoints, width: int, dtype: str
) -> None:
    need_dtype(port, dtype)
    pair = checkpoints.pair(port, EVEN, dtype)
    prompt = prompt_of(230, 48)
    expected = plain(pair, prompt, width, 40)
    state = dflash_fn.prefill(pair, prompt, width=width)
    begun = run(state, pair, max_new_tokens=2).last
    for seed in range(3):  # each leaves other tokens beyond the lengths that `begun` sees
        other = dflash_fn.extend(begun, pair, prompt_of(60, 48, seed))
        run(other, pair, max_new_tokens=10, block_size=width, proposer=proposers.at_random(seed))
    proposer = proposers.corrupted([[*prompt, *expected.emitted[0]]], seed=5, rate=0.15)
    found = run(begun, pair, max_new_tokens=38, block_size=width, proposer=proposer)
    assert found.last.tokens == expected.last.tokens
    assert differing(found.logits[0], expected.logits[0][2:]) == []


@pytest.mark.parametrize("width", range(1, 33))
def test_bits_hold_at_every_width(port: Port, checkpoints: Checkpoints, width: int) -> None:
    if width > port.max_width:
        pytest.skip(f"port {port.name} verifies at most {port.max_width} tokens at once")
    check(checkpoints.pair(port, EVEN), prompt_of(7, 48), width, 24)


@pytest.mark.parametrize("width", [4, 8, 12, 16, 20])
@pytest.mark.parametrize("inner", [20, 33, 40, 56])
def test_bits_hold_for_every_size_of_the_mlp(port: Port, checkpoints: Checkpoints, inner: int, width: int) -> None:
    check(checkpoints.pair(port, replace(EVEN, inner=inner)), prompt_of(7, 48), width, 24)


@pytest.mark.parametrize("head_dim", [2, 4, 6, 8, 10, 12, 16, 20, 32])
def test_bits_hold_for_every_size_of_head_or_it_is_refused(port: Port, checkpoints: Checkpoints, head_dim: int) -> None:
    design = replace(EVEN, head_dim=head_dim)
    try:
        pair = checkpoints.pair(port, design)
    except errors.UnsupportedModel:
        assert head_dim % 8  # no real model has such heads
    else:
        check(pair, prompt_of(7, 48), 8, 24)


@pytest.mark.parametrize("hidden", [16, 20, 24, 33])
@pytest.mark.parametrize("vocab", [32, 37, 61])
def test_bits_hold_for_every_size_of_hidden_state_and_vocabulary(
    port: Port, checkpoints: Checkpoints, hidden: int, vocab: int
) -> None:
    check(checkpoints.pair(port, replace(EVEN, hidden=hidden, vocab=vocab)), prompt_of(7, vocab), 8, 24)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "design",
    [
        replace(EVEN, tied=True),
        replace(EVEN, bias=True),
        replace(EVEN, rope="llama3"),
        replace(EVEN, heads=6, kv_heads=3),
        replace(EVEN, heads=4, kv_heads=1),
        replace(EVEN, family="qwen3", seed=20),
        replace(EVEN, family="qwen3", seed=20, window=5),
    ],
    ids=["tied", "bias", "llama3", "grouped", "one-kv-head", "qwen3", "window"],
)
def test_bits_hold_for_every_kind_of_target(
    port: Port, checkpoints: Checkpoints, design: TargetDesign, dtype: str
) -> None:
    need_dtype(port, dtype)
    check(checkpoints.pair(port, design, dtype), prompt_of(250, 48), 8, 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"rope": "yarn"}, {"window": 3}, {"window": 3, "causal": False}, {"causal": True}, {"taps": (1, 0)}],
    ids=["plain", "yarn", "sliding", "sliding-both-ways", "causal", "taps"],
)
def test_bits_hold_with_an_untrained_draft(port: Port, checkpoints: Checkpoints, options: dict, dtype: str) -> None:
    need_dtype(port, dtype)
    pair = checkpoints.pair(port, DraftDesign(target=EVEN, block_size=8, **options), dtype)
    prompt = prompt_of(9, 48)
    expected = plain(pair, prompt, 8, 20)
    for size in (2, 8):
        found = run(dflash_fn.prefill(pair, prompt), pair, max_new_tokens=20, block_size=size)
        assert found.emitted == expected.emitted
        assert differing(found.logits[0], expected.logits[0]) == []


@pytest.mark.parametrize("name", ["tiny-code", "tiny-code-hybrid"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_hold_with_a_trained_draft(port: Port, name: str, dtype: str) -> None:
    need_dtype(port, dtype)
    pair = dflash_fn.load_zoo(name, port=port, dtype=dtype)
    assert pair.draft is not None
    prompt = pair.tokenizer.encode("def add(a, b):\n    return a + b\n\n\ndef sub(")
    expected = plain(pair, prompt, pair.block_size, 32)
    found = run(dflash_fn.prefill(pair, prompt), pair, max_new_tokens=32)
    assert found.emitted == expected.emitted
    assert differing(found.logits[0], expected.logits[0]) == []
    assert sum(count or 0 for count in found.accepted()) > 0


def test_a_slots_logits_ignore_what_comes_after_it(port: Port, checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(port, DraftDesign(target=EVEN, block_size=8))
    state = run(dflash_fn.prefill(pair, [1, 2, 3]), pair, max_new_tokens=4).last
    rng = np.random.default_rng(0)
    begin = rng.integers(0, 48, 7)
    for slot in range(7):
        blocks = rng.integers(0, 48, (4, 1, 7))
        blocks[:, :, : slot + 1] = begin[: slot + 1]
        seen = []
        for block in blocks:
            proposal = replace(dflash_fn.propose(state, pair), tokens=port.asarray(block, pair.target.device))
            logits = fetch(port, dflash_fn.verify(state, pair, proposal).logits)
            seen.append(logits[0, : slot + 2].tobytes())
        assert len(set(seen)) == 1
