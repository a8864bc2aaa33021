"""DFlash inside transformers' `generate`: `model.generate(..., custom_generate=custom_generate(draft))`."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dflash_fn import errors
from dflash_fn.checks import check_count
from dflash_fn.config import DraftSpec
from dflash_fn.load import check_pair, load_pair
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.records import DecodeState, Model, Pair, StepInfo, StopReason
from dflash_fn_torch.generation_request import Request, read_request
from dflash_fn_torch.port import TorchPort

__all__ = ["custom_generate"]

Known = WeakKeyDictionary[torch.nn.Module, tuple[Any, Pair]]


def custom_generate(
    draft: str | Path | object | None, *, block_size: int | None = None, width: int | None = None
) -> Callable[..., Any]:
    """Return a function for the argument `custom_generate` of a transformers model's `generate`.

    What it returns is what `generate` does with `do_sample=False`: the same tokens, but for near ties (see the
    contract), padded alike, cut by the same stopping criteria at the same token. The model is read and never changed.

    Args:
        draft: a folder, a hub id, upstream's module, or a loaded `Model`; None decodes plainly.
        block_size: B; None takes the draft's.
        width: see `prefill`; None takes the larger of B and the draft's block size.

    Returns:
        the function. It loads the draft at a model's first call and keeps the pair for as long as the model lives (on
        a CPU with a copy of its weights); weights that were changed in place since then are read anew, unless the
        change went through `.data`. `scores` and `logits`, where `generate` is asked for them, hold zeros for rows
        that have ended.

    Raises:
        InputError: by the function: an argument of `generate` that asks for other than greedy decoding.
        PairMismatch, ConfigError, CheckpointError, ...: by the function, at its first call: see `load_pair`.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from dflash_fn import zoo
        >>> pair = zoo.fetch("tiny-code")
        >>> model, words = AutoModelForCausalLM.from_pretrained(pair.target), AutoTokenizer.from_pretrained(pair.target)
        >>> fast = custom_generate(pair.draft)
        >>> prompt = words("def add(a, b):", return_tensors="pt")
        >>> answer = model.generate(**prompt, custom_generate=fast, max_new_tokens=4)
        >>> answer.shape[1] - prompt["input_ids"].shape[1]
        4
    """
    known: Known = WeakKeyDictionary()

    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        request = read_request(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer, synced_gpus, model_kwargs
        )
        pair = _pair_of(known, model, draft)
        return _answer(pair, request, block_size, width)

    return generate


def _pair_of(known: Known, model: torch.nn.Module, draft: Any) -> Pair:
    weights = itertools.chain(model.parameters(), model.buffers())
    stamp = tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in weights)
    if model not in known or known[model][0] != stamp:
        known[model] = (stamp, _load(model, draft))
    return known[model][1]


def _load(model: torch.nn.Module, draft: Any) -> Pair:
    pair = load_pair(model, None if isinstance(draft, Model) else draft, port=TorchPort())
    # the source is the model, which a pair that is kept for the model's sake must not keep alive
    pair = replace(pair, target=replace(pair.target, source=None))
    if not isinstance(draft, Model):
        return pair
    if not isinstance(draft.spec, DraftSpec):
        raise errors.InputError(f"draft: got a Model with a {type(draft.spec).__name__}, expected one with a DraftSpec")
    check_pair(pair.target.spec, draft.spec)
    if (draft.dtype, draft.device) != (pair.target.dtype, pair.target.device):
        raise errors.InputError(
            f"draft: got a Model in {draft.dtype} on {draft.device}, the target is in {pair.target.dtype} on "
            f"{pair.target.device}; give the draft's folder, which is loaded to fit"
        )
    return replace(pair, draft=draft)


def _answer(pair: Pair, request: Request, block_size: int | None, width: int | None) -> Any:
    if width is None and block_size is not None:
        width = max(check_count("block_size", block_size, least=1), pair.block_size)
    state, sheet = prefill(pair, request.rows, width=width), Sheet(request)
    stops = [token for token in request.stop_token_ids if 0 <= token < pair.target.spec.vocab_size]
    steps = rounds(state, pair, max_new_tokens=request.budget, stop_token_ids=stops, block_size=block_size)
    for after, info in steps:
        sheet.receive(info)
        sheet.write()
        if sheet.complete or sheet.starved(after):
            break
    if not sheet.complete:
        limit = pair.target.spec.max_context
        warnings.warn(f"the answer ends early, at the target's context of {limit} tokens", stacklevel=2)
    return sheet.result()


class Sheet:
    """The answer as `generate` writes it: column by column, all rows together, though rows arrive in blocks.

    Attributes:
        ids: [R, T] prompts and answers so far.
        going: [R], 1 for rows that have not ended.
        waiting: tokens that were emitted and are not written yet, each with its logits where those are wanted.
        complete: whether every row has ended.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ids = request.input_ids
        self.going = torch.ones(len(request.rows), dtype=torch.bool, device=self.ids.device)
        self.waiting: list[deque[tuple[int, Tensor | None]]] = [deque() for _ in request.rows]
        self.scores: tuple[Tensor, ...] = ()
        self.logits: tuple[Tensor, ...] = ()
        self.complete = False

    def receive(self, info: StepInfo) -> None:
        """Take in what a step emitted."""
        kept = self.request.wants_logits or self.request.wants_scores
        for row, tokens in enumerate(info.emitted):
            for slot, token in enumerate(tokens):
                logits = info.logits[row, slot].to(self.ids.device, torch.float32, copy=True) if kept else None
                self.waiting[row].append((token, logits))

    def write(self) -> None:
        """Write columns for as long as every row that needs a token has one."""
        while not self.complete and all(self.waiting[row] for row in self._needed()):
            self._write_column()

    def starved(self, state: DecodeState) -> bool:
        """Whether a row that needs a token will get none, since its context is full."""
        return any(not self.waiting[row] and state.stop[row] is StopReason.CONTEXT for row in self._needed())

    def result(self) -> Any:
        """Return what `generate` is to return, and tell the streamer that this is all."""
        if self.request.streamer is not None:
            self.request.streamer.end()
        if not self.request.as_record:
            return self.ids
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        made = {"scores": self.scores} if self.request.wants_scores else {}
        made |= {"logits": self.logits} if self.request.wants_logits else {}
        return GenerateDecoderOnlyOutput(sequences=self.ids, **made)  # pyright: ignore[reportArgumentType]

    def _needed(self) -> list[int]:
        """List the rows that go on; all of them where nothing pads those that have ended."""
        return [row for row, going in enumerate(self.going.tolist()) if going or not self.request.pads]

    def _write_column(self) -> None:
        needed = self._needed()
        taken = [queue.popleft() if row in needed else (self._pad(), None) for row, queue in enumerate(self.waiting)]
        tokens = torch.tensor([token for token, _ in taken], dtype=self.ids.dtype, device=self.ids.device)
        self._keep_logits([logits for _, logits in taken])
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=-1)
        # one token at a time and before the streamer, as `generate` does it: criteria may count their calls
        self.going &= ~self.request.criteria(self.ids, self.scores if self.request.wants_scores else None)
        self.complete = not bool(self.going.any())
        if self.request.streamer is not None:
            self.request.streamer.put(tokens.cpu())

    def _keep_logits(self, rows: list[Tensor | None]) -> None:
        known = next((logits for logits in rows if logits is not None), None)
        if known is None:
            return
        column = torch.stack([torch.zeros_like(known) if logits is None else logits for logits in rows])
        if self.request.wants_logits:
            self.logits += (column,)
        if self.request.wants_scores:
            self.scores += (self.request.processors(self.ids, column.clone()),)

    def _pad(self) -> int:
        if self.request.pad_token_id is None:
            raise errors.InputError(
                "custom_generate: a row has ended before others, and neither the call nor the model's generation "
                "config has a pad_token_id; pass one"
            )
        return self.request.pad_token_id
