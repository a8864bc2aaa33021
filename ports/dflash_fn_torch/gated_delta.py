"""Gated delta nets: a causal convolution, then a state that forgets by a factor and learns by the delta rule.

A value head's state S is [key_dim, value_dim]. A token with query q, key k, value v, decay d and rate b makes of it

    delta = b (v - d S^T k),    S' = d S + k delta^T,    output S'^T q = d S^T q + (k . q) delta.

A verification goes token by token, and `absorb` is all that it does to a state. It keeps a tape of k, delta and log d,
so that `replay` gets the state after any of the tokens by the same operations with the same operands: equal bits. A
prefill chunk is one triangular system for all its deltas (`chunked`), and the state after any of its tokens one
product; there, only the same chunks have the same bits.

States are values: nothing that a state holds is ever written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_fn.config import DeltaSpec
from dflash_fn_torch.attention import MAX_WIDTH
from dflash_fn_torch.ops import rms_norm, sigmoid, silu, softplus

__all__ = ["DeltaWeights", "State", "Tape", "empty", "mix", "replay"]

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

    conv: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class State:
    """What a layer remembers of a row.

    Attributes:
        conv: [kernel - 1, channels], what the convolution saw last, in the model's dtype.
        recurrent: [value_heads, key_dim, value_dim] in float32.
    """

    conv: Tensor
    recurrent: Tensor


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
    inputs: Tensor
    keys: Tensor
    deltas: Tensor
    decays: Tensor
    end: Tensor


def empty(spec: DeltaSpec, dtype: torch.dtype, device: str) -> State:
    """Return the state before the first token."""
    conv = torch.zeros(spec.kernel - 1, spec.channels, dtype=dtype, device=device)
    shape = (spec.value_heads, spec.key_dim, spec.value_dim)
    return State(conv, torch.zeros(shape, dtype=torch.float32, device=device))


def mix(
    spec: DeltaSpec,
    weights: DeltaWeights,
    eps: float,
    states: Sequence[State],
    projected: Float[Tensor, "rows slots outputs"],
) -> tuple[Float[Tensor, "rows*slots values"], tuple[Tape, ...]]:
    """Run rows of tokens through the layer.

    What goes over a token's own numbers takes all rows at once. Products with states, and what is done to them, go row
    by row: an operation of the same shape has the same bits, whatever rows there are beside.

    Args:
        spec: its sizes.
        weights: its weights.
        eps: of the output's norm.
        states: each row's before the tokens.
        projected: queries, keys and values side by side, then the output's gate, then what makes b and d.

    Returns:
        what goes into the output projection, and each row's tape.
    """
    heads, values = spec.value_heads, spec.values
    qkv, gate, rates, steps = projected.split([spec.channels, values, heads, heads], dim=-1)
    inputs = torch.cat([torch.stack([state.conv for state in states]), qkv], dim=1)
    q, k, v = _heads(spec, _convolved(weights.conv, inputs))
    decays = weights.rate * softplus(steps.float() + weights.dt_bias)
    rates = sigmoid(rates.float()).to(rates.dtype).float()
    advance = stepped if projected.shape[1] <= MAX_WIDTH else _chunked_rows
    out, deltas, ends = advance([state.recurrent for state in states], q, k, v, decays, rates)
    y = rms_norm(out.to(projected.dtype), weights.norm, eps).reshape(-1, values)
    tapes = tuple(map(Tape, states, inputs, k, deltas, decays, ends))
    return (y.float() * silu(gate.reshape(-1, values).float())).to(y.dtype), tapes


def replay(tape: Tape, count: int) -> State:
    """Return the state after the first `count` tokens of a tape."""
    if count == 0:
        return tape.start
    size = len(tape.keys)
    conv = tape.inputs[count : count + len(tape.start.conv)].clone()
    if count == size:
        return State(conv, tape.end)
    if size > MAX_WIDTH:
        return State(conv, _after(tape.start.recurrent, tape.keys[:count], tape.deltas[:count], tape.decays[:count]))
    recurrent, factors = tape.start.recurrent.clone(), torch.exp(tape.decays)
    for slot in range(count):
        absorb(recurrent, tape.keys[slot], tape.deltas[slot], factors[slot])
    return State(conv, recurrent)


def absorb(
    state: Float[Tensor, "heads keys values"],
    key: Float[Tensor, "heads keys"],
    delta: Float[Tensor, "heads values"],
    factor: Float[Tensor, " heads"],
) -> None:
    """Make d S + k delta^T of a state that nobody else holds, in place."""
    state.mul_(factor[:, None, None])
    state.addcmul_(key[:, :, None], delta[:, None, :])


def stepped(
    states: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, decays: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Take tokens one by one, each row's state by operations of one shape; return outputs, deltas and states after.

    The loop has what the next token waits for, and no more: a small model spends its time on calls, not on numbers.
    """
    ends, factors = [state.clone() for state in states], torch.exp(decays)
    tokens = [each.unbind(1) for each in (torch.stack([k, q], dim=3), v, rates[..., None], factors[..., None, None])]
    steps = [list(zip(*(each.unbind(0) for each in row), strict=True)) for row in zip(k, factors, strict=True)]
    asked, deltas = [], []
    for slot, (both, value, rate, factor) in enumerate(zip(*tokens, strict=True)):
        read = torch.stack([torch.bmm(two, state) for two, state in zip(both, ends, strict=True)])
        known, wanted = (read * factor).unbind(2)
        delta = (value - known) * rate
        asked.append(wanted)
        deltas.append(delta)
        for row, state in enumerate(ends):
            key, decay = steps[row][slot]
            absorb(state, key, delta[row], decay)
    learnt = torch.stack(deltas, dim=1)
    return torch.stack(asked, dim=1) + (k * q).sum(-1, keepdim=True) * learnt, learnt, ends


