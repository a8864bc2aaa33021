"""Acceptance policies: pure functions that say how much of a block is kept.

A policy is written once and runs on every port, over these functions of the Python array API standard: `all`,
`argmax`, `asarray`, `astype`, `concat`, `cumulative_prod`, `isfinite`, `max`, `sum`, `take_along_axis`, comparison and
indexing with slices. It is handed its random numbers and never draws.
"""

from dflash_fn.policies.base import Policy, Rule
from dflash_fn.policies.match import match

__all__ = ["Policy", "Rule", "match"]
