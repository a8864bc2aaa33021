"""Gated delta nets: a causal convolution, then a state that forgets by a factor and learns by the delta rule.

A value head's state S is [key_dim, value_dim]. A token with query q, key k, value v, decay d and rate b makes of it

    delta = b (v - d S^T k),    S' = d S + k delta^T,    output S'^T q = d S^T q + (k . q) delta.

A verification goes token by token, and `absorb` is all that it does to a state. It keeps a tape of k, delta and log d,
so that `replay` gets the state after any of the tokens by the same operations with the same operands: equal bits. On
Metal, a prefill chunk is one triangular system for all its deltas (`chunked`); on a CPU it goes token by token too. The
state after some of its tokens is one product; there, only the same chunks have the same bits.

States are values: nothing that a state holds is ever written to.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from jaxtyping import Float

from dflash_fn.config import DeltaSpec
from dflash_fn_mlx.attention import MAX_WIDTH
from dflash_fn_mlx.ops import rms_norm, silu

__all__ = ["DeltaWeights", "State", "Tape", "arrays_of", "empty", "mix", "replay"]

SPAN = 64
"""Tokens of a prefill chunk that are solved for together."""

NORM_EPS = 1e-6
"""Added to a query's or key's sum of squares."""


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of a gated delta net but for its projections.

    Attributes:
        conv: [kernel, channels] in float32, the last row for the current token.
        rate: [value_heads] in float32, -exp(A_log).
        dt_bias: [value_heads] in float32.
        norm: [value_dim].
    """

    conv: mx.array
    rate: mx.array
    dt_bias: mx.array
    norm: mx.array


@dataclass(frozen=True, eq=False, slots=True)
class State:
    """What a layer remembers of a row.

    Attributes:
        conv: [kernel - 1, channels], what the convolution saw last, in the model's dtype.
        recurrent: [value_heads, key_dim, value_dim] in float32.
    """

    conv: mx.array
    recurrent: mx.array


@dataclass(frozen=True, eq=False, slots=True)
class Tape:
    """What a layer did to a row's state in a pass over S tokens.

    Attributes:
        start: the state before.
        inputs: [kernel - 1 + S, channels], what the convolution saw.
        keys: [S, value_heads, key_dim].
        deltas: [S, value_heads, value_dim].
        decays: [S, value_heads], log d.
        end: the recurrent state after all of them.
    """

    start: State
    inputs: mx.array
    keys: mx.array
    deltas: mx.array
    decays: mx.array
    end: mx.array


def empty(spec: DeltaSpec, dtype: mx.Dtype) -> State:
    """Return the state before the first token."""
    made = State(
        mx.zeros((spec.kernel - 1, spec.channels), dtype), mx.zeros((spec.value_heads, spec.key_dim, spec.value_dim))
    )
    mx.eval(made.conv, made.recurrent)
    return made


def arrays_of(tape: Tape) -> tuple[mx.array, ...]:
    """List what a pass made of a tape."""
    return tape.inputs, tape.keys, tape.deltas, tape.decays, tape.end


def mix(
    spec: DeltaSpec, weights: DeltaWeights, eps: float, state: State, projected: Float[mx.array, "slots outputs"]
) -> tuple[Float[mx.array, "slots values"], Tape]:
    """Run a row's tokens through the layer.

    Args:
        spec: its sizes.
        weights: its weights.
        eps: of the output's norm.
        state: before the tokens.
        projected: queries, keys and values side by side, then the output's gate, then what makes b and d.

    Returns:
        what goes into the output projection, and the tape.
    """
    channels, values = spec.channels, spec.values
    ends = [channels, channels + values, channels + values + spec.value_heads]
    qkv, gate, rates, steps = mx.split(projected, ends, axis=-1)
    inputs = mx.concatenate([state.conv, qkv])
    q, k, v = _heads(spec, _convolved(weights.conv, inputs))
    decays = weights.rate * mx.logaddexp(steps.astype(mx.float32) + weights.dt_bias, 0.0)
    rates = mx.sigmoid(rates).astype(mx.float32)
    # a loop over a chunk is thousands of small kernels on Metal; on a CPU it is as fast as the system, or faster
    solved = len(projected) > MAX_WIDTH and mx.default_device() == mx.gpu
    advance = chunked if solved else stepped
    out, deltas, end = advance(state.recurrent, q, k, v, decays, rates)
    y = rms_norm(out.astype(projected.dtype), weights.norm, eps).reshape(-1, values)
    tape = Tape(state, inputs, k, deltas, decays, end)
    return (y.astype(mx.float32) * silu(gate.astype(mx.float32))).astype(y.dtype), tape


def replay(tape: Tape, count: int) -> State:
    """Return the state after the first `count` tokens of a tape."""
    if count == 0:
        return tape.start
    size = len(tape.keys)
    conv = mx.contiguous(tape.inputs[count : count + len(tape.start.conv)])
    if count == size:
        return State(conv, tape.end)
    if size > MAX_WIDTH:
        return State(conv, _after(tape.start.recurrent, tape.keys[:count], tape.deltas[:count], tape.decays[:count]))
    recurrent, factors = tape.start.recurrent, mx.exp(tape.decays)
    for slot in range(count):
        recurrent = absorb(recurrent, tape.keys[slot], tape.deltas[slot], factors[slot])
    return State(conv, recurrent)


