"""The policy that the flags ask for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from dflash_fn.errors import InputError
from dflash_fn.policies import Policy, named
from dflash_fn.sampling import Sampling

__all__ = ["PolicyOptions", "policy_of"]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What the flags say of acceptance and sampling; None is a flag that was not given."""

    policy: str = "match"
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def policy_of(options: PolicyOptions, *, check: bool = False, paced: bool = False) -> Policy:
    """Return the policy; a module of one's own is looked for in the current folder first.

    Args:
        options: the flags.
        check: whether its text is to be compared with plain decoding's.
        paced: whether block sizes are chosen by what they cost.

    Raises:
        InputError: what `Sampling` or `policies.named` refuses; or a comparison that such a policy does not promise.
    """
    sampling = Sampling(options.temperature or 0.0, options.top_k, options.top_p, options.min_p)
    if ":" in options.policy and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    policy = named(options.policy, sampling)
    if check and not policy.invariant:
        promise = "the target's law, not its text" if policy.lossless else "not even the target's law"
        raise InputError(
            f"--check compares token for token, and policy {policy.name!r} promises {promise}; "
            "use --policy match, or leave --check out"
        )
    if paced and not policy.invariant:
        raise InputError(
            f"--block-size auto: policy {policy.name!r} judges whole blocks, so its text would hang on how fast this "
            "machine is; give a number, or use --policy match"
        )
    return policy