def _chunked_rows(
    states: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, decays: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    outputs, deltas, ends = zip(*map(chunked, states, q, k, v, decays, rates), strict=True)
    return torch.stack(outputs), torch.stack(deltas), list(ends)


def chunked(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve for the deltas of `SPAN` tokens at once.

    With D[i, j] = d[j + 1] ... d[i]: (I + L) delta = b (v - D[., 0] S^T k), where L[i, j] = b[i] D[i, j] k[i] . k[j]
    for j < i. No quotient of decays is taken, and no difference of sums of their logarithms either: see `_between`.
    """
    outputs, deltas = [], []
    for first in range(0, len(k), SPAN):
        part = slice(first, first + SPAN)
        queries, keys, values = (x[part].transpose(0, 1) for x in (q, k, v))
        logs, rate = decays[part].t(), rates[part].t()[:, :, None]
        between, since = _between(logs), torch.exp(logs.cumsum(-1))[:, :, None]
        system = torch.tril(keys @ keys.mT * between, -1) * rate
        known = rate * (values - since * (keys @ state))
        delta = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        outputs.append((since * (queries @ state) + (queries @ keys.mT * between) @ delta).transpose(0, 1))
        deltas.append(delta.transpose(0, 1))
        state = _after(state, k[part], deltas[-1], decays[part])
    return torch.cat(outputs), torch.cat(deltas), state


def _between(logs: Float[Tensor, "heads tokens"]) -> Float[Tensor, "heads tokens tokens"]:
    """Return D[., i, j] = d[j + 1] ... d[i] for j <= i, and 0 elsewhere.

    Each logarithm is a sum of its own. Where heads forget fast, a difference of two sums from the span's beginning has
    the rounding of those sums, which may be a thousand times what is left.
    """
    size = logs.shape[-1]
    return torch.exp(logs[:, :, None].expand(-1, -1, size).tril(-1).cumsum(-2)).tril()


def _after(state: Tensor, keys: Tensor, deltas: Tensor, decays: Tensor) -> Tensor:
    """Return d[1] ... d[n] S + sum of d[i + 1] ... d[n] k[i] delta[i]^T; logarithms are summed from the end."""
    logs = decays.flip(0).cumsum(0).flip(0).t()
    rest = torch.exp(torch.nn.functional.pad(logs[:, 1:], (0, 1)))[:, :, None]
    learnt = (keys.transpose(0, 1) * rest).mT @ deltas.transpose(0, 1)
    return torch.exp(logs[:, 0])[:, None, None] * state + learnt


def _convolved(weight: Float[Tensor, "kernel channels"], inputs: Float[Tensor, "rows tokens channels"]) -> Tensor:
    """Convolve along the tokens, rounded once to the dtype, and apply silu; [R, S, channels] in float32."""
    size = inputs.shape[1] - len(weight) + 1
    seen = inputs.float()
    total = seen[:, :size] * weight[0]
    for place in range(1, len(weight)):
        total = total + seen[:, place : place + size] * weight[place]
    return silu(total.to(inputs.dtype).float()).to(inputs.dtype).float()


def _heads(spec: DeltaSpec, mixed: Float[Tensor, "rows slots channels"]) -> tuple[Tensor, Tensor, Tensor]:
    """Split into heads, one query and key a value head, both of length 1, the query divided by sqrt(key_dim)."""
    q, k, v = mixed.split([spec.keys, spec.keys, spec.values], dim=-1)
    q, k = (x.reshape(*x.shape[:2], spec.key_heads, spec.key_dim) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    group = spec.value_heads // spec.key_heads
    q, k = (q * spec.key_dim**-0.5).repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    return q, k, v.reshape(*v.shape[:2], spec.value_heads, spec.value_dim)