def absorb(
    state: Float[mx.array, "heads keys values"],
    key: Float[mx.array, "heads keys"],
    delta: Float[mx.array, "heads values"],
    factor: Float[mx.array, " heads"],
) -> Float[mx.array, "heads keys values"]:
    """Return d S + k delta^T."""
    return state * factor[:, None, None] + key[:, :, None] * delta[:, None, :]


def stepped(
    state: mx.array, q: mx.array, k: mx.array, v: mx.array, decays: mx.array, rates: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Take tokens one by one, each with operations of the same shapes; return outputs, deltas and the state after."""
    factors, both = mx.exp(decays), mx.stack([k, q], axis=2)
    outputs, deltas = [], []
    for slot in range(len(k)):
        seen = (both[slot] @ state) * factors[slot][:, None, None]
        delta = (v[slot] - seen[:, 0]) * rates[slot][:, None]
        outputs.append(seen[:, 1] + (k[slot] * q[slot]).sum(-1, keepdims=True) * delta)
        deltas.append(delta)
        state = absorb(state, k[slot], delta, factors[slot])
    return mx.stack(outputs), mx.stack(deltas), state


def chunked(
    state: mx.array, q: mx.array, k: mx.array, v: mx.array, decays: mx.array, rates: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Solve for the deltas of `SPAN` tokens at once.

    With D[i, j] = d[j + 1] ... d[i]: (I + L) delta = b (v - D[., 0] S^T k), where L[i, j] = b[i] D[i, j] k[i] . k[j]
    for j < i. No quotient of decays is taken, and no difference of sums of their logarithms either: see `_between`.
    The system is solved on the CPU, where alone mlx has a solver.
    """
    outputs, deltas = [], []
    for first in range(0, len(k), SPAN):
        part = slice(first, first + SPAN)
        queries, keys, values = (x[part].swapaxes(0, 1) for x in (q, k, v))
        logs, rate = decays[part].T, rates[part].T[:, :, None]
        between, since = _between(logs), mx.exp(mx.cumsum(logs, axis=-1))[:, :, None]
        system = mx.tril(keys @ keys.swapaxes(1, 2) * between, -1) * rate + mx.eye(logs.shape[-1])
        known = rate * (values - since * (keys @ state))
        delta = mx.linalg.solve_triangular(system, known, upper=False, stream=mx.cpu)
        outputs.append((since * (queries @ state) + (queries @ keys.swapaxes(1, 2) * between) @ delta).swapaxes(0, 1))
        deltas.append(delta.swapaxes(0, 1))
        state = _after(state, k[part], deltas[-1], decays[part])
    return mx.concatenate(outputs), mx.concatenate(deltas), state


def _between(logs: Float[mx.array, "heads tokens"]) -> Float[mx.array, "heads tokens tokens"]:
    """Return D[., i, j] = d[j + 1] ... d[i] for j <= i, and 0 elsewhere.

    Each logarithm is a sum of its own. Where heads forget fast, a difference of two sums from the span's beginning has
    the rounding of those sums, which may be a thousand times what is left.
    """
    place = mx.arange(logs.shape[-1])
    sums = mx.cumsum(mx.where(place[:, None] > place, logs[:, :, None], 0.0), axis=-2)
    return mx.where(place[:, None] >= place, mx.exp(sums), 0.0)


def _after(state: mx.array, keys: mx.array, deltas: mx.array, decays: mx.array) -> mx.array:
    """Return d[1] ... d[n] S + sum of d[i + 1] ... d[n] k[i] delta[i]^T; logarithms are summed from the end."""
    logs = mx.cumsum(decays.T, axis=-1, reverse=True)
    rest = mx.exp(mx.pad(logs[:, 1:], [(0, 0), (0, 1)]))[:, :, None]
    learnt = (keys.swapaxes(0, 1) * rest).swapaxes(1, 2) @ deltas.swapaxes(0, 1)
    return mx.exp(logs[:, 0])[:, None, None] * state + learnt


def _convolved(weight: Float[mx.array, "kernel channels"], inputs: Float[mx.array, "tokens channels"]) -> mx.array:
    """Convolve along the tokens, rounded once to the dtype, and apply silu; [S, channels] in float32."""
    size = len(inputs) - len(weight) + 1
    seen = inputs.astype(mx.float32)
    total = seen[:size] * weight[0]
    for place in range(1, len(weight)):
        total = total + seen[place : place + size] * weight[place]
    return silu(total.astype(inputs.dtype).astype(mx.float32)).astype(inputs.dtype).astype(mx.float32)


def _heads(spec: DeltaSpec, mixed: Float[mx.array, "slots channels"]) -> tuple[mx.array, mx.array, mx.array]:
    """Split into heads, one query and key a value head, both of length 1, the query divided by sqrt(key_dim)."""
    q, k, v = mx.split(mixed, [spec.keys, 2 * spec.keys], axis=-1)
    q, k = (x.reshape(len(mixed), spec.key_heads, spec.key_dim) for x in (q, k))
    q, k = (x * mx.rsqrt((x * x).sum(-1, keepdims=True) + NORM_EPS) for x in (q, k))
    group = spec.value_heads // spec.key_heads
    q, k = mx.repeat(q * spec.key_dim**-0.5, group, axis=1), mx.repeat(k, group, axis=1)
    return q, k, v.reshape(len(mixed), spec.value_heads, spec.value_dim)
