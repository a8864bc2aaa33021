"""Everything that a training run depends on, as records: saved beside the weights, and read back as they were.

The same options, seed, machine and number of threads give the same weights. What does not change the weights (a time
budget, where the run lies) is no option.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Literal, TypeVar

from dflash_fn import errors

__all__ = [
    "CorpusOptions",
    "DraftOptions",
    "EvalOptions",
    "FitOptions",
    "TargetOptions",
    "TextOptions",
    "TrainOptions",
    "digest",
    "from_dict",
    "to_dict",
]

Record = TypeVar("Record")


def _demand(condition: bool, name: str, got: Any, expected: str) -> None:
    if not condition:
        raise errors.InputError(f"{name}: got {got!r}, expected {expected}")


def _least(options: Any, prefix: str, least: int, *names: str) -> None:
    """Demand of numbers that they are `least` or more; None is no number, and allowed where the type allows it."""
    for name in names:
        got = getattr(options, name)
        _demand(got is None or got >= least, f"{prefix}{name}", got, f"{least} or more")


def _shares(options: Any, prefix: str, *names: str) -> None:
    for name in names:
        got = getattr(options, name)
        _demand(0 <= got <= 1, f"{prefix}{name}", got, "a share from 0 to 1")


def _above(options: Any, prefix: str, limit: float, *names: str) -> None:
    for name in names:
        got = getattr(options, name)
        _demand(limit < got < math.inf, f"{prefix}{name}", got, f"a number above {limit:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How weights are moved.

    Attributes:
        steps: of the optimiser; the schedule is a function of the step alone.
        rate: the highest learning rate.
        last_rate: share of it that is left at the end.
        warmup: steps in which the rate grows to `rate`.
        hold: share of the steps, from the start, before the rate falls.
        decay: how it falls.
        optimiser: AdamW; or Muon for matrices inside layers, and AdamW, at a tenth of the rate, for the rest.
        betas: of AdamW; the first is Muon's momentum too.
        weight_decay: of matrices, decoupled.
        clip: largest norm of all gradients together.
        explosion: the run stops when the smoothed loss is this many times its lowest value.
        log_every: steps between points of the curve.
        score_every: steps between evaluations; 0 for none.
        checkpoint_every: steps between checkpoints.
        keep: checkpoints to keep.
    """

    steps: int = 1000
    rate: float = 1e-3
    last_rate: float = 0.05
    warmup: int = 50
    hold: float = 0.0
    decay: Literal["cosine", "linear"] = "cosine"
    optimiser: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    explosion: float = 3.0
    log_every: int = 20
    score_every: int = 0
    checkpoint_every: int = 200
    keep: int = 2

    def __post_init__(self) -> None:
        _least(self, "fit.", 1, "steps", "log_every", "checkpoint_every", "keep")
        _least(self, "fit.", 0, "warmup", "score_every", "weight_decay")
        _above(self, "fit.", 0, "rate", "clip")
        _above(self, "fit.", 1, "explosion")
        _shares(self, "fit.", "hold", "last_rate")
        _demand(all(0 <= beta < 1 for beta in self.betas), "fit.betas", self.betas, "two numbers from 0, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusOptions:
    """Source code to train a target on.

    Attributes:
        stdlib: whether the running Python's standard library is part of it.
        packages: `name==version` of packages whose wheels pip fetches; their licences must be permissive.
        folders: more folders of sources.
        held_out: files that are never trained on.
        run: lines; where that many in a row occurred before, they are dropped.
        longest: bytes of a file above which it is left out (generated code).
        most_digits: share of digits in a file's text above which it is left out (tables).
        vocab_size: tokens of the byte-level BPE.
        tokenizer_bytes: how much text the tokenizer is made from.
    """

    stdlib: bool = True
    packages: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    held_out: int = 40
    run: int = 3
    longest: int = 200_000
    most_digits: float = 0.1
    vocab_size: int = 2048
    tokenizer_bytes: int = 12_000_000

    def __post_init__(self) -> None:
        _demand(self.vocab_size >= 258, "corpus.vocab_size", self.vocab_size, "258 or more: all bytes and two marks")
        _least(self, "corpus.", 1, "held_out", "run", "longest", "tokenizer_bytes")
        _shares(self, "corpus.", "most_digits")
        bad = [name for name in self.packages if name.count("==") != 1]
        _demand(not bad, "corpus.packages", bad[:1], "name==version, so that the run can be repeated")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """A small target to train from scratch.

    Attributes:
        architecture: `qwen3`, or `qwen3_5`, whose layers are gated delta nets but for every `full_every`-th.
        layers: N.
        hidden: H.
        inner: of the gated MLPs.
        heads: query heads of attention layers.
        kv_heads: key and value heads of attention layers.
        head_dim: of attention layers.
        linear_heads: of gated delta nets, keys and values alike.
        linear_dim: of a gated delta net's head.
        full_every: see `architecture`.
        max_context: positions.
        rope_theta: base of the rotary embedding.
        grow_from: layers to begin with; None begins with all of them.
        grow_at: share of the steps after which the rest is added, as copies.
        bigrams: full-batch steps that fit embedding and head to the counts of token pairs beforehand; 0 starts from
            random numbers.
        sequence: tokens of a training sequence.
        batch: sequences a step.
        fit: how weights are moved.
    """

    architecture: Literal["qwen3", "qwen3_5"] = "qwen3"
    layers: int = 6
    hidden: int = 256
    inner: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    linear_heads: int = 4
    linear_dim: int = 64
    full_every: int = 3
    max_context: int = 2048
    rope_theta: float = 10000.0
    grow_from: int | None = None
    grow_at: float = 0.3
    bigrams: int = 150
    sequence: int = 256
    batch: int = 16
    fit: FitOptions = field(default_factory=FitOptions)

    def __post_init__(self) -> None:
        sizes = (
            "layers",
            "hidden",
            "inner",
            "heads",
            "kv_heads",
            "head_dim",
            "linear_heads",
            "linear_dim",
            "full_every",
        )
        _least(self, "target.", 1, *sizes, "max_context", "batch")
        _least(self, "target.", 2, "sequence")
        _least(self, "target.", 0, "bigrams")
        _above(self, "target.", 0, "rope_theta")
        small = self.layers if self.grow_from is None else self.grow_from
        period = self.full_every if self.architecture == "qwen3_5" else 1
        _demand(
            0 < small <= self.layers and small % period == 0,
            "target.grow_from",
            self.grow_from,
            f"from 1 to {self.layers} layers, a multiple of {period}",
        )
        _demand(0 <= self.grow_at < 1, "target.grow_at", self.grow_at, "a share from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The text that a draft learns from: the target's own greedy answers.

    Attributes:
        kind: `continue` goes on from pieces of a corpus (or of text files); `chat` lets the target write user turns
            from its own template and answers them; `given` answers what JSONL files ask.
        files: JSONL of prompts or conversations (`given`), or plain text (`continue`); none with a corpus or `chat`.
        pieces: how many to make.
        prompt_tokens: fewest and most tokens of a prompt that is cut from a text.
        max_new_tokens: of an answer.
        turn_tokens: of a user turn that the target writes.
        openers: what some user turns begin with.
        opened: share of user turns that do.
        temperature: at which user turns are drawn.
        rows: answers written at once.
        least_distinct: share of distinct 4-grams below which an answer is a loop, and dropped.
    """

    kind: Literal["continue", "chat", "given"] = "continue"
    files: tuple[str, ...] = ()
    pieces: int = 4096
    prompt_tokens: tuple[int, int] = (16, 96)
    max_new_tokens: int = 64
    turn_tokens: int = 64
    openers: tuple[str, ...] = ()
    opened: float = 0.5
    temperature: float = 1.0
    rows: int = 32
    least_distinct: float = 0.0

    def __post_init__(self) -> None:
        _least(self, "text.", 1, "pieces", "max_new_tokens", "turn_tokens", "rows")
        _least(self, "text.", 0, "temperature")
        _shares(self, "text.", "opened", "least_distinct")
        low, high = self.prompt_tokens
        _demand(1 <= low <= high, "text.prompt_tokens", self.prompt_tokens, "fewest and most, 1 or more")
        _demand(bool(self.files) or self.kind != "given", "text.files", self.files, "JSONL files to answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """The draft and how it is trained.

    Attributes:
        block_size: B.
        layers: of the draft.
        inner: of its MLPs; None takes the target's.
        taps: `target_layer_ids`.
        mask_token_id: fills the slots to be drafted.
        start: `layers` copies target layers; `ridge` is a closed form fitted to a sample; `random`.
        start_layers: target layers that `layers` copies, one a layer.
        sequences: pieces of text a step.
        anchors: blocks a piece, at random places.
        gamma: slot k weighs exp(-(k - 1) / gamma).
        kl: share of the loss that is KL(target || draft); the rest is cross-entropy with the text.
        negatives: softmax over the ids that occur in the text and this many others, drawn anew each step; None takes
            the whole vocabulary.
        cache: dtype of a cache of the target's hidden states on disk; `none` computes them anew each step.
        held_out: share of the pieces that scores are taken on.
        fit: how weights are moved.
    """

    block_size: int = 8
    layers: int = 3
    inner: int | None = None
    taps: tuple[int, ...] = (1, 3, 4)
    mask_token_id: int = 1
    start: Literal["layers", "ridge", "random"] = "layers"
    start_layers: tuple[int, ...] = (0, 2, 5)
    sequences: int = 16
    anchors: int = 16
    gamma: float = 4.0
    kl: float = 0.3
    negatives: int | None = None
    cache: Literal["none", "float32", "bfloat16"] = "none"
    held_out: float = 0.02
    fit: FitOptions = field(default_factory=FitOptions)

    def __post_init__(self) -> None:
        _least(self, "draft.", 2, "block_size")
        _least(self, "draft.", 1, "layers", "inner", "sequences", "anchors")
        _least(self, "draft.", 0, "negatives")
        _demand(bool(self.taps), "draft.taps", self.taps, "at least one layer of the target")
        _demand(len(set(self.taps)) == len(self.taps), "draft.taps", self.taps, "each layer once")
        _shares(self, "draft.", "kl")
        _above(self, "draft.", 0, "gamma")
        _demand(0 < self.held_out < 1, "draft.held_out", self.held_out, "a share between 0 and 1")
        if self.start == "layers":
            _demand(len(self.start_layers) == self.layers, "draft.start_layers", self.start_layers, "one a draft layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """What is reported of a pair.

    Attributes:
        block_size: B of decoding.
        max_new_tokens: of each answer.
        first: tau is also given over the steps of the first so many tokens.
        prompts: JSONL files of prompts.
        raw: whether prompts go in without a chat template.
        rows: of a JSONL file, from the start; None takes all.
        file_prompt: tokens of a held-out file that are its prompt.
        head_bytes: of a held-out file, over which bits a byte are measured.
    """

    block_size: int = 8
    max_new_tokens: int = 96
    first: int = 32
    prompts: tuple[str, ...] = ()
    raw: bool = True
    rows: int | None = None
    file_prompt: int = 128
    head_bytes: int = 2048

    def __post_init__(self) -> None:
        _least(self, "eval.", 1, "block_size", "max_new_tokens", "first", "rows", "file_prompt", "head_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """A whole run.

    Attributes:
        name: of the pair.
        seed: of everything that is drawn.
        threads: of the port; part of what the weights depend on. None leaves them alone.
        device: the port's name of one; None takes its first.
        autocast: dtype in which products are taken while training; weights and sums stay float32.
        compile: whether the target answers, in `data` and `eval`, on kernels compiled for this machine's CPU, as
            `load_pair` says; it needs a C++ compiler.
        source: the target's folder, hub id or zoo name, where none is trained.
        corpus: source code; None for none.
        target: a target to train; None takes `source`.
        text: what the draft learns from.
        draft: the draft.
        eval: what is reported.
        exclude: JSONL files of prompts that may not be in the data, nor anything near them.
        shared_words: words in a row that make a text near a prompt.
        licence: of the weights, for the model card; empty where nobody has settled it.
    """

    name: str = "pair"
    seed: int = 0
    threads: int | None = None
    device: str | None = None
    autocast: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    source: str | None = None
    corpus: CorpusOptions | None = None
    target: TargetOptions | None = None
    text: TextOptions = field(default_factory=TextOptions)
    draft: DraftOptions = field(default_factory=DraftOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
    exclude: tuple[str, ...] = ()
    shared_words: int = 10
    licence: str = ""

    def __post_init__(self) -> None:
        _demand(0 <= self.seed < 2**64, "seed", self.seed, "an integer from 0 to 2**64 - 1")
        _least(self, "", 1, "threads", "shared_words")
        _demand(self.target is None or self.corpus is not None, "corpus", None, "what the target is to be trained on")
        one = (self.target is None) != (self.source is None)
        _demand(one, "source", self.source, "a target's folder, or options of a target to train, and not both")


def to_dict(options: Any) -> dict[str, Any]:
    """Return options as JSON holds them."""
    return json.loads(json.dumps(asdict(options)))


def _plain(value: Any) -> Any:
    return to_dict(value) if is_dataclass(value) else value


def digest(options: Any) -> str:
    """Return 16 hexadecimal digits that two options (or texts) share if they are equal."""
    return hashlib.blake2b(json.dumps(_plain(options), sort_keys=True).encode(), digest_size=8).hexdigest()


def from_dict(kind: type[Record], values: Mapping[str, Any], *, name: str = "options") -> Record:
    """Read options that `to_dict` wrote; a key that is left out has its default.

    Raises:
        InputError: an unknown key, or a value of another type or out of range.

    Example:
        >>> from_dict(FitOptions, {"steps": 3}).steps
        3
    """
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise errors.InputError(f"{name}: got the key {key!r}, expected one of {', '.join(hints)}")
    return kind(**{key: _value(hints[key], value, f"{name}.{key}") for key, value in values.items()})


def _value(hint: Any, value: Any, name: str) -> Any:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (part for part in parts if part is not types.NoneType)
        return None if value is None else _value(inner, value, name)
    if is_dataclass(hint):
        _demand(isinstance(value, Mapping), name, value, "an object of options")
        return from_dict(typing.cast("type[Any]", hint), value, name=name)
    if origin is Literal:
        _demand(value in parts, name, value, f"one of {', '.join(map(str, parts))}")
        return value
    if origin is tuple:
        return _tuple(parts, value, name)
    _demand(_fits(hint, value), name, value, f"a value of type {hint.__name__}")
    return float(value) if hint is float else value


def _tuple(parts: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    _demand(isinstance(value, (list, tuple)), name, value, "a list")
    kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else list(parts)
    _demand(len(kinds) == len(value), name, value, f"a list of {len(kinds)}")
    return tuple(_value(kind, one, f"{name}[{i}]") for i, (kind, one) in enumerate(zip(kinds, value, strict=True)))


def _fits(hint: type, value: Any) -> bool:
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
