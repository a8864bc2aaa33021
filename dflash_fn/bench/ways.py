"""Ways to decode a prompt greedily that keep the logits: ours in any shape, transformers, mlx-lm, servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn import errors
from dflash_fn.bench.engines import mlx_lm_model, transformers_model
from dflash_fn.config import TargetSpec, parse_target
from dflash_fn.glimpses import Row
from dflash_fn.load import load_pair, read_tokenizer
from dflash_fn.loop import rounds
from dflash_fn.opening import prefill
from dflash_fn.proposers import PROPOSERS, own_block
from dflash_fn.records import Pair, Proposer
from dflash_fn.registry import get_port
from dflash_fn.sources import Source, resolve
from dflash_fn.tolerances import PEAK, UNIT

__all__ = ["ENGINES", "Answer", "Recipe", "Way", "open_way", "parse"]

ENGINES = ("ours", "transformers", "mlx-lm", "server")
"""What can decode."""

NUMBERS = ("block", "peak", "width")
"""Options that are numbers."""

APIS = ("completions", "chat")
"""What a server may be asked over."""

WIDEST = 32
"""The widest verification of every port."""

KEYS = {
    "ours": ("block", "draft", "dtype", "port", "width"),
    "transformers": ("dtype",),
    "mlx-lm": ("dtype",),
    "server": ("api", "dtype", "model", "peak", "url"),
}
"""Options by engine."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way, as it is written: `ENGINE`, then `KEY=VALUE`s, with commas between.

    Attributes:
        engine: one of `ENGINES`.
        port: for `ours`.
        dtype: of weights and activations; None takes float32, and for a server the checkpoint's own.
        block: block size; None takes the draft's.
        width: of a verification; None takes the block size.
        draft: `none`, `ngram`, `both`, or a folder or hub id; None takes the pair's.
        url: of a server.
        model: of a server; None takes its only one.
        api: `completions` or `chat`; None takes what tells most.
        peak: how large a server's logits are, at their largest; None takes `tolerances.PEAK`.
    """

    engine: str = "ours"
    port: str = "torch"
    dtype: str | None = None
    block: int | None = None
    width: int | None = None
    draft: str | None = None
    url: str | None = None
    model: str | None = None
    api: str | None = None
    peak: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a way made of a prompt.

    Attributes:
        tokens: that it emitted; empty where only `text` is known.
        logits: [V] float32 for each, from which it was chosen, or what a server tells of them.
        slots: the slot of the block whose logits those were; None where there are no blocks.
        text: where the tokens are not known, what they read.
        ended: whether a stop token ended it, which may or may not be among the tokens.
    """

    tokens: Sequence[int]
    logits: Sequence[Row]
    slots: Sequence[int] | None = None
    text: str | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """A way that is ready to decode.

    Attributes:
        name: the recipe, as it was written.
        dtype: of its logits.
        spec: of its target.
        tokenizer: of its target; None if it has none.
        answer: takes token ids and how many tokens to emit, past all stop tokens.
        peak: the largest magnitude of its logits, where it does not tell them.
        promise: port, dtype and width, for ours: the contract promises the same bits where all three are the same.
    """

    name: str
    dtype: str
    spec: TargetSpec
    tokenizer: Any
    answer: Callable[[Sequence[int], int], Answer]
    peak: float = PEAK
    promise: tuple[str, str, int] | None = None


def parse(text: str) -> Recipe:
    """Read a recipe.

    Raises:
        InputError: an unknown engine or key, a key given twice, or a number that is none.

    Example:
        >>> parse("ours,block=4,port=mlx").block
        4
    """
    engine, *options = [part.strip() for part in text.split(",")]
    if "=" in engine:
        engine, options = "ours", [engine, *options]
    if engine not in ENGINES:
        raise errors.InputError(f"way {text!r}: got engine {engine!r}, expected one of: {', '.join(ENGINES)}")
    given: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in KEYS[engine] or not value:
            expected = ", ".join(f"{name}=..." for name in KEYS[engine])
            raise errors.InputError(f"way {text!r}: got {option!r}, expected one of: {expected}")
        if key in given:
            raise errors.InputError(f"way {text!r}: got {key}= twice, expected it once")
        given[key] = _number(text, key, value) if key in NUMBERS else value
    return _checked(text, Recipe(engine, **given))


