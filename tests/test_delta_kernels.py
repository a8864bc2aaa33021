"""The forms of the delta rule against float64: heads that hardly forget, and heads that forget all but the last token.

The operands are those of a layer: queries and keys of length 1, rates within (0, 1), a state that is already full.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_fn.config import DeltaSpec
from dflash_fn.tolerances import UNIT

HEADS, KEY_DIM, VALUE_DIM = 3, 16, 12
DECAYS = {"slow": 1e-3, "usual": 1.0, "fast": 20.0, "faster": 300.0, "at once": 1e5}
"""The largest -log d; every other token hardly forgets, so that what is left between two of them counts."""

LIMIT = 16 * UNIT["float32"] * KEY_DIM**0.5
"""8 for the largest of many (`tolerances`, 5), as for two such sums in turn, relative to the largest element."""

Operands = tuple[np.ndarray, ...]


def operands(tokens: int, largest: float) -> Operands:
    """Draw a state, then q, k, v, log d and b of each token, in float32."""
    rng = np.random.default_rng([tokens, int(largest)])
    state = rng.normal(size=(HEADS, KEY_DIM, VALUE_DIM)) / KEY_DIM**0.5
    q, k = (rng.normal(size=(tokens, HEADS, KEY_DIM)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decays = -rng.uniform(0, largest, (tokens, HEADS))
    decays[1::2] = -1e-3
    made = (state, q, k, rng.normal(size=(tokens, HEADS, VALUE_DIM)), decays, rng.uniform(0, 1, (tokens, HEADS)))
    return tuple(x.astype(np.float32) for x in made)


def exact(parts: Operands) -> tuple[Operands, list[np.ndarray]]:
    """Take the tokens one by one in float64; return outputs, deltas and the last state, and every state."""
    state, q, k, v, decays, rates = (x.astype(np.float64) for x in parts)
    outputs, deltas, states = [], [], [state]
    for slot in range(len(k)):
        kept = np.exp(decays[slot])[:, None, None] * states[-1]
        deltas.append(rates[slot][:, None] * (v[slot] - np.einsum("hkv,hk->hv", kept, k[slot])))
        states.append(kept + k[slot][:, :, None] * deltas[-1][:, None, :])
        outputs.append(np.einsum("hkv,hk->hv", states[-1], q[slot]))
    return (np.stack(outputs), np.stack(deltas), states[-1]), states


def off(found: Any, known: np.ndarray) -> float:
    return float(np.abs(np.asarray(found, dtype=np.float64) - known).max() / np.abs(known).max())


@pytest.fixture(params=["torch", "mlx"])
def kernels(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Return a port's module and how it makes arrays; jax has no form but token by token."""
    maker = {"torch": "torch", "mlx": "mlx.core"}[request.param]
    module = pytest.importorskip(f"dflash_fn_{request.param}.gated_delta", exc_type=ImportError)
    backend: Any = pytest.importorskip(maker)
    return module, backend.tensor if request.param == "torch" else backend.array


def stepped(module: Any, state: Any, *parts: Any) -> tuple[Any, Any, Any]:
    """Take one row's tokens one by one; the torch port takes all rows together."""
    if "torch" not in module.__name__:
        return module.stepped(state, *parts)
    outputs, deltas, (end,) = module.stepped([state], *(part[None] for part in parts))
    return outputs[0], deltas[0], end


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("tokens", [33, 64, 150])
def test_both_forms_are_exact_to_rounding(kernels: tuple[Any, Any], tokens: int, name: str) -> None:
    module, array = kernels
    parts = operands(tokens, DECAYS[name])
    known, _ = exact(parts)
    for made in (stepped(module, *map(array, parts)), module.chunked(*map(array, parts))):
        for found, right in zip(made, known, strict=True):
            assert off(found, right) <= LIMIT


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 149])
def test_the_state_after_some_tokens_of_a_chunk(kernels: tuple[Any, Any], count: int, name: str) -> None:
    module, array = kernels
    parts = operands(150, DECAYS[name])
    state, q, k, v, decays, rates = map(array, parts)
    _, deltas, end = module.chunked(state, q, k, v, decays, rates)
    inputs = array(np.zeros((153, 5), dtype=np.float32))
    tape = module.Tape(module.State(inputs[:3], state), inputs, k, deltas, decays, end)
    assert off(module.replay(tape, count).recurrent, exact(parts)[1][count]) <= LIMIT


@pytest.mark.parametrize("count", [1, 40, 64, 100])
def test_padding_leaves_no_trace(kernels: tuple[Any, Any], count: int) -> None:
    """What follows in a chunk changes no bit of what comes before."""
    module, array = kernels
    parts, others = operands(128, 20.0), operands(128, 300.0)
    padded = [parts[0], *(np.concatenate([x[:count], y[count:]]) for x, y in zip(parts[1:], others[1:], strict=True))]
    alike, known = module.chunked(*map(array, padded)), module.chunked(*map(array, parts))
    for found, right in zip(alike[:2], known[:2], strict=True):
        assert np.array_equal(np.asarray(found)[:count], np.asarray(right)[:count])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spec", [DeltaSpec(2, 4, 64, 64, 4), DeltaSpec(1, 3, 12, 20, 3)], ids=["even", "odd"])
def test_rows_together_have_the_bits_of_each_alone(spec: DeltaSpec, dtype: str) -> None:
    """The torch port takes all rows at once; 40 of them are enough for threads to share them."""
    torch: Any = pytest.importorskip("torch")
    module: Any = pytest.importorskip("dflash_fn_torch.gated_delta", exc_type=ImportError)
    kind, draw = getattr(torch, dtype), torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, generator=draw)

    weights = module.DeltaWeights(
        drawn(spec.kernel, spec.channels), -drawn(spec.value_heads).exp(), drawn(spec.value_heads),
        drawn(spec.value_dim).to(kind),
    )  # fmt: skip
    outputs = spec.channels + spec.values + 2 * spec.value_heads
    for rows, slots in ((2, 8), (40, 1), (40, 5), (3, 70)):
        states = [
            module.State(
                drawn(spec.kernel - 1, spec.channels).to(kind), drawn(spec.value_heads, spec.key_dim, spec.value_dim)
            )
            for _ in range(rows)
        ]
        projected = drawn(rows, slots, outputs).to(kind)
        y, tapes = module.mix(spec, weights, 1e-6, states, projected)
        for row, state in enumerate(states):
            alone, (tape,) = module.mix(spec, weights, 1e-6, [state], projected[row : row + 1])
            assert torch.equal(y.view(rows, slots, -1)[row], alone)
            for count in {1, slots // 2, slots}:
                left, right = module.replay(tapes[row], count), module.replay(tape, count)
                assert torch.equal(left.conv, right.conv)
                assert torch.equal(left.recurrent, right.recurrent)
