"""The records that the step functions pass to one another: frozen, with slots, and nothing but values.

Arrays belong to the port that made them (`Array`), caches are opaque to everything but the port (`Cache`). The
letters in shapes: R rows, W width, B block size, V vocabulary, H hidden size, L tapped layers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from dflash_fn.config import DecoderSpec, DraftSpec, TargetSpec
    from dflash_fn.port import Port
    from dflash_fn.sources import Source

__all__ = [
    "Array",
    "Branches",
    "Cache",
    "ContextFeatures",
    "DecodeState",
    "Model",
    "Origin",
    "Pace",
    "Pair",
    "Progress",
    "Proposal",
    "Proposer",
    "StepInfo",
    "StopReason",
    "TokenLogprob",
    "Verdict",
]

Array: TypeAlias = Any
"""An array of the port's own library."""

Cache: TypeAlias = Any
"""What a port remembers of a model's past; a value, whatever it is made of (see `dflash_fn.port`)."""


Spec = TypeVar("Spec", bound="DecoderSpec")


class StopReason(enum.Enum):
    """Why a row emits no more; the value is the message for people."""

    STOP_TOKEN = "a stop token was emitted"
    MAX_NEW_TOKENS = "the token budget is spent"
    CONTEXT = "the context of the target is full"

    @property
    def finish_reason(self) -> str:
        """The word that OpenAI's API and mlx-lm use: `stop` or `length`."""
        return "stop" if self is StopReason.STOP_TOKEN else "length"


@dataclass(frozen=True, slots=True)
class Model(Generic[Spec]):
    """Weights on a port, and the record that says how to run them.

    Attributes:
        spec: what the checkpoint's config.json describes.
        weights: the port's weight tree; read only.
        dtype: `float32`, `bfloat16` or `float16`.
        device: the port's name of the device, such as `cpu` or `cuda:0`.
        source: where the weights came from; None for weights made by hand.
        layout: how the port has spread them over devices or processes, in words; `whole` where it has not.
        processes: how many hold a share of each layer; all must take the same steps.
        narrows: whether passes of any number of slots give each slot the same bits. Then a verification is only as
            wide as its block.
    """

    spec: Spec
    weights: Any
    dtype: str
    device: str
    source: Source | None = None
    layout: str = "whole"
    processes: int = 1
    narrows: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, the draft that guesses for it (or none), and the port that runs both.

    Attributes:
        target: the large model.
        draft: the block-diffusion model, or None for plain decoding.
        port: the functions that run them (`dflash_fn.port.Port`).
        tokenizer: a transformers tokenizer, or None where prompts are token ids.
        name: for reports; a zoo name, or folders or hub ids.
    """

    target: Model[TargetSpec]
    draft: Model[DraftSpec] | None
    port: Port
    tokenizer: Any = None
    name: str = "pair"

    @property
    def block_size(self) -> int:
        """The block size that the draft was trained for; 1 without a draft."""
        return self.draft.spec.block_size if self.draft else 1


@dataclass(frozen=True, slots=True)
class ContextFeatures:
    """Target hidden states that the draft has not seen yet.

    Attributes:
        values: [R, W, L * H], the tapped layers' hidden states, concatenated in the order of `target_layer_ids`.
        counts: how many leading slots of each row hold tokens that were emitted; the rest is to be ignored.
    """

    values: Array
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a state's caches were computed with, in words that are cheap to compare (see `dflash_fn.origin`).

    Attributes:
        port: name of the port.
        dtype: of the target.
        device: of the target.
        target: the folder that its weights came from; for a model in memory, its name and address.
        draft: the same for the draft; None where the state has no draft's cache.
        layout: of the target.
    """

    port: str
    dtype: str
    device: str
    target: str
    draft: str | None
    layout: str = "whole"


