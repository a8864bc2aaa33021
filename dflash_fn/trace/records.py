"""What a trace holds: plain values on the host, no array of any port.

What an engine cannot know, such as digests of caches that it keeps in another layout, is None and is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dflash_fn.container import Bits
from dflash_fn.records import StopReason

__all__ = ["CacheView", "LawsView", "LogitsView", "RowStart", "RowStep", "Trace"]


@dataclass(frozen=True, slots=True)
class CacheView:
    """One row of a cache, seen from outside.

    Attributes:
        length: tokens that it covers.
        digest: of everything that it sees; None where it is not known.
        fresh: what it gained since the last look, by kind (`keys`, `values`): [layers, tokens, 4] summaries.
    """

    length: int
    digest: str | None
    fresh: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class LogitsView:
    """Logits of S slots of a row: all of them, or each slot's k best.

    Attributes:
        values: [S, k] in the model's dtype, best first; [S, V] in the order of ids where all were kept.
        ids: [S, k] tokens of the values, the first of equals first; None where all were kept.
        summary: [S, 4] summaries of all V logits; None where they are not known.
        digest: of all V logits; None where it is not known.
    """

    values: Bits
    ids: np.ndarray | None
    summary: np.ndarray | None
    digest: str | None


@dataclass(frozen=True, slots=True)
class LawsView:
    """Probabilities of m tokens in each slot of a row's block, for people to look at; no check compares them.

    Attributes:
        ids: [B, m] the best of p and of q, the drafted token, and the verdict's; the first of p first.
        p: [B, m] what the target's token is drawn from, after constraint, temperature and filters.
        q: [B - 1, m] what the drafted token was drawn from; 1 at it where no chance had a part.
        target: [B, m] softmax of the target's own logits, before all that.
        draft: [B - 1, m] softmax of the draft's; None where no draft was asked.
        overlap: [B - 1] sums of min(p, q) over all V tokens: how likely token rejection is to keep what is drafted.
    """

    ids: np.ndarray
    p: np.ndarray
    q: np.ndarray
    target: np.ndarray
    draft: np.ndarray | None
    overlap: np.ndarray


@dataclass(frozen=True, slots=True)
class RowStart:
    """A row after prefill, whose prompt has n tokens.

    Attributes:
        target_cache: covers n - 1 tokens.
        features: [n - 1, L, 4] summaries of each token's tapped layers; None without a draft.
        draft_cache: covers n - 1 tokens; None without a draft.
    """

    target_cache: CacheView | None
    features: np.ndarray | None
    draft_cache: CacheView | None


@dataclass(frozen=True, slots=True)
class RowStep:
    """One step of a row that had not stopped before; the order of the fields is the order in which things happen.

    Attributes:
        features: [count, L * H], the context features that were pending, which the draft reads first; None if none.
        features_digest: of their bits.
        draft_cache: after that.
        draft_logits: of the B - 1 slots after the anchor; None where no draft was asked.
        block: the anchor and the B - 1 drafted tokens.
        target_logits: of the block's B slots, after each of its tokens.
        uniforms: by stream, what the policy's rule was handed.
        num_accepted: the policy's verdict, before a stop token or the budget cut it.
        next_token: the same.
        emitted: what the row gained.
        stop: why it stopped after this step; None where it goes on.
        target_cache: after the tokens before the new anchor were selected.
        laws: p and q of the tokens that matter; None where they are not known.
    """

    features: Bits | None
    features_digest: str | None
    draft_cache: CacheView | None
    draft_logits: LogitsView | None
    block: tuple[int, ...]
    target_logits: LogitsView | None
    uniforms: Mapping[str, np.ndarray]
    num_accepted: int
    next_token: int
    emitted: tuple[int, ...]
    stop: StopReason | None
    target_cache: CacheView | None
    laws: LawsView | None = None

    @property
    def kept(self) -> tuple[int, ...]:
        """The verdict as tokens: the accepted ones and the next."""
        return (*self.block[1 : self.num_accepted + 1], self.next_token)


@dataclass(frozen=True, slots=True)
class Trace:
    """A decode, step by step; step 0 is the opening step.

    Attributes:
        tool: what wrote it, and its version.
        port: of the pair.
        backend: array library and version, and the kind of machine.
        device: the port's name of it.
        dtype: of weights and activations.
        pair: the pair's name, for people.
        target: digest of the target's checkpoint (`dflash_fn.state_io.fingerprint_of`); None where it is not known.
        draft: the same of the draft; None where it is not known, or where there is none.
        drafts: whether there is a draft.
        proposer: whether a function was asked in its place, so that the drafted tokens are given.
        width: W.
        exact_rows: see `DecodeState`.
        block_size: B; a step's own is the length of its block.
        seed: one a row.
        policy: name of the acceptance policy.
        streams: random streams that the policy reads.
        max_new_tokens: the budget of each row.
        stop_token_ids: ids that end a row.
        prompts: token ids, one tuple a row.
        start: each row after prefill.
        steps: each step's rows; None for a row that had stopped before.
        sampling: what makes p of the target's logits, in words; None where it is not known, like the two below.
        drafting: how the draft's tokens are drawn, in words.
        lossless: whether the policy says that the text has the target's own law.
    """

    tool: str
    port: str
    backend: str
    device: str
    dtype: str
    pair: str
    target: str | None
    draft: str | None
    drafts: bool
    proposer: bool
    width: int
    exact_rows: bool
    block_size: int
    seed: tuple[int, ...]
    policy: str
    streams: tuple[str, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    start: tuple[RowStart, ...]
    steps: tuple[tuple[RowStep | None, ...], ...]
    sampling: str | None = None
    drafting: str | None = None
    lossless: bool | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that all rows emitted."""
        return sum(len(row.emitted) for rows in self.steps for row in rows if row)
