"""How far two right programs may be apart, derived per dtype and quantity: every tolerance there is.

Two programs that compute one function with the same stored values and another order of summation differ by rounding
alone. How far is worked out here once; who compares multiplies the bound with the size of what is compared.

Let u be the unit roundoff of a dtype, the largest relative error of one rounding: 2**-24 in float32, 2**-8 in
bfloat16, 2**-11 in float16. Products accumulate in float32 in every dtype, so with v = 2**-24:

1.  A sum of K products of either sign. Its partial sums grow like sqrt(k), each rounding adds v times the partial
    sum, and independent errors add as squares: v * sqrt(sum of k) / sqrt(K), that is v * sqrt(K / 2) of the result.
    Every sublayer holds two such sums one after the other (queries, keys and values, then the output; gate and up,
    then down), which makes v * sqrt(K), K being the longest of them.

2.  Values stored in the dtype. A sublayer stores about ten on the way to an element of its output (norm, its weight,
    projection, the two products and the sum of the rotation, scores, weights, mixture, output; in the MLP fewer).
    Independent again: u * sqrt(10).

3.  A softmax magnifies. A relative error e of queries and keys moves a score s by e * s * sqrt(2), and its weight by
    as much, relatively. Queries and keys carry half of the ten roundings; with scores of about 2, as they are before
    a softmax saturates, their share comes to 10 / 2 * 2 * 2**2 = 40 squares of u in place of the 5 they had. Averaging
    over keys takes most of it back, since errors of different keys have different signs, by a factor of the number of
    keys that count, at least two: 20. Together with the rest: u * sqrt(25), in place of sqrt(10).

4.  Depth. N layers are 2 N sublayers, each adding its error to the residual stream: sqrt(2 N) times the error of one.
    The final norm and the head count as one more, as does what a draft does to its context before its first layer.

5.  From a typical error to the largest of many: the largest of a million normal deviates is 5.3 of them, and two
    programs, each with its own error, are sqrt(2) times as far apart as each is from the truth. 5.3 * sqrt(2) < 8.

6.  A gated delta net adds to a state that it shrinks by a factor d a token: the roundings of the last 1 / (1 - d)
    tokens are still in it, each v of the state, so v * sqrt(1 / (1 - d)) altogether. Heads that forget slowly remember
    some thousand. A query takes one of key_dim directions out of the state, about 1 / sqrt(key_dim) of it, and the
    norm after it blows that up, with its error. Together v * sqrt(1024 * key_dim), on top of the sums of 1.

So, relative to the largest magnitude in its row (a token's hidden state, or its logits):

    bound = 8 * sqrt(sublayers) * (5 u + sqrt(K) v + sqrt(1024 key_dim) v)

the last term for models with gated delta nets alone.

That is a worst case: good for checks that must never fail by chance, and in bfloat16 as large as the logits. What
rounding typically does, to the row that it moves most, is `typical`: only the roundings that nothing takes back, those
of the residual stream. A sublayer rounds it once when it adds to it, while the errors of 2 and 3 are relative to what
it adds, which is a fraction of the stream. The 8 of 5 goes too: the largest of V errors is some five of them, and so is
the peak of a row, to which it is relative, of V logits. So both, 5 and 8, are left out:

    typical = sqrt(sublayers) * (u + sqrt(K) v / 5 + ...) = bound / 40

The median distance of two programs' rows of logits, over positions, was 0.36 to 0.59 of it, for models of 6 and of 30
layers, in float32, bfloat16 and float16; the largest, 1.7. With the frequencies of its rotation halved the median was
6.6 and 21 of it, and with the MLP of one layer left out 2.2 and 7.5. So `typical` is the most that a median may be.

What this leaves out: layers that answer a small change with a larger one, of which trained models have few and random
ones with large weights many. The random models of the tests keep products about as large as what goes into them.
"""

from __future__ import annotations

import math
from typing import Literal

from dflash_fn.config import DecoderSpec, DraftSpec

__all__ = ["LAW", "PEAK", "TIE", "UNIT", "bound", "rms_ratio", "typical"]

Quantity = Literal["hidden", "logits", "draft_logits"]

UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative error of one rounding."""

ACCUMULATION = 2.0**-24
"""The same, of what products are summed in."""

STORED = 5.0
"""Typical error of a sublayer's output in units of u: see 2 and 3."""

LARGEST = 8.0
"""From the typical error of one program to the largest difference between two: see 5."""

LAW = 2.0**-10
"""How far from 1 the sum of a law's V probabilities may be. In float32 each carries a rounding or two, v of itself, and
their common divisor, a sum taken in blocks, some ten or a hundred: 2**-17 or less. What leaves out tokens, or was
rounded to bfloat16, may be farther off, and is no law to work with."""

MEMORY = 1024
"""Tokens whose roundings are still in a recurrent state: see 6."""

TIE = 2.0
"""Gap between two logits below which two right programs may choose differently, in units of `bound`: one of the two
logits may be higher by that in one program, and the other lower."""

PEAK = 16.0
"""Largest magnitude in a row of logits, where nobody tells it: servers give log probabilities, which say how far logits
are from each other and not how large they are. Rows of SmolLM2-135M have 16 to 38, so this is rather too strict."""


def bound(
    dtype: str,
    quantity: Quantity,
    spec: DecoderSpec,
    *,
    layers: int | None = None,
    below: DecoderSpec | None = None,
) -> float:
    """Return how far two right programs may be apart, relative to the largest magnitude in a row.

    Args:
        dtype: of weights and activations.
        quantity: `hidden` after `layers` layers, `logits` of a target, or `draft_logits`.
        spec: whose sizes count.
        layers: layers run before; None takes all of the model's. Where a draft's features came from a target that
            may differ itself, the tapped layers count too.
        below: that target, whose gated delta nets then count too.
    """
    depth = spec.num_layers if layers is None else layers
    sublayers = 2 * depth + {"hidden": 0, "logits": 1, "draft_logits": 2}[quantity]
    delta = spec.delta or (below.delta if below else None)
    sums = math.sqrt(longest_sum(spec)) + (math.sqrt(MEMORY * delta.key_dim) if delta else 0.0)
    return LARGEST * math.sqrt(sublayers) * (STORED * UNIT[dtype] + sums * ACCUMULATION)


def typical(dtype: str, spec: DecoderSpec) -> float:
    """Return the most that the median distance of two right programs' logits may be, relative to a row's peak.

    Args:
        dtype: of weights and activations, the coarser of the two programs'.
        spec: of the target.
    """
    return bound(dtype, "logits", spec) / (LARGEST * STORED)


def longest_sum(spec: DecoderSpec) -> int:
    """Return the most terms that a product of the model sums."""
    fused = len(spec.target_layer_ids) * spec.hidden_size if isinstance(spec, DraftSpec) else 0
    return max(spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim, fused)


def rms_ratio(tokens: int) -> float:
    """Return how many times as far from the exact values one right program may be as another, by root mean square.

    Errors within a token go together and errors of different tokens do not, so the mean square of T tokens has a
    relative deviation of about sqrt(2 / T), its root half of that, and the quotient of two such sqrt(1 / T). Five
    deviations of it, which random tests may meet.
    """
    return 1.0 + 5.0 / math.sqrt(tokens)
