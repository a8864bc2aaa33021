"""The policy of a trace, made anew from the words that the trace has for it."""

from __future__ import annotations

import re
from typing import Any

from dflash_fn import errors
from dflash_fn.policies import Policy, named
from dflash_fn.policies.named import POLICIES
from dflash_fn.sampling import Sampling
from dflash_fn.trace.records import Trace

__all__ = ["remade"]

WORDS = {"T": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}

DIGITS = 6
"""Digits that names keep of a number: one with so many may have been rounded, and is not what it says."""


def remade(trace: Trace) -> Policy | None:
    """Return the named policy that a trace was made with; None where it is none of them, or its words do not tell.

    A policy's name and streams must be those of the trace, so that nothing else can be taken for it.
    """
    sampling = _sampling_of(trace.sampling)
    if sampling is None:
        return None
    for name in POLICIES:
        try:
            policy = named(name, sampling)
        except errors.InputError:
            continue  # there is none at this sampling
        if (policy.name, policy.streams) == (trace.policy, trace.streams):
            return policy
    return None


def _sampling_of(words: str | None) -> Sampling | None:
    found: dict[str, Any] = {}
    for word in (words or "").split():
        name, _, value = word.partition("=")
        if name not in WORDS or len(re.sub(r"e.*|[^0-9]", "", value).lstrip("0")) >= DIGITS:
            return None
        try:
            found[WORDS[name]] = int(value) if name == "top_k" else float(value)
        except ValueError:
            return None
    try:
        return Sampling(**found) if found else None
    except errors.InputError:
        return None
