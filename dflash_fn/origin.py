"""Whether a state belongs to a pair: its caches mean nothing to other weights, another dtype, or another port.

The comparison is of a few words and runs at every entry, so nothing is hashed and no file is looked at. Weights are
told apart by where they came from. A saved state is compared by digests instead (`dflash_fn.state_io`), and so it is
the way to carry a state over to another port or device, or to a copy of the checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_fn import errors
from dflash_fn.records import DecodeState, Model, Origin, Pair

__all__ = ["check_pair_type", "check_state", "origin_of"]


def origin_of(pair: Pair) -> Origin:
    """Return what the caches belong to that this pair computes."""
    target, draft = pair.target, pair.draft
    guess = _place(draft) if draft else None
    return Origin(pair.port.name, target.dtype, target.device, _place(target), guess, target.layout)


def check_pair_type(pair: Any) -> None:
    """Raise InputError for what is no pair."""
    if not isinstance(pair, Pair):
        raise errors.InputError(f"pair: got {_kind(pair)}, expected a Pair, as load_pair returns it")


def check_state(state: Any, pair: Any) -> None:
    """Raise InputError unless the state's caches are those of this pair.

    A pair without a draft may go on with any state of its target: the draft's cache is dropped then, and so a pair with
    a draft cannot go on after it.
    """
    if not isinstance(state, DecodeState):
        raise errors.InputError(
            f"state: got {_kind(state)}, expected a DecodeState, as prefill returns it"
            + ("; state and pair are swapped" if isinstance(pair, DecodeState) else "")
        )
    check_pair_type(pair)
    made, mine = state.origin, origin_of(pair)
    if made is None or made == mine or (mine.draft is None and made == _with_draft(mine, made.draft)):
        return
    raise errors.InputError(_difference(made, mine))


def _difference(made: Origin, mine: Origin) -> str:
    for name in ("port", "target", "dtype", "device", "layout"):
        theirs, ours = getattr(made, name), getattr(mine, name)
        if theirs != ours:
            return (
                f"state: was made with {name} {theirs}, and this pair has {name} {ours}; use the pair that it was made "
                "with, or carry it over by save_state and load_state, or prefill again"
            )
    if made.draft is None:
        return (
            f"state: was made, or went on, without a draft, and this pair has draft {mine.draft}; "
            "leave the draft out by dataclasses.replace(pair, draft=None), or prefill(pair, state.tokens)"
        )
    return (
        f"state: was made with draft {made.draft}, and this pair has draft {mine.draft}; "
        "use the pair that it was made with, or prefill(pair, state.tokens)"
    )


def _with_draft(origin: Origin, draft: str | None) -> Origin:
    return replace(origin, draft=draft)


def _place(model: Model[Any]) -> str:
    source = model.source
    if source is None:
        return f"weights at {id(model.weights):#x}"
    return str(source.folder) if source.folder is not None else f"{source.name} at {id(source.obj):#x}"


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"