@dataclass(frozen=True, slots=True)
class DecodeState:
    """Everything that decoding goes on from: a value to keep, fork, or return to.

    The target cache covers every token of a row but its last, the anchor. Step 0 is the opening step: its anchor is
    the last token of the prompt, nothing is drafted, and its one token is the first of the answer.

    Attributes:
        tokens: token ids so far, one tuple a row, prompt included.
        target_cache: K/V (and other state) of all tokens but each row's anchor.
        draft_cache: K/V that the draft made of the context features; None without a draft.
        context_features: what the last verification left for the draft to read; None when it has read everything.
        step: index of the next step, counted from the last `prefill` or `extend`.
        seed: one per row; with a position, or with that of a block and a slot, it names every random number of the row.
        stop: why each row stopped, or None where it goes on.
        width: rows W that every verification runs, fixed for a state.
        exact_rows: whether several rows are computed so that each has the bits of its single-row run.
        origin: what the caches belong to; None for a state made by hand, which nothing is compared with.
    """

    tokens: tuple[tuple[int, ...], ...]
    target_cache: Cache
    draft_cache: Cache | None
    context_features: ContextFeatures | None
    step: int
    seed: tuple[int, ...]
    stop: tuple[StopReason | None, ...]
    width: int
    exact_rows: bool = False
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A block: what the draft guesses will follow each row's anchor.

    Attributes:
        tokens: [R, B - 1] integer array of drafted tokens.
        q: [R, B - 1, V] the distributions that they were drawn from; None where the policy does not need it.
        draft_cache: the draft's cache after it read the pending context features; None without a draft.
        logits: [R, B - 1, V] of the draft, for reports; None where no draft was asked.
        finite: [R] boolean array, False where a row's draft logits hold NaN or infinity; None if nothing was computed.
    """

    tokens: Array
    q: Array | None = None
    draft_cache: Cache | None = None
    logits: Array | None = None
    finite: Array | None = None


@dataclass(frozen=True, slots=True)
class Branches:
    """All states that one verification leads to, held compactly; `select` takes one of them.

    Attributes:
        logits: [R, W, V], the target's logits after the anchor and after each drafted token; slots from B on are
            padding. [R, B, V] where the target narrows, and so with the rest.
        family: the target caches after 0, 1, ... W more tokens, as one opaque value of the port.
        features: [R, W, L * H] tapped hidden states of the block, or None without a draft.
    """

    logits: Array
    family: Any
    features: Array | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an acceptance policy says of a block.

    Attributes:
        num_accepted: [R] integers in [0, B - 1], drafted tokens kept.
        next_token: [R], the token emitted after them: the bonus after a full acceptance, else the recovered token.
    """

    num_accepted: Array
    next_token: Array


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of the target's probability of a token that was emitted.

    Attributes:
        model: under the target's own logits: no constraint, temperature 1, no filters.
        sampled: under what tokens are drawn from, after constraints, temperature and filters; at temperature 0 it is
            0 for the target's choice. -infinity for a token that a lossy policy kept against them.
    """

    model: float
    sampled: float


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What a step reports and no step reads.

    Attributes:
        step: index of the step; 0 is the opening step, which counts in no statistic.
        block_size: B of this step; 1 where nothing was drafted.
        drafted: the drafted tokens, one tuple of B - 1 a row.
        emitted: the tokens that each row gained, at most B; () for a row that had stopped before.
        num_accepted: `len(emitted) - 1` where a row emitted, else None. Where a budget or a stop token cut the
            block, the last token that was kept counts as the extra one, so that num_emitted = num_accepted + 1 holds.
        logits: [R, W, V] of the target, or [R, B, V] where it narrows; `logits[r, i]` is what `emitted[r][i]` was
            chosen from, before constraints and sampling.
        logprobs: one `TokenLogprob` an emitted token, in the shape of `emitted`; None where they were not asked for.
    """

    step: int
    block_size: int
    drafted: tuple[tuple[int, ...], ...]
    emitted: tuple[tuple[int, ...], ...]
    num_accepted: tuple[int | None, ...]
    logits: Array
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None


@runtime_checkable
class Pace(Protocol):
    """What chooses the block size of each step; a value, like a state. See `dflash_fn.pacing`."""

    @property
    def block_size(self) -> int:
        """B of the next step."""
        ...

    @property
    def largest(self) -> int:
        """The largest B that it may choose; the state's width must have room for it."""
        ...

    def after(self, info: StepInfo) -> Pace:
        """Return the pace after one more step."""
        ...


Proposer: TypeAlias = Callable[[DecodeState, Pair, int], Array]
"""A function (state, pair, block size) -> drafted tokens [R, B - 1], in place of the pair's draft."""

Progress: TypeAlias = Callable[[int, int], None]
"""A function (tokens read, tokens to read), called after each chunk of a prompt, over all rows."""
