"""Sampling on every port: one slot's bits in any shape, nothing of weight 0, the same noise, the same text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dflash_fn
from dflash_fn import errors, match, zoo
from dflash_fn.draws import draw, noise, race, total
from dflash_fn.policies import Policy, budget, token_rejection
from dflash_fn.policies.match import Drafts, Noise
from dflash_fn.port import Port
from dflash_fn.rng import Stream, uniforms, words
from dflash_fn.sampling import Sampling, probabilities, weights
from tests.helpers import proposers
from tests.helpers.fixtures import DTYPES, need_dtype
from tests.helpers.runs import decode_plainly, differing, fetch, run
from tests.helpers.tiny import Checkpoints, DraftDesign, without_draft
from tests.helpers.verdicts import KINDS, some_blocks, verdicts

SAMPLINGS = [Sampling(0.7), Sampling(1.0, top_k=20, top_p=0.9, min_p=0.01)]


def handed(port: Port, values: np.ndarray, dtype: str = "float32") -> object:
    made = port.asarray(values, port.info().devices[0])
    return port.xp.astype(made, getattr(port.xp, dtype)) if values.dtype.kind == "f" else made


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("vocab", [7, 64, 2048, 49152])
def test_p07_a_slot_has_the_same_bits_in_every_shape(port: Port, vocab: int, sampling: Sampling) -> None:
    """P07: weights, sums and draws of a slot do not depend on how many slots stand around it, nor on which it is."""
    slots = 32
    logits = np.random.default_rng(vocab).normal(size=(1, slots, vocab)).astype(np.float32) * 4
    u = uniforms(1, Stream.TARGET, np.arange(slots))[None]
    keys = words(1, Stream.NOISE, np.arange(slots))[None]

    def made(first: int, last: int) -> list[np.ndarray]:
        law = weights(port.xp, handed(port, logits[:, first:last]), sampling)
        drawn = draw(port.xp, law, handed(port, u[:, first:last]))
        raced = race(port.xp, law, handed(port, keys[:, first:last]))
        return [fetch(port, array)[0] for array in (law, total(port.xp, law), drawn, raced)]

    whole = made(0, slots)
    for width in (1, 2, 4, 8, 16):
        for first in range(0, slots, width) if vocab < 49152 else (0, slots - 2 * width, slots - width):
            found = made(first, first + width)
            assert all(np.array_equal(a[first : first + width], b) for a, b in zip(whole, found, strict=True)), width


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-25, 1 - 2.0**-53])
def test_weight_0_is_never_drawn(port: Port, u: float) -> None:
    rng = np.random.default_rng(5)
    values = (rng.random((1, 64, 37)) ** 8 * (rng.random((1, 64, 37)) < 0.3)).astype(np.float32)
    values[0, np.arange(64), rng.integers(0, 37, 64)] += np.float32(1e-30)
    drawn = port.to_numpy(draw(port.xp, handed(port, values), handed(port, np.full((1, 64), u))))
    raced = port.to_numpy(
        race(port.xp, handed(port, values), handed(port, words(0, Stream.NOISE, np.arange(64))[None]))
    )
    for found in (drawn, raced):
        assert (np.take_along_axis(values, found[..., None].astype(np.int64), axis=-1) > 0).all()


def test_noise_is_the_same_on_every_port(port: Port) -> None:
    keys = np.stack([words(seed, Stream.NOISE, np.array([0, 5, 2**31, 2**40])) for seed in (0, 2**64 - 1)])
    like = np.zeros((2, 4, 1000), dtype=np.float32)
    found = port.to_numpy(noise(port.xp, handed(port, like), handed(port, keys)))
    assert found.tobytes() == noise(np, like, keys).tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_policies_say_what_they_say_on_numpy(port: Port, kind: str, size: int) -> None:
    """Uniforms that fall between two libraries' roundings would be a matter of luck; these do not."""
    blocks = some_blocks(40, size, 11)
    given = {name: handed(port, values) for name, values in blocks.items()}
    assert verdicts(KINDS[kind], port.xp, given, port.to_numpy) == verdicts(KINDS[kind], np, blocks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_policies_take_half_precision(port: Port, kind: str, dtype: str) -> None:
    need_dtype(port, dtype)
    given = {name: handed(port, values, dtype) for name, values in some_blocks(40, 3, 11).items()}
    counts, tokens = verdicts(KINDS[kind], port.xp, given, port.to_numpy)
    assert set(counts) <= {0, 1, 2}
    assert set(tokens) <= set(range(11))


# --- text ---

TEXTS = {
    "inverse": [280, 344, 832, 260, 323, 1221, 2024, 84, 339, 13, 289, 362, 301, 261, 367, 34],
    "gumbel": [351, 290, 302, 442, 1983, 268, 749, 1796, 81, 472, 15, 53, 1735, 685, 742, 302],
}
"""What tiny-code says after PROMPT at temperature 0.9 from seed 3: the same on every port, since no choice is near."""

PROMPT = "class Stack:\n    def __init__(self):"


@pytest.mark.parametrize("kind", ["inverse", "gumbel"])
def test_p07_one_text_from_one_seed(port: Port, kind: Noise) -> None:
    """P07: on every port, at every block size, with and without a draft."""
    pair = dflash_fn.load_zoo("tiny-code", port=port)
    state = dflash_fn.prefill(pair, PROMPT, seed=3, width=16)
    taus = []
    plan: list[tuple[int, Drafts]] = [(1, "shared"), (2, "shared"), (4, "independent"), (8, "shared"), (16, "argmax")]
    for size, drafts in plan:
        made = match(Sampling(0.9), noise=kind, drafts=drafts)
        found = run(state, pair, max_new_tokens=12, policy=made, block_size=size)
        assert list(found.emitted[0]) == TEXTS[kind][:12], (size, drafts)
        taus.append(12 / len(found.infos))
    assert max(taus) > 1.05


def test_seeds_and_positions_make_different_texts(port: Port) -> None:
    pair = dflash_fn.load_zoo("tiny-code", port=port)
    state = dflash_fn.prefill(pair, [PROMPT] * 4, seed=[3, 3, 4, 5])
    found = run(state, pair, max_new_tokens=12, policy=match(Sampling(1.0)))
    assert found.emitted[0] == found.emitted[1]
    assert len(set(found.emitted)) == 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=5)], ids=str)
