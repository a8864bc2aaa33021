"""Rotary position embedding: tables of cosines and sines, computed once on the host for every port.

A row of a table is a function of its position alone, so a token gets the same bits in a prefill, in a block and in a
batch, on every port.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from dflash_fn import errors
from dflash_fn.config.specs import RopeSpec

__all__ = ["inverse_frequencies", "rope_tables"]


def rope_tables(rope: RopeSpec, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tabulate the rotations of positions.

    With n a position and f[i] an inverse frequency: cos[..., i] = a cos(n f[i]) and sin[..., i] = a sin(n f[i]), where
    a is `rope.attention_factor`. Dimension i of a head is turned together with dimension i + dim // 2.

    The angle n f[i] is a float32 product, as transformers computes it, for those are the angles that models were
    trained with: at n = 100000 it is up to 0.004 away from the exact product. Cosine and sine of that angle are
    evaluated in float64 and rounded once, so that they do not depend on a library's float32 cosine.

    Args:
        rope: which embedding; its `dim` is even.
        positions: integers of any shape, absolute token indices; exact below 2**24.

    Returns:
        cos and sin: float32, shape `positions.shape + (rope.dim // 2,)`.

    Source:
        Su et al. 2104.09864, equation 34, in the half-split layout of Hugging Face checkpoints instead of adjacent
        pairs.

    Example:
        >>> cos, sin = rope_tables(RopeSpec("default", theta=10000.0, dim=4), np.array([[0, 1, 2]]))
        >>> cos.shape, cos.dtype.name
        ((1, 3, 2), 'float32')
        >>> [f"{value:.4f}" for value in cos[0, 2]], [f"{value:.4f}" for value in sin[0, 2]]
        (['-0.4161', '0.9998'], ['0.9093', '0.0200'])
    """
    angles = positions.astype(np.float32)[..., None] * inverse_frequencies(rope)
    exact = angles.astype(np.float64)
    factor = np.float32(rope.attention_factor)
    return np.cos(exact).astype(np.float32) * factor, np.sin(exact).astype(np.float32) * factor


@functools.lru_cache(maxsize=64)
def inverse_frequencies(rope: RopeSpec) -> np.ndarray:
    """Compute by how many radians each pair of dimensions turns from one position to the next.

    f[i] = theta ** (-2 i / dim), and then, by `rope.kind`: as it is (`default`), divided by the factor (`linear`), or
    divided for slow pairs and kept for fast ones, with a ramp between them (`llama3`, `yarn`).

    All operations are in float32 and in transformers' order, but for the power, which is evaluated in float64 and
    rounded. torch's own float32 power is within one unit in the last place of that, and numpy's within two.

    Args:
        rope: which embedding.

    Returns:
        float32, shape [dim // 2], cached and read only.

    Raises:
        ConfigError: a kind that is none of these four.

    Source:
        `default`: Su et al. 2104.09864, section 3.2.2. `linear`: Chen et al. 2306.15595, equation 4. `llama3`: the
        rule that Llama 3.1's checkpoints were published with. `yarn`: Peng et al. 2309.00071, NTK-by-parts; as in the
        authors' code, the ramp is linear in the pair's index, not in its number of turns as in the paper, and the
        temperature is `rope.attention_factor`.

    Example:
        >>> inverse_frequencies(RopeSpec("linear", theta=16.0, dim=4, factor=2.0)).tolist()
        [0.5, 0.125]
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    # rounded through float32 as torch does, so that an odd theta such as 123456.789 means the same number
    power = np.power(np.float64(np.float32(rope.theta)), exponents.astype(np.float64)).astype(np.float32)
    frequencies = scale(rope, power).astype(np.float32)
    frequencies.flags.writeable = False
    return frequencies


def scale(rope: RopeSpec, power: np.ndarray) -> np.ndarray:
    """Turn theta ** (2 i / dim) into inverse frequencies by the rule of `rope.kind`."""
    one = np.float32(1.0)
    if rope.kind == "default":
        return one / power
    if rope.kind == "linear":
        return one / power / np.float32(rope.factor)
    if rope.kind == "llama3":
        return llama3(rope, one / power)
    if rope.kind == "yarn":
        return yarn(rope, power)
    raise errors.ConfigError(f"rope kind: got {rope.kind!r}, expected default, linear, llama3 or yarn")


def llama3(rope: RopeSpec, frequencies: np.ndarray) -> np.ndarray:
    """Divide the frequencies that turn less than `low_freq_factor` times in the original context; ramp above them."""
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    one, factor = np.float32(1.0), np.float32(rope.factor)
    # torch divides a number by a tensor as reciprocal times number; the ramp would magnify the difference to 9 units
    wavelength = one / frequencies * np.float32(2.0 * math.pi)
    weight = (one / wavelength * np.float32(original) - np.float32(low)) / np.float32(high - low)
    ramp = (one - weight) * frequencies / factor + weight * frequencies
    slow, fast = wavelength > original / low, wavelength < original / high
    return np.where(slow, frequencies / factor, np.where(fast, frequencies, ramp))


def yarn(rope: RopeSpec, power: np.ndarray) -> np.ndarray:
    """Keep pairs that turn more than `beta_fast` times in the original context, divide those below `beta_slow`."""
    low, high = correction_dim(rope, rope.beta_fast), correction_dim(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001  # as in the authors' code: a step instead of a division by zero
    pairs = np.arange(rope.dim // 2, dtype=np.float32)
    kept = np.float32(1.0) - np.clip((pairs - np.float32(low)) / np.float32(width), 0.0, 1.0)
    divided = np.float32(1.0) / (np.float32(rope.factor) * power)
    return divided * (np.float32(1.0) - kept) + np.float32(1.0) / power * kept


def correction_dim(rope: RopeSpec, turns: float) -> float:
    """Solve for the pair, a fraction, that turns `turns` times in the original context."""
    wavelengths = rope.original_max_position / (turns * 2.0 * math.pi)
    return rope.dim * math.log(wavelengths) / (2.0 * math.log(rope.theta))