def _checked(text: str, made: Recipe) -> Recipe:
    if made.engine == "server" and made.url is None:
        raise errors.InputError(f"way {text!r}: which server? give url=http://...")
    if made.api not in (None, *APIS):
        raise errors.InputError(f"way {text!r}: got api={made.api}, expected one of: {', '.join(APIS)}")
    if made.dtype is not None and made.dtype not in UNIT:
        raise errors.InputError(f"way {text!r}: got dtype {made.dtype!r}, expected one of: {', '.join(UNIT)}")
    if made.block and made.width and made.block > made.width:
        raise errors.InputError(f"way {text!r}: got block={made.block} above width={made.width}; the block must fit in")
    if max(made.block or 1, made.width or 1) > WIDEST:
        raise errors.InputError(f"way {text!r}: got more than {WIDEST} slots, the most that a port verifies at once")
    return made


def _number(text: str, key: str, value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise errors.InputError(f"way {text!r}: got {key}={value}, expected a number of at least 1")
    return int(value)


def open_way(text: str, target: str | Path, draft: str | Path | None) -> Way:
    """Load what a recipe needs.

    Args:
        text: the recipe.
        target: folder or hub id.
        draft: the pair's, for recipes that do not name one.

    Raises:
        DflashError: as `parse` and `load_pair` raise.
        BackendMissing: the engine is not installed.
        ServerError: a server that cannot be reached or used.
    """
    recipe = parse(text)
    if recipe.engine == "ours":
        return _ours(text, recipe, target, draft)
    if recipe.engine == "server":
        from dflash_fn.bench.server_way import open_server_way  # which takes the records of this module

        return open_server_way(text, recipe, target)
    name, open_model = ("torch", _transformers) if recipe.engine == "transformers" else ("mlx", _mlx_lm)
    port, source = get_port(name), resolve(target, role="target")
    spec = parse_target(source.config, name=source.name)
    dtype = recipe.dtype or "float32"
    return Way(text, dtype, spec, read_tokenizer(port, source), open_model(source, dtype))


def _ours(text: str, recipe: Recipe, target: str | Path, draft: str | Path | None) -> Way:
    without = recipe.draft in ("none", "ngram")
    named = recipe.draft if recipe.draft not in ("none", *PROPOSERS) else None
    pair = load_pair(target, None if without else named or draft, port=recipe.port, dtype=recipe.dtype or "float32")
    make = PROPOSERS.get(recipe.draft or "")
    block = recipe.block or (1 if recipe.draft == "none" else own_block(pair, proposes=make is not None))
    width = recipe.width or block

    def answer(ids: Sequence[int], count: int) -> Answer:
        return _decoded(pair, ids, count, block, width, make() if make else None)

    return Way(
        text,
        pair.target.dtype,
        pair.target.spec,
        pair.tokenizer,
        answer,
        promise=(recipe.port, pair.target.dtype, width),
    )


def _decoded(pair: Pair, ids: Sequence[int], count: int, block: int, width: int, proposer: Proposer | None) -> Answer:
    tokens: list[int] = []
    logits: list[np.ndarray] = []
    slots: list[int] = []
    state = prefill(pair, list(ids), width=width)
    for _, info in rounds(state, pair, max_new_tokens=count, stop_token_ids=(), block_size=block, proposer=proposer):
        (emitted,) = info.emitted
        tokens += emitted
        logits += list(pair.port.to_numpy(info.logits[0, : len(emitted)]).astype(np.float32))
        slots += range(len(emitted))
    return Answer(tokens, logits, slots)


def _transformers(source: Source, dtype: str) -> Callable[[Sequence[int], int], Answer]:
    import torch

    model = transformers_model(source, dtype)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True}

    def answer(ids: Sequence[int], count: int) -> Answer:
        given = torch.tensor([list(ids)])
        with torch.inference_mode():
            made = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=count,
                return_dict_in_generate=True,
                **options,
            )
        return Answer(made.sequences[0, len(ids) :].tolist(), [row[0].float().numpy() for row in made.logits])

    return answer


def _mlx_lm(source: Source, dtype: str) -> Callable[[Sequence[int], int], Answer]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    model = mlx_lm_model(source, dtype)

    def answer(ids: Sequence[int], count: int) -> Answer:
        logits: list[np.ndarray] = []

        def keep(_: Any, row: Any) -> Any:
            logits.append(np.array(row[0].astype(mx.float32)))
            return row

        made = generate_step(mx.array(list(ids)), model, max_tokens=count, logits_processors=[keep])
        tokens = [int(token) for token, _ in made]
        return Answer(tokens, logits[: len(tokens)])

    return answer