def test_q_is_what_the_tokens_were_drawn_from(port: Port, checkpoints: Checkpoints, sampling: Sampling) -> None:
    """Soft where the draft draws; 1 at the token where it takes its argmax or a proposer was asked; or None."""
    pair = checkpoints.pair(port, DraftDesign())
    state = dflash_fn.decode(dflash_fn.prefill(pair, [5, 9, 2]), pair, max_new_tokens=1, stop_token_ids=())
    policy = token_rejection(sampling)
    asked = dflash_fn.propose(state, pair, policy=policy)
    tokens, q = port.to_numpy(asked.tokens), port.to_numpy(asked.q)
    own = np.take_along_axis(q, tokens[..., None].astype(np.int64), axis=-1)
    assert np.allclose(q.sum(axis=-1), 1, atol=1e-6)
    assert (own > 0).all()
    assert (own == 1).all() == (sampling == Sampling())
    if sampling != Sampling():
        law = probabilities(np, port.to_numpy(asked.logits), sampling)
        assert np.allclose(q, law, rtol=1e-5, atol=0)
    given = dflash_fn.propose(state, pair, policy=policy, proposer=proposers.at_random(1))
    tokens, q = port.to_numpy(given.tokens), port.to_numpy(given.q)
    assert np.array_equal(q, np.eye(48, dtype=np.float32)[tokens])
    assert port.to_numpy(dflash_fn.propose(state, pair, policy=policy, block_size=1).q).shape == (1, 0, 48)
    assert dflash_fn.propose(state, pair).q is None


