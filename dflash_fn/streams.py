"""The random numbers of a step: which counters of which streams belong to a block, handed to the port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dflash_fn import errors, rng
from dflash_fn.records import Array, DecodeState, Pair

__all__ = ["Streams", "numbers"]

BY_POSITION = (rng.Stream.TARGET, rng.Stream.NOISE)
"""Streams whose numbers belong to the position that a slot's token will have, in whatever block it stands."""


class Streams(dict[str, Array]):
    """A step's numbers by stream, for one rule; a stream that it did not declare is an error that names it.

    Args:
        owner: whose rule reads them, such as `policy 'mine'`.
        known: the numbers.

    Raises:
        InputError: on asking for another stream.
    """

    def __init__(self, owner: str, known: Mapping[str, Array]) -> None:
        dict.__init__(self, known)
        self.owner = owner

    def __missing__(self, name: str) -> Array:
        raise errors.InputError(
            f"{self.owner}: its rule asks for stream {name!r}, which it does not declare; expected "
            f"streams={(*self, name)!r}"
        )


def numbers(state: DecodeState, pair: Pair, streams: Sequence[str], size: int) -> Mapping[str, Array]:
    """Return the numbers of a block's first `size` slots.

    Args:
        state: whose rows have seeds, and whose next tokens have positions.
        pair: whose port takes the numbers.
        streams: names of `rng.Stream`s, in small letters.
        size: how many slots.

    Returns:
        by name: [R, size] numbers in [0, 1); for `noise`, [R, size, 2] integers below 2 ** 31.

    Raises:
        InputError: no such stream.
    """
    return {name: _of(state, pair, _stream(name), size) for name in streams}


def _of(state: DecodeState, pair: Pair, stream: rng.Stream, size: int) -> Array:
    make = rng.words if stream is rng.Stream.NOISE else rng.uniforms
    rows = []
    for seed, tokens in zip(state.seed, state.tokens, strict=True):
        first = len(tokens) if stream in BY_POSITION else len(tokens) << 32
        rows.append(make(seed, stream, first + np.arange(size)))
    return pair.port.asarray(np.stack(rows), pair.target.device)


def _stream(name: str) -> rng.Stream:
    try:
        return rng.Stream[name.upper()]
    except KeyError:
        known = ", ".join(stream.name.lower() for stream in rng.Stream)
        raise errors.InputError(f"stream: got {name!r}, expected one of: {known}") from None
