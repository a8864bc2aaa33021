"""`stream_generate`, in the manner of mlx-lm: text as it settles, one response a token."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from dflash_fn import errors
from dflash_fn.checks import check_count
from dflash_fn.load import check_tokenizer, load_pair
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.policies import Policy
from dflash_fn.port import Port
from dflash_fn.records import Array, DecodeState, Pair, StepInfo, StopReason
from dflash_fn.registry import get_port, port_names
from dflash_fn.text import TextStream, feed, flush

__all__ = ["GenerationResponse", "stream_generate"]


@dataclass(frozen=True, slots=True, eq=False)
class GenerationResponse:
    """One token of an answer. The fields up to `finish_reason` are those of mlx-lm's class of this name.

    Attributes:
        text: what the token settled of the text, often ""; the pieces of a stream are together the decoded answer,
            less a stop token and special tokens.
        token: its id.
        logprobs: [V] log probabilities under the target's own logits, before constraints and sampling: an array of the
            port in float32.
        from_draft: whether it was drafted and accepted; a step's last token counts as the extra one, as in `StepInfo`.
        prompt_tokens: tokens of the prompt.
        prompt_tps: prompt tokens per second, up to the answer's first token.
        generation_tokens: tokens of the answer so far, this one included.
        generation_tps: tokens per second since the first; the tokens of one step come at one time.
        peak_memory: most memory used so far, in GB (`Port.peak_memory`).
        finish_reason: `stop` or `length` with the last token, else None.
        num_accepted: drafted tokens that the token's step kept.
        step: index of that step; 0 is the opening step, which drafts nothing.
    """

    text: str
    token: int
    logprobs: Array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    num_accepted: int = 0
    step: int = 0


def stream_generate(
    model: Pair | str | Path | object,
    tokenizer: Any,
    prompt: str | Sequence[int] | Array,
    *,
    draft: str | Path | object | None = None,
    max_tokens: int = 256,
    port: str | Port | None = None,
    block_size: int | None = None,
    width: int | None = None,
    seed: int = 0,
    policy: Policy | None = None,
    stop_token_ids: int | Iterable[int] | None = None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """Answer one prompt, a token at a time.

    Nothing is kept between calls: whatever is no `Pair` is loaded by each of them, so load a pair once where there is
    more than one prompt. Arguments are checked, models loaded and the prompt read by the call, not by the first `next`.

    Args:
        model: a loaded pair; or a target, as `load_pair` takes it: an mlx-lm model, a transformers model, a folder, a
            hub id.
        tokenizer: transformers' or mlx-lm's; None takes the pair's, or the one in the target's folder.
        prompt: text, which is encoded as it is (no chat template), or token ids, in an array of any library too.
        draft: as `load_pair` takes it, for a model that is no pair; None decodes plainly.
        max_tokens: the most tokens to answer.
        port: a port or its name. None takes the port that claims the model, of those whose array library is imported,
            and torch for a folder or hub id.
        block_size: B; None takes the draft's.
        width: see `prefill`; None takes the larger of B and the draft's block size.
        seed: see `prefill`.
        policy: which drafted tokens are kept; None takes `policies.match()`.
        stop_token_ids: ids that end the answer; None takes the target's and the tokenizer's own, () takes none.
        options: `dtype`, `device`, `draft_bits` and `name` of `load_pair`, for a model that is no pair.

    Returns:
        an iterator over the answer's tokens, a stop token included; as many as `decode` would emit.

    Raises:
        InputError: a pair with what is for loading one; no port for a model; no tokenizer; what `prefill` and `decode`
            refuse.
        DflashError: what `load_pair` refuses.

    Guarantees:
        P01: as for `decode`.

    Example:
        >>> import dflash_fn
        >>> pair = dflash_fn.load_zoo("tiny-code")
        >>> answer = list(dflash_fn.stream_generate(pair, None, "def add(a, b):", max_tokens=8))
        >>> len(answer), answer[-1].finish_reason
        (8, 'length')
    """
    budget = check_count("max_tokens", max_tokens, least=0)
    _check_options(options)
    pair = _as_pair(model, tokenizer, draft, port, options)
    ids = _as_ids(pair.tokenizer, prompt)
    if width is None and block_size is not None:
        width = max(check_count("block_size", block_size, least=1), pair.block_size)
    begun = time.perf_counter()
    state = prefill(pair, [ids], seed=seed, width=width)
    stop_ids = _own_stop_ids(pair) if stop_token_ids is None else stop_token_ids
    steps = rounds(state, pair, policy=policy, max_new_tokens=budget, stop_token_ids=stop_ids, block_size=block_size)
    return _responses(pair, steps, len(ids), time.perf_counter() - begun)


LOADING = ("dtype", "device", "draft_bits", "name")


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name not in LOADING:
            raise errors.InputError(
                f"{name}: stream_generate takes no such argument; beside its own it takes {', '.join(LOADING)} of "
                "load_pair. Sampling and constraints go by policy=, such as match(Sampling(temperature=0.7))"
            )


def _as_pair(model: Any, tokenizer: Any, draft: Any, port: str | Port | None, options: dict[str, Any]) -> Pair:
    if not isinstance(model, Pair):
        pair = load_pair(model, draft, port=port or _port_of(model), tokenizer=tokenizer, **options)
    else:
        given = [name for name, value in {"draft": draft, "port": port, **options}.items() if value is not None]
        if given:
            raise errors.InputError(f"{given[0]}: got one beside a loaded pair, which has its own; leave it out")
        pair = model if tokenizer is None else _with_tokenizer(model, tokenizer)
    if pair.tokenizer is None:
        raise errors.InputError("tokenizer: got None, and the model brings none; give one, for there is text to make")
    return pair


def _with_tokenizer(pair: Pair, tokenizer: Any) -> Pair:
    words = pair.port.load_tokenizer(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
    check_tokenizer(pair.target.spec, words, None)
    return replace(pair, tokenizer=words)


def _port_of(model: Any) -> str | Port:
    if isinstance(model, (str, Path)):
        return "torch"
    # whoever holds a model has imported its library; asking a port without it would import another for nothing
    names = [name for name in port_names() if name in sys.modules]
    for name in names:
        try:
            port = get_port(name)
        except errors.BackendMissing:
            continue
        if port.claims(model):
            return port
    raise errors.InputError(
        f"model: got an object of type {type(model).__name__}, which no port of an imported library claims "
        f"({', '.join(names) or 'none is imported'}); expected a Pair, a model, a folder or a hub id, or give port="
    )


def _as_ids(tokenizer: Any, prompt: Any) -> Sequence[int]:
    """Return token ids; text that begins with the tokenizer's first token, as chat templates do, gets no second one."""
    if not isinstance(prompt, str):
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(ids, Integral):  # which `prefill` would take for a prompt of one token
            raise errors.InputError(f"prompt: got {ids}, expected text or a sequence of token ids")
        return ids
    opened = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
    return tokenizer.encode(prompt, add_special_tokens=not opened)


