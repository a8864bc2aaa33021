"""Ports that do one thing wrong, each as real ports have done it, to see whether a check names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_fn.port import Port, TargetPass

__all__ = ["FAULTS", "Fault", "faulty"]


@dataclass
class Faulty:
    """A port whose calls go through a function each, which may do something else.

    Attributes:
        port: the right one.
        wrong: by the name of a call: a function (port, verifications so far, right call, arguments) -> result.
        verifications: target passes with a head so far; the opening step's is the first.
    """

    port: Port
    wrong: dict[str, Callable[..., Any]]
    verifications: int = field(default=0, init=False)

    def __getattr__(self, name: str) -> Any:
        right = getattr(self.port, name)
        if name == "target_pass" or name in self.wrong:
            return lambda *args, **options: self._call(name, right, args, options)
        return right

    def _call(self, name: str, right: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name == "target_pass" and options["head"]:
            self.verifications += 1
        wrong = self.wrong.get(name)
        return wrong(self, right, *args, **options) if wrong else right(*args, **options)


def rolled_back_one_short(port: Faulty, right: Any, family: Any, counts: tuple[int, ...]) -> Any:
    """In step 2, select one token too many."""
    return right(family, tuple(count + 1 for count in counts) if port.verifications == 3 else counts)


def tapped_one_below(port: Faulty, right: Any, *args: Any, taps: tuple[int, ...], **options: Any) -> TargetPass:
    """Tap the layer after the one that is meant."""
    return right(*args, taps=tuple(tap + 1 for tap in taps), **options)


def shifted(port: Faulty, right: Any, *args: Any, head: bool, **options: Any) -> TargetPass:
    """In verifications, give each slot the features of the slot after it."""
    made, xp = right(*args, head=head, **options), port.port.xp
    if not head:
        return made
    return replace(made, features=xp.concat([made.features[:, 1:], made.features[:, :1]], axis=1))


def features_dropped(port: Faulty, right: Any, *args: Any, head: bool, **options: Any) -> TargetPass:
    """In prefill, lose the context features of each chunk's first token."""
    made, xp = right(*args, head=head, **options), port.port.xp
    if head:
        return made
    return replace(made, features=xp.concat([made.features[:, 1:], made.features[:, :1]], axis=1))


def wrong_mask(port: Faulty, right: Any, draft: Any, target: Any, cache: Any, block: Any, **options: Any) -> Any:
    """Fill the block with another token than the mask."""
    xp = port.port.xp
    return right(draft, target, cache, xp.concat([block[:, :1], block[:, 1:] + 1], axis=1), **options)


def slots_swapped(port: Faulty, right: Any, *args: Any, **options: Any) -> Any:
    """Give the draft's logits in another order of slots."""
    return port.port.xp.flip(right(*args, **options), axis=1)


@dataclass(frozen=True)
class Fault:
    """A mistake, and where a check must see it first.

    Attributes:
        wrong: what `Faulty` takes.
        quantity: that differs first.
        step: at which it does; None in prefill.
    """

    wrong: dict[str, Callable[..., Any]]
    quantity: str
    step: int | None


FAULTS = {
    "rollback": Fault({"select": rolled_back_one_short}, "target_cache.length", 2),
    "tap": Fault({"target_pass": tapped_one_below}, "context_features", None),
    "features shifted": Fault({"target_pass": shifted}, "context_features", 1),
    "features dropped": Fault({"target_pass": features_dropped}, "context_features", None),
    "mask token": Fault({"draft_pass": wrong_mask}, "draft_logits", 1),
    "draft slots": Fault({"draft_pass": slots_swapped}, "draft_logits", 1),
}


def faulty(port: Port, fault: Fault) -> Any:
    """Return a port with a mistake."""
    return Faulty(port, fault.wrong)
