"""Constraints: changes of the target's logits that depend on the tokens so far.

A constraint is a function (logits, tokens, row) -> logits, on the host:

    logits: [V] float32, read only, of one slot of one row
    tokens: all tokens of the row before that slot: prompt, what was emitted, and the drafted tokens on the way
    row: the row's index
    returns: [V], with -infinity for what may not be emitted; at least one number must be finite

`policies.constrained(policy, constraint, ...)` puts constraints into a policy. They must be functions of their
arguments alone, for a slot may be asked about more than once, and about drafted tokens that are rejected afterwards.
Text under a constraint is then that of plain decoding under it, whatever the draft proposes (property P16).
"""

from dflash_fn.constraints.grammar import grammar
from dflash_fn.constraints.penalties import frequency, presence, repetition
from dflash_fn.constraints.tokens import ban, force

__all__ = ["ban", "force", "frequency", "grammar", "presence", "repetition"]