def _own_stop_ids(pair: Pair) -> set[int]:
    """Return the ids that the target or the tokenizer ends answers with; mlx-lm's tokenizers know several."""
    known = getattr(pair.tokenizer, "eos_token_ids", None) or pair.tokenizer.eos_token_id
    own = () if known is None else (known,) if isinstance(known, int) else known
    return {*pair.target.spec.eos_token_ids, *own}


def _responses(
    pair: Pair, steps: Iterator[tuple[DecodeState, StepInfo]], prompt_tokens: int, seconds: float
) -> Iterator[GenerationResponse]:
    words, count, prompt_tps = TextStream(pair.tokenizer), 0, 0.0
    begun = time.perf_counter() - seconds
    for state, info in steps:
        if info.step == 0:
            prompt_tps, begun = prompt_tokens / _since(begun), time.perf_counter()
        tokens, memory = info.emitted[0], pair.port.peak_memory()
        logprobs = _log_softmax(pair.port.xp, info.logits[0, : len(tokens)])
        for slot, token in enumerate(tokens):
            count += 1
            reason = state.stop[0] if slot == len(tokens) - 1 else None
            words, text = _spelled(words, token, reason)
            yield GenerationResponse(
                text=text,
                token=token,
                logprobs=logprobs[slot],
                from_draft=slot < len(tokens) - 1,
                prompt_tokens=prompt_tokens,
                prompt_tps=prompt_tps,
                generation_tokens=count,
                generation_tps=count / _since(begun),
                peak_memory=memory,
                finish_reason=reason.finish_reason if reason else None,
                num_accepted=len(tokens) - 1,
                step=info.step,
            )


def _spelled(words: TextStream, token: int, reason: StopReason | None) -> tuple[TextStream, str]:
    """Return the text that a token settles; the last token settles all that is left, and a stop token has none."""
    if reason is StopReason.STOP_TOKEN:
        return words, flush(words)
    words, text = feed(words, [token])
    return words, text + flush(words) if reason else text


def _since(begun: float) -> float:
    return max(time.perf_counter() - begun, 1e-9)


def _log_softmax(xp: Any, logits: Array) -> Array:
    logits = xp.astype(logits, xp.float32)
    logits = logits - xp.max(logits, axis=-1, keepdims=True)
    return logits - xp.log(xp.sum(xp.exp(logits), axis=-1, keepdims=True))
