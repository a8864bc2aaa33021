"""Policies by name, for command lines: ours, or anybody's as `module:attribute`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from dflash_fn import errors
from dflash_fn.policies.base import Policy
from dflash_fn.policies.block_verification import block_verification
from dflash_fn.policies.match import match
from dflash_fn.policies.relaxed import relaxed
from dflash_fn.policies.token_rejection import token_rejection
from dflash_fn.policies.typical import typical
from dflash_fn.sampling import GREEDY, Sampling

__all__ = ["POLICIES", "named"]

POLICIES: dict[str, Callable[[Sampling], Policy]] = {
    "match": match,
    "match-inverse": partial(match, noise="inverse"),
    "token_rejection": token_rejection,
    "block_verification": block_verification,
    "typical": typical,
    "relaxed": relaxed,
}
"""What a name stands for: a function from a sampling to a policy."""


def named(name: str, sampling: Sampling = GREEDY) -> Policy:
    """Return the policy that a name stands for.

    Args:
        name: one of `POLICIES`; or `module:attribute`, where the attribute is a policy, or a function that returns one
            when called with a sampling. The module is imported as Python finds it.
        sampling: for policies that are made with one. A finished policy of somebody's has its own.

    Raises:
        InputError: no such policy, module or attribute; or something that is no policy; or a sampling for a policy
            that is finished already.

    Example:
        >>> named("token_rejection", Sampling(0.7)).name
        'token_rejection, T=0.7'
    """
    if ":" in name:
        return _foreign(name, sampling)
    if name not in POLICIES:
        raise errors.InputError(
            f"policy: got {name!r}, expected one of: {', '.join(POLICIES)}; or module:attribute for one of your own"
        )
    return POLICIES[name](sampling)


def _foreign(name: str, sampling: Sampling) -> Policy:
    found = _attribute(name)
    if isinstance(found, Policy):
        if sampling != GREEDY:
            raise errors.InputError(
                f"policy {name}: got {sampling} for a policy that is finished; make it a function of a sampling"
            )
        return found
    made = _called(name, found, sampling) if callable(found) else found
    if not isinstance(made, Policy):
        raise errors.InputError(
            f"policy {name}: got {type(made).__name__}, expected a dflash_fn.Policy, or a function that returns one "
            "when called with a Sampling"
        )
    return made


def _called(name: str, found: Callable[..., Any], sampling: Sampling) -> Any:
    """Call with a sampling; InputError for what takes other arguments, such as a bare rule."""
    try:
        inspect.signature(found).bind(sampling)
    except TypeError as error:
        raise errors.InputError(
            f"policy {name}: got a function that takes other arguments ({error}); expected a dflash_fn.Policy, or a "
            "function that returns one when called with a Sampling; of a bare rule, make Policy(name, rule, "
            "lossless=...)"
        ) from None
    except ValueError:
        pass  # a callable that tells nobody its arguments
    return found(sampling)


def _attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute or any(not part for part in module.split(".")):
        raise errors.InputError(f"policy {name}: expected module:attribute, such as my_policies:mine")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise errors.InputError(f"policy {name}: there is no module {module!r} on Python's path") from None
    except AttributeError:
        raise errors.InputError(f"policy {name}: module {module!r} has nothing called {attribute!r}") from None
