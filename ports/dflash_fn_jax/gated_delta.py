"""Gated delta nets, a token at a time: a convolution, then a state that forgets by a factor and learns by a rule.

A pass keeps what goes into the layer's two states. The state after fewer of its tokens is the same compiled function
over fewer turns (`advance`), so that it has the bits of never having seen the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_fn.config import DeltaSpec
from dflash_fn_jax.ops import Norm, Projection, each, gated_mlp, project, rms_norm, wide

__all__ = ["DeltaNet", "State", "Tape", "advance", "empty", "layer_pass", "replay"]

NORM_EPS = 1e-6
"""Added to a query's or key's sum of squares."""


class DeltaNet(eqx.Module):
    """Weights of a layer: a gated delta net and its MLP.

    Attributes:
        spec: sizes.
        input_norm: before everything.
        qkv: onto what the convolution sees.
        gate: onto the output's gate.
        rates: onto what makes b, a number a value head.
        steps: onto what makes d.
        conv: [kernel, channels] in float32 or float64, the last row for the current token.
        rate: [value_heads], -exp(A_log), in the same.
        dt_bias: [value_heads], in the same.
        norm: of the output, a head.
        out: output projection.
        post_norm: before the MLP.
        mlp: gate, up and down.
    """

    spec: DeltaSpec = eqx.field(static=True)
    input_norm: Norm
    qkv: Projection
    gate: Projection
    rates: Projection
    steps: Projection
    conv: Array
    rate: Array
    dt_bias: Array
    norm: Norm
    out: Projection
    post_norm: Norm
    mlp: tuple[Projection, Projection, Projection]


class State(eqx.Module):
    """What a layer remembers of a row: [kernel - 1, channels] and [value_heads, key_dim, value_dim], one a state."""

    conv: Array
    recurrent: Array


@dataclass(frozen=True, eq=False, slots=True)
class Tape:
    """What went into a layer's states: its weights, the state before, and [tokens, ...] inputs of `advance`."""

    weights: DeltaNet
    start: State
    inputs: tuple[Array, Array, Array]


def empty(spec: DeltaSpec, dtype: str) -> State:
    """Return the state before the first token."""
    conv = jnp.zeros((spec.kernel - 1, spec.channels), dtype)
    return State(conv, jnp.zeros((spec.value_heads, spec.key_dim, spec.value_dim), wide(conv.dtype)))


def replay(tape: Tape, count: int) -> State:
    """Return the state after the first `count` tokens of a tape."""
    return advance(tape.weights, tape.start, jnp.int32(count), *tape.inputs)[1] if count else tape.start


def layer_pass(
    weights: DeltaNet, state: State, count: Int[Array, ""], x: Float[Array, "tokens hidden"]
) -> tuple[Float[Array, "tokens hidden"], State, Tape]:
    """Run one layer over a chunk; return its output, the state after, and the tape."""
    inputs, gate = projected(weights, count, x)
    out, end = advance(weights, state, count, *inputs)
    return finished(weights, count, x, out, gate), end, Tape(weights, state, inputs)


@eqx.filter_jit
def projected(
    weights: DeltaNet, count: Int[Array, ""], x: Float[Array, "tokens hidden"]
) -> tuple[tuple[Array, Array, Array], Array]:
    """Return what goes into the states, and the output's gate."""

    def one(x):
        h = rms_norm(weights.input_norm, x)
        made = tuple(project(projection, h) for projection in (weights.qkv, weights.rates, weights.steps))
        return made, project(weights.gate, h)

    return each(one, count, x)


@eqx.filter_jit
def advance(
    weights: DeltaNet,
    state: State,
    count: Int[Array, ""],
    qkv: Float[Array, "tokens channels"],
    rates: Float[Array, "tokens heads"],
    steps: Float[Array, "tokens heads"],
) -> tuple[Float[Array, "tokens heads values"], State]:
    """Take `count` tokens in turn; return the outputs and the state after them."""

    def turn(index, carry):
        outputs, state = carry
        out, state = step(weights, state, qkv[index], rates[index], steps[index])
        return outputs.at[index].set(out), state

    sizes = weights.spec
    outputs = jnp.zeros((len(qkv), sizes.value_heads, sizes.value_dim), qkv.dtype)
    return jax.lax.fori_loop(jnp.zeros_like(count), count, turn, (outputs, state))


def step(
    weights: DeltaNet,
    state: State,
    qkv: Float[Array, " channels"],
    rates: Float[Array, " heads"],
    steps: Float[Array, " heads"],
) -> tuple[Float[Array, "heads values"], State]:
    """S' = d S + k (b (v - d S^T k))^T, and what a query takes out of it."""
    high = jax.lax.Precision.HIGHEST
    seen = jnp.concatenate([state.conv, qkv[None]])
    q, k, v = heads(weights, seen)
    decay = jnp.exp(weights.rate * jax.nn.softplus(steps.astype(v.dtype) + weights.dt_bias))
    kept = decay[:, None, None] * state.recurrent
    known = jnp.einsum("hkv,hk->hv", kept, k, precision=high)
    delta = jax.nn.sigmoid(rates).astype(v.dtype)[:, None] * (v - known)
    recurrent = kept + k[:, :, None] * delta[:, None, :]
    out = jnp.einsum("hkv,hk->hv", recurrent, q, precision=high)
    return out.astype(qkv.dtype), State(seen[1:], recurrent)


def heads(weights: DeltaNet, seen: Float[Array, "kernel channels"]) -> tuple[Array, Array, Array]:
    """Convolve, rounded once to the dtype, and split: queries and keys of length 1, one a value head."""
    sizes, dtype = weights.spec, seen.dtype
    mixed = sum(seen[i].astype(wide(dtype)) * weights.conv[i] for i in range(sizes.kernel))
    mixed = jax.nn.silu(jnp.asarray(mixed).astype(dtype)).astype(wide(dtype))
    q, k, v = jnp.split(mixed, [sizes.keys, 2 * sizes.keys])
    q, k = (unit(x.reshape(sizes.key_heads, sizes.key_dim)) for x in (q, k))
    group = sizes.value_heads // sizes.key_heads
    q, k = jnp.repeat(q * sizes.key_dim**-0.5, group, axis=0), jnp.repeat(k, group, axis=0)
    return q, k, v.reshape(sizes.value_heads, sizes.value_dim)


def unit(x: Float[Array, "heads dim"]) -> Float[Array, "heads dim"]:
    """Return vectors of length 1."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPS)


@eqx.filter_jit
def finished(
    weights: DeltaNet,
    count: Int[Array, ""],
    x: Float[Array, "tokens hidden"],
    out: Float[Array, "tokens heads values"],
    gate: Float[Array, "tokens all_values"],
) -> Float[Array, "tokens hidden"]:
    """Normalise and gate what came out of the states, project it, and run the MLP."""

    def one(x, out, gate):
        y = rms_norm(weights.norm, out).reshape(-1)
        y = (y.astype(wide(y.dtype)) * jax.nn.silu(gate.astype(wide(gate.dtype)))).astype(x.dtype)
        x = x + project(weights.out, y)
        return x + gated_mlp(*weights.mlp, rms_norm(weights.post_norm, x))

    return each(one, count, x, out, gate)