@pytest.mark.parametrize("kind", ["token_rejection", "block_verification", "cut"])
def test_decoding_with_rules_that_need_q(port: Port, checkpoints: Checkpoints, kind: str) -> None:
    """One seed, one text; other seeds, other texts; the same in two rows as alone where bits are."""
    pair = checkpoints.pair(port, DraftDesign())
    policy = KINDS[kind]
    state = dflash_fn.prefill(pair, [[5, 9, 2], [5, 9, 2], [7, 1]], seed=[1, 2, 1], exact_rows=True)
    found = run(state, pair, max_new_tokens=10, policy=policy)
    assert run(state, pair, max_new_tokens=10, policy=policy).emitted == found.emitted
    assert found.emitted[0] != found.emitted[1]
    alone = dflash_fn.prefill(pair, [7, 1], seed=1)
    assert run(alone, pair, max_new_tokens=10, policy=policy).emitted[0] == found.emitted[2]


def test_a_stream_that_there_is_not(port: Port, checkpoints: Checkpoints) -> None:
    pair = checkpoints.pair(port, DraftDesign())
    policy = Policy("odd", match().rule, lossless=True, streams=("dice",))
    message = "stream: got 'dice', expected one of: target, draft, accept, recover, noise"
    with pytest.raises(errors.InputError, match=message):
        dflash_fn.decode(dflash_fn.prefill(pair, [1]), pair, policy=policy)


def test_a_stream_that_was_not_declared(port: Port, checkpoints: Checkpoints) -> None:
    """Not a bare KeyError, and not in a wrapper either."""
    pair = checkpoints.pair(port, DraftDesign())
    bare = Policy("odd", match(Sampling(1.0)).rule, lossless=True, streams=("target",))
    message = (
        r"policy 'odd': its rule asks for stream 'noise', which it does not declare; expected streams=\('target', "
    )
    for policy in (bare, budget(bare, 2)):
        with pytest.raises(errors.InputError, match=message):
            dflash_fn.decode(dflash_fn.prefill(pair, [1]), pair, policy=policy)
    drafting = replace(match(Sampling(1.0)).drafting, streams=())
    policy = replace(match(Sampling(1.0)), drafting=drafting)
    with pytest.raises(errors.InputError, match=r"drafting 'race, stream noise': its rule asks for stream 'noise'"):
        dflash_fn.decode(dflash_fn.prefill(pair, [1]), pair, policy=policy)


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", [Sampling(0.7, top_p=0.9), Sampling(1.0), Sampling(1.0, top_p=0.9)], ids=str)
def test_p07_on_smollm2(port: Port, shared: Path, dtype: str, sampling: Sampling) -> None:
    """P07: with a trained draft, block sizes 1 to 16."""
    need_dtype(port, dtype)
    target = zoo.fetch("smollm2-135m").target
    pair = dflash_fn.load_pair(target, shared / "drafts" / "smollm2-135m-starter", port=port, dtype=dtype)
    state = dflash_fn.prefill(pair, "def fibonacci(n):", seed=2, width=16)
    policy = match(sampling)
    plain = decode_plainly(
        dflash_fn.prefill(without_draft(pair), "def fibonacci(n):", seed=2, width=16),
        without_draft(pair),
        24,
        policy=policy,
    )
    for size in (2, 4, 8, 16):
        found = run(state, pair, max_new_tokens=24, policy=policy, block_size=size)
        assert found.emitted == plain.emitted
        assert differing(found.logits[0], plain.logits[0]) == []


SMOLLM2 = {
    "gumbel": [472, 585, 304, 10204, 216, 33, 42, 448, 1003, 304, 198, 3725],
    "inverse": [198, 198, 1604, 3987, 46477, 24, 94, 727, 472, 585, 304, 1758],
}


@pytest.mark.real_model
@pytest.mark.parametrize("kind", ["gumbel", "inverse"])
def test_one_text_on_every_port_on_smollm2(port: Port, kind: Noise) -> None:
    pair = dflash_fn.load_pair(zoo.fetch("smollm2-135m").target, port=port, dtype="float32")
    state = dflash_fn.prefill(pair, "def fibonacci(n):", seed=2, width=4)
    found = run(state, pair, max_new_tokens=12, policy=match(Sampling(1.0), noise=kind))
    assert list(found.emitted[0]) == SMOLLM2[kind]
