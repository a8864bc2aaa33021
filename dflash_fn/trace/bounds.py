"""How far two right programs may be apart in each quantity of a trace: `dflash_fn.tolerances`, put in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_fn import tolerances
from dflash_fn.config import DecoderSpec, LayerKind
from dflash_fn.records import Pair
from dflash_fn.trace.comparing import Layers

__all__ = ["UNIFORM", "Bounds", "bounds_of"]

UNIFORM = 2.0**-24
"""Of a uniform: a port without float64 rounds it to float32."""


ARRAYS = {
    "keys": LayerKind.FULL,
    "values": LayerKind.FULL,
    "window_keys": LayerKind.SLIDING,
    "window_values": LayerKind.SLIDING,
    "conv": LayerKind.DELTA,
    "recurrent": LayerKind.DELTA,
}
"""The layers that have each kind of array in a cache, as `Port.export_cache` names them."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds relative to the largest magnitude among the numbers of a token (a layer's K, a hidden state, logits).

    Attributes:
        features: one a tapped layer.
        target_cache: by the kind of array, one a layer that has it.
        draft_cache: the same.
        target_logits: of the target.
        draft_logits: of the draft, the tapped layers of the target included.
    """

    features: Layers
    target_cache: Mapping[str, Layers]
    draft_cache: Mapping[str, Layers]
    target_logits: float
    draft_logits: float


def bounds_of(pair: Pair, dtype: str) -> Bounds:
    """Return the bounds for a pair, against a trace in `dtype`; the coarser of the two dtypes counts.

    Keys, values and states of layer l are made within it, after l whole layers. A draft makes its context's of the
    tapped layers, however deep it is itself.
    """
    coarser = max(dtype, pair.target.dtype, key=lambda name: tolerances.UNIT.get(name, 0.0))
    name = coarser if coarser in tolerances.UNIT else "float32"
    target = pair.target.spec
    deep = [tolerances.bound(name, "hidden", target, layers=layer + 1) for layer in range(target.num_layers)]
    logits = tolerances.bound(name, "logits", target)
    if pair.draft is None:
        return Bounds(Layers(()), _by_array(target, deep), {}, logits, 0.0)
    draft, taps = pair.draft.spec, pair.draft.spec.target_layer_ids
    reach = max(taps) + 1
    whole = reach + draft.num_layers
    # the last layer's output is tapped after the final norm, which counts as the head does
    tapped = tuple(logits if tap + 1 == target.num_layers else deep[tap] for tap in taps)
    return Bounds(
        features=Layers(tapped, taps),
        target_cache=_by_array(target, deep),
        draft_cache=_by_array(
            draft, [tolerances.bound(name, "draft_logits", draft, layers=reach, below=target)] * draft.num_layers
        ),
        target_logits=logits,
        draft_logits=tolerances.bound(name, "draft_logits", draft, layers=whole, below=target),
    )


def _by_array(spec: DecoderSpec, bounds: Sequence[float]) -> dict[str, Layers]:
    layers = {name: spec.layers_of(kind) for name, kind in ARRAYS.items()}
    return {name: Layers(tuple(bounds[layer] for layer in ids), ids) for name, ids in layers.items()}
