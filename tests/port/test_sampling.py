"""Sampling on every port: one slot's bits in any shape, nothing of weight 0, the same noise, the same text."""

from __future__ import annotations

import numpy as np
import pytest

import dflash_fn
from dflash_fn import match, policies
from dflash_fn.draws import draw, noise, race, total
from dflash_fn.policies import Policy
from dflash_fn.port import Port
from dflash_fn.rng import Stream, uniforms, words
from dflash_fn.sampling import Sampling, weights
from tests.helpers.fixtures import DTYPES, need_dtype
from tests.helpers.runs import fetch, run

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


KINDS = {
    "greedy": match(),
    "inverse": match(Sampling(0.8)),
    "gumbel": match(Sampling(0.8, top_p=0.9), noise="gumbel"),
    "token_rejection": policies.token_rejection(Sampling(1.0)),
    "block_verification": policies.block_verification(Sampling(1.0)),
    "typical": policies.typical(Sampling(1.0)),
    "relaxed": policies.relaxed(top_k=3),
    "forced": policies.forced(2),
    "budget": policies.budget(policies.block_verification(Sampling(1.0)), 2),
    "cut": policies.confidence_cut(policies.token_rejection(Sampling(1.0)), 0.3),
}


def some_blocks(rows: int, size: int, vocab: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rows, size, vocab])
    logits = rng.normal(size=(rows, size, vocab)).astype(np.float32) * 2
    near = np.exp(logits[:, :-1] + rng.normal(size=(rows, size - 1, vocab)).astype(np.float32))
    slots = np.arange(rows * size).reshape(rows, size)
    return {
        "drafted": logits[:, :-1].argmax(axis=-1) if size > 1 else np.zeros((rows, 0), dtype=np.int64),
        "logits": logits,
        "q": (near / near.sum(axis=-1, keepdims=True)).astype(np.float32),
        "target": uniforms(2, Stream.TARGET, slots.ravel()).reshape(rows, size),
        "accept": uniforms(2, Stream.ACCEPT, slots.ravel()).reshape(rows, size),
        "recover": uniforms(2, Stream.RECOVER, slots.ravel()).reshape(rows, size),
        "noise": words(2, Stream.NOISE, slots.ravel()).reshape(rows, size, 2),
    }


def verdicts(
    policy: Policy, port: Port | None, blocks: dict[str, np.ndarray], dtype: str = "float32"
) -> list[list[int]]:
    given = {name: values if port is None else handed(port, values, dtype) for name, values in blocks.items()}
    numbers = {name: given[name] for name in policy.streams}
    q = given["q"] if policy.needs_q else None
    made = policy.rule(np if port is None else port.xp, given["drafted"], given["logits"], q, numbers)
    arrays = (made.num_accepted, made.next_token)
    return [(np.asarray(array) if port is None else port.to_numpy(array)).tolist() for array in arrays]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_policies_say_what_they_say_on_numpy(port: Port, kind: str, size: int) -> None:
    """Uniforms that fall between two libraries' roundings would be a matter of luck; these do not."""
    blocks = some_blocks(40, size, 11)
    assert verdicts(KINDS[kind], port, blocks) == verdicts(KINDS[kind], None, blocks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_policies_take_half_precision(port: Port, kind: str, dtype: str) -> None:
    need_dtype(port, dtype)
    counts, tokens = verdicts(KINDS[kind], port, some_blocks(40, 3, 11), dtype)
    assert set(counts) <= {0, 1, 2}
    assert set(tokens) <= set(range(11))


# --- text ---

TEXTS = {
    "inverse": [338, 521, 575, 60, 18, 1250, 1967, 9, 18, 17, 10, 427, 222, 18, 289, 260],
    "gumbel": [1448, 45, 1568, 546, 48, 1394, 365, 64, 38, 46, 852, 54, 45, 42, 1257, 54],
}
"""What tiny-code says after PROMPT at temperature 0.9 from seed 3: the same on every port, since no choice is near."""

PROMPT = "class Stack:\n    def __init__(self):"


@pytest.mark.parametrize("kind", ["inverse", "gumbel"])
def test_p07_one_text_from_one_seed(port: Port, kind: str) -> None:
    """P07: on every port, at every block size, with and without a draft."""
    pair = dflash_fn.load_zoo("tiny-code", port=port)
    state = dflash_fn.prefill(pair, PROMPT, seed=3, width=16)
    taus = []
    for size, drafts in [(1, "shared"), (2, "shared"), (4, "independent"), (8, "shared"), (16, "argmax")]:
        made = match(Sampling(0.9), noise=kind, drafts=drafts)  # pyright: ignore[reportArgumentType]
        found = run(state, pair, max_new_tokens=12, policy=made, block_size=size)
        assert list(found.emitted[0]) == TEXTS[kind][:12], (size, drafts)
        taus.append(12 / len(found.infos))
    assert max(taus) > 1.1


def test_seeds_and_positions_make_different_texts(port: Port) -> None:
    pair = dflash_fn.load_zoo("tiny-code", port=port)
    state = dflash_fn.prefill(pair, [PROMPT] * 4, seed=[3, 3, 4, 5])
    found = run(state, pair, max_new_tokens=12, policy=match(Sampling(1.0)))
    assert found.emitted[0] == found.emitted[1]
    assert len(set(found.emitted)) == 3
