"""Acceptance policies: pure functions that say how much of a block is kept.

A policy is written once and runs on every port, over these functions of the Python array API standard: `all`,
`argmax`, `asarray`, `astype`, `concat`, `cumulative_prod`, `cumulative_sum`, `exp`, `isfinite`, `log`, `log1p`, `max`,
`ones_like`, `sort`, `sum`, `take_along_axis`, `where`, `zeros_like`, arithmetic, comparison and indexing with slices;
and over `dflash_fn.draws` and `dflash_fn.sampling`, which are made of them. It is handed its random numbers and never
draws.
"""

from dflash_fn.policies.base import ARGMAX, Constraint, Drafting, DraftRule, Policy, Rule
from dflash_fn.policies.block_verification import block_verification
from dflash_fn.policies.forced import forced
from dflash_fn.policies.match import match
from dflash_fn.policies.named import named
from dflash_fn.policies.relaxed import relaxed
from dflash_fn.policies.token_rejection import token_rejection
from dflash_fn.policies.typical import typical
from dflash_fn.policies.wrappers import budget, confidence_cut, constrained

__all__ = [
    "ARGMAX",
    "Constraint",
    "DraftRule",
    "Drafting",
    "Policy",
    "Rule",
    "block_verification",
    "budget",
    "confidence_cut",
    "constrained",
    "forced",
    "match",
    "named",
    "relaxed",
    "token_rejection",
    "typical",
]
