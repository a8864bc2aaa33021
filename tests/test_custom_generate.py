"""`model.generate(custom_generate=...)` does what `model.generate(do_sample=False)` does, token for token."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from dflash_fn_torch import custom_generate
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)
from transformers.generation.logits_process import LogitNormalization, LogitsProcessorList, TemperatureLogitsWarper

import dflash_fn
from dflash_fn import errors, zoo
from dflash_fn.divergence import explain_divergence, first_difference
from dflash_fn.metrics import summarize
from dflash_fn.tolerances import bound
from tests.helpers.fixtures import checkpoints as checkpoints
from tests.helpers.tiny import Checkpoints, DraftDesign, TargetDesign

CODE = "class Stack:\n    def __init__(self):\n"
BATCH = (CODE, "def f(x):", "import os\nimport sys\n\n\ndef main(args):\n    for name in ")
DESIGNS = {
    "llama": DraftDesign(),
    "llama-tied-biases": DraftDesign(TargetDesign(seed=3, tied=True, bias=True)),
    "qwen3-yarn": DraftDesign(TargetDesign(seed=4, family="qwen3", rope="yarn"), block_size=5),
    "qwen3-sliding": DraftDesign(TargetDesign(seed=5, family="qwen3", window=6), window=6, block_size=2),
}


def read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def files() -> Any:
    return zoo.fetch("tiny-code")


@pytest.fixture(scope="module")
def model(files: Any) -> Any:
    return read(files.target)


@pytest.fixture(scope="module")
def words(files: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(files.target, padding_side="left")
    tokenizer.pad_token_id = 2
    return tokenizer


@pytest.fixture(scope="module")
def fast(files: Any) -> Callable[..., Any]:
    return custom_generate(files.draft)


def both(model: Any, fast: Callable[..., Any], inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Generate with and without; fail unless the tokens are the same, up to a near tie of a row."""
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": None, **options}
    wanted = {**options, "return_dict_in_generate": True, "output_logits": True}
    theirs = model.generate(**inputs, **wanted)
    ours = model.generate(**inputs, **wanted, custom_generate=fast)
    demand_same(ours, theirs, inputs["input_ids"].shape[1])
    return ours, theirs


def demand_same(ours: Any, theirs: Any, start: int) -> None:
    if torch.equal(ours.sequences, theirs.sequences):
        return
    spec = dflash_fn.load_zoo("tiny-code").target.spec
    for row, (mine, other) in enumerate(zip(ours.sequences.tolist(), theirs.sequences.tolist(), strict=True)):
        at = first_difference(mine, other)
        assert at is not None or len(mine) == len(other)
        if at is not None:
            logits = [made.logits[at - start][row].numpy() for made in (ours, theirs)]
            found = explain_divergence(f"row {row}", at, *logits, relative_bound=bound("float32", "logits", spec))
            assert found.near_tie, str(found)


def encoded(words: Any, *texts: str) -> Any:
    return words(list(texts), return_tensors="pt", padding=True)


# tokens


@pytest.mark.parametrize("name", DESIGNS)
def test_random_models_say_the_same(name: str, checkpoints: Checkpoints) -> None:
    design = DESIGNS[name]
    model = read(checkpoints.folder(design.target))
    fast = custom_generate(checkpoints.folder(design))
    ids = torch.tensor([[5, 9, 1, 22, 40, 7, 7, 2, 31]])
    for budget in (1, 2, design.block_size, design.block_size + 1, 40):
        both(model, fast, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, max_new_tokens=budget)


def test_blocks_are_accepted_and_the_tokens_are_the_same(model: Any, fast: Any, words: Any) -> None:
    ours, _ = both(model, fast, encoded(words, CODE), max_new_tokens=64)
    pair = dflash_fn.load_zoo("tiny-code")
    state = dflash_fn.prefill(pair, words.encode(CODE))
    steps = list(dflash_fn.rounds(state, pair, max_new_tokens=64, stop_token_ids=()))
    assert steps[-1][0].tokens[0] == tuple(ours.sequences[0].tolist())
    assert (summarize([info for _, info in steps]).tau or 0) > 1.5


@pytest.mark.parametrize(("block_size", "width"), [(1, None), (3, None), (8, 8), (12, None), (4, 16)])
def test_block_size_and_width(block_size: int, width: int | None, model: Any, files: Any, words: Any) -> None:
    both(model, custom_generate(files.draft, block_size=block_size, width=width), encoded(words, CODE))


def test_without_a_draft(model: Any, words: Any) -> None:
    both(model, custom_generate(None), encoded(words, CODE))


def test_length_by_max_length_and_by_default(model: Any, fast: Any, words: Any) -> None:
    inputs = encoded(words, CODE)
    ours, _ = both(model, fast, inputs, max_new_tokens=None, max_length=inputs["input_ids"].shape[1] + 3)
    assert ours.sequences.shape[1] == inputs["input_ids"].shape[1] + 3
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*default `max_length`")  # newer versions advise against it
        plain = model.generate(**inputs, do_sample=False, eos_token_id=None)
        made = model.generate(**inputs, eos_token_id=None, custom_generate=fast)
    assert made.tolist() == plain.tolist()


def test_bfloat16_keeps_its_dtype(files: Any, fast: Any, words: Any) -> None:
    half: Any = AutoModelForCausalLM.from_pretrained(files.target, dtype=torch.bfloat16).eval()
    inputs = encoded(words, CODE)
    ours = half.generate(**inputs, custom_generate=fast, max_new_tokens=16, eos_token_id=None)
    pair = dflash_fn.load_zoo("tiny-code", dtype="bfloat16")
    state = dflash_fn.prefill(pair, inputs["input_ids"][0].tolist())
    assert tuple(ours[0].tolist()) == dflash_fn.decode(state, pair, max_new_tokens=16, stop_token_ids=()).tokens[0]


# where it ends


def test_a_stop_token_at_every_offset_of_a_block(model: Any, fast: Any, words: Any) -> None:
    inputs = encoded(words, "async def fetch(url):")
    start = inputs["input_ids"].shape[1]
    text = model.generate(**inputs, max_new_tokens=12, eos_token_id=None)[0, start:].tolist()
    assert len(set(text)) > 6
    for index, token in enumerate(text):
        eos = (token, [token, 3], torch.tensor([3, token]))[index % 3]
        ours, _ = both(model, fast, inputs, eos_token_id=eos, max_new_tokens=13)
        assert ours.sequences.shape[1] == start + text.index(token) + 1


def test_padded_batches(model: Any, fast: Any, words: Any) -> None:
    inputs = encoded(words, *BATCH)
    assert not inputs["attention_mask"].all()
    free, _ = both(model, fast, inputs, max_new_tokens=20)
    start = inputs["input_ids"].shape[1]
    stop = free.sequences[1, start + 4].item()
    ours, _ = both(model, fast, inputs, max_new_tokens=20, eos_token_id=stop, pad_token_id=2)
    assert (ours.sequences[:, start:] == 2).any()
    for row, text in enumerate(BATCH[:2]):
        alone = encoded(words, text)
        single, _ = both(model, fast, alone, max_new_tokens=20, eos_token_id=stop, pad_token_id=2)
        answer = single.sequences[0, alone["input_ids"].shape[1] :].tolist()
        assert ours.sequences[row, start:].tolist()[: len(answer)] == answer
        assert set(ours.sequences[row, start + len(answer) :].tolist()) <= {2}


def test_stop_ids_serve_as_padding_where_there_is_none(model: Any, fast: Any, words: Any) -> None:
    inputs = encoded(words, *BATCH)
    free = model.generate(**inputs, max_new_tokens=20, eos_token_id=None)
    both(model, fast, inputs, eos_token_id=[free[1, inputs["input_ids"].shape[1] + 4].item(), 3])


def test_a_stop_id_outside_the_vocabulary_never_comes(model: Any, fast: Any, words: Any) -> None:
    both(model, fast, encoded(words, CODE), eos_token_id=[10**6])


class Recorded(StoppingCriteria):
    """Ends a row after its n-th new token, or at a token, and remembers what it was asked."""

    def __init__(self, start: int, ends: Sequence[int | None], token: int | None = None) -> None:
        self.start, self.ends, self.token = start, ends, token
        self.asked: list[list[list[int]]] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.asked.append(input_ids.tolist())
        count = input_ids.shape[1] - self.start
        counted = torch.tensor([end is not None and count >= end for end in self.ends])
        return counted | (input_ids[:, -1] == self.token) if self.token is not None else counted


@pytest.mark.parametrize("count", range(1, 12))
def test_a_criterion_cuts_inside_a_block(count: int, model: Any, fast: Any, words: Any) -> None:
    inputs = encoded(words, CODE)
    start = inputs["input_ids"].shape[1]
    theirs, ours = (StoppingCriteriaList([Recorded(start, [count])]) for _ in range(2))
    plain = model.generate(**inputs, stopping_criteria=theirs, max_new_tokens=24, eos_token_id=None)
    made = model.generate(**inputs, stopping_criteria=ours, max_new_tokens=24, eos_token_id=None, custom_generate=fast)
    assert made.tolist() == plain.tolist()
    assert made.shape[1] == start + count
    assert ours[0].asked == theirs[0].asked


@pytest.mark.parametrize("eos", [None, "seen", "never"])
def test_criteria_in_batches_are_asked_as_generate_asks_them(
    eos: str | None, model: Any, fast: Any, words: Any
) -> None:
    inputs = encoded(words, *BATCH)
    start = inputs["input_ids"].shape[1]
    free = model.generate(**inputs, max_new_tokens=20, eos_token_id=None)
    stop = {None: None, "seen": free[2, start + 6].item(), "never": 3}[eos]
    for ends in ([2, 5, 9], [7, None, 1]):
        theirs, ours = (StoppingCriteriaList([Recorded(start, ends)]) for _ in range(2))
        options = {"max_new_tokens": 11, "eos_token_id": stop, "pad_token_id": 2}
        plain = model.generate(**inputs, **options, stopping_criteria=theirs)
        made = model.generate(**inputs, **options, stopping_criteria=ours, custom_generate=fast)
        assert made.tolist() == plain.tolist()
        assert ours[0].asked == theirs[0].asked


def test_stop_strings_end_where_generate_ends(model: Any, fast: Any, words: Any) -> None:
    inputs = encoded(words, CODE)
    for string in ("self", "\n", ".items = ", " ="):
        criteria = StoppingCriteriaList([StopStringCriteria(words, [string])])
        plain = model.generate(**inputs, stopping_criteria=criteria, max_new_tokens=24, eos_token_id=None)
        made = model.generate(
            **inputs, stopping_criteria=criteria, max_new_tokens=24, eos_token_id=None, custom_generate=fast
        )
        assert made.tolist() == plain.tolist()


def test_the_end_of_the_context_is_said(checkpoints: Checkpoints) -> None:
    design = DraftDesign(TargetDesign(max_context=16))
    model, fast = read(checkpoints.folder(design.target)), custom_generate(checkpoints.folder(design))
    ids = torch.tensor([[5, 9, 1, 22, 40, 7, 7, 2, 31]])
    with pytest.warns(UserWarning, match="the answer ends early, at the target's context of 16 tokens"):
        made = model.generate(ids, custom_generate=fast, max_new_tokens=40, eos_token_id=None)
    plain = model.generate(ids, max_new_tokens=40, eos_token_id=None)
    assert made.tolist() == plain[:, :16].tolist()
    rows = torch.tensor([[0, 0, 0, 5, 9, 1], [3, 5, 9, 1, 22, 40]])
    with pytest.warns(UserWarning, match="context of 16"):
        made = model.generate(
            rows, attention_mask=(rows > 0).long(), custom_generate=fast, max_new_tokens=40, eos_token_id=None
        )
    assert made.shape == (2, 16)


# streamers and records


class Heard:
    """A streamer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: Any) -> None:
        self.told.append(value.tolist())

    def end(self) -> None:
        self.told.append("end")


def test_streamers_are_told_the_prompt_and_each_token(model: Any, fast: Any, words: Any) -> None:
    for texts in ((CODE,), BATCH):
        theirs, ours = Heard(), Heard()
        options = {"max_new_tokens": 13, "eos_token_id": None}
        plain = model.generate(**encoded(words, *texts), **options, streamer=theirs)
        made = model.generate(**encoded(words, *texts), **options, streamer=ours, custom_generate=fast)
        assert made.tolist() == plain.tolist()
        assert ours.told == theirs.told
        assert len(ours.told) == 1 + 13 + 1


def test_text_streamers_print_the_same(model: Any, fast: Any, words: Any, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for custom in (None, fast):
        model.generate(**encoded(words, CODE), streamer=TextStreamer(words), max_new_tokens=20, custom_generate=custom)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].startswith(CODE)


def test_records_hold_sequences_scores_and_logits(model: Any, fast: Any, words: Any) -> None:
    inputs = encoded(words, *BATCH)
    start = inputs["input_ids"].shape[1]
    free = model.generate(**inputs, max_new_tokens=10, eos_token_id=None)
    options = {"eos_token_id": free[1, start + 2].item(), "pad_token_id": 2, "max_new_tokens": 10}
    ours, theirs = both(model, fast, inputs, **options, output_scores=True)
    assert type(ours) is type(theirs)
    assert len(ours.logits) == len(ours.scores) == ours.sequences.shape[1] - start
    spec = dflash_fn.load_zoo("tiny-code").target.spec
    zeros = 0
    for step, (mine, other) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        assert mine.dtype is torch.float32
        assert torch.equal(mine, ours.scores[step])
        for row in range(len(BATCH)):
            if options["eos_token_id"] in ours.sequences[row, start : start + step].tolist():
                zeros += 1
                assert not mine[row].any()
                continue
            assert mine[row].argmax() == ours.sequences[row, start + step]
            apart = (mine[row] - other[row]).abs().max()
            assert apart <= bound("float32", "logits", spec) * other[row].abs().max()
    assert zeros


def test_records_hold_no_more_than_was_asked_for(model: Any, fast: Any, words: Any) -> None:
    options = {**encoded(words, CODE), "custom_generate": fast, "max_new_tokens": 3, "eos_token_id": None}
    made = model.generate(**options, return_dict_in_generate=True)
    assert list(made) == ["sequences"]
    made = model.generate(**options, return_dict_in_generate=True, output_scores=True)
    assert list(made) == ["sequences", "scores"]
    made = model.generate(**options, output_logits=True, return_dict_in_generate=False)
    assert torch.is_tensor(made)


def test_scores_are_what_a_neutral_processor_makes_of_logits(model: Any, fast: Any, words: Any) -> None:
    ours, theirs = both(model, fast, encoded(words, CODE), renormalize_logits=True, output_scores=True)
    assert torch.allclose(ours.scores[3].logsumexp(-1), torch.zeros(1), atol=1e-5)
    assert not torch.equal(ours.scores[3], ours.logits[3])
    assert len(ours.scores) == len(theirs.scores)


# what is refused


def own_cache(model: Any) -> dict[str, Any]:
    """Return a cache that has read a token, under the name that this version of transformers knows it by."""
    from transformers import DynamicCache

    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    model(torch.tensor([[5]]), **{name: cache})
    return {name: cache}


REFUSED: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "sampling": (lambda model: {"do_sample": True}, "got do_sample=True, .* pass do_sample=False"),
    "beams": (lambda model: {"num_beams": 2}, "got num_beams=2, .* supported is greedy decoding"),
    "several answers": (
        lambda model: {"num_return_sequences": 2, "num_beams": 2},
        "got num_beams=2",
    ),
    "assistant": (lambda model: {"assistant_model": model}, "got assistant_model='Qwen3ForCausalLM'"),
    "synced": (lambda model: {"synced_gpus": True}, "got synced_gpus=True"),
    "prompt lookup": (lambda model: {"prompt_lookup_num_tokens": 3}, "got prompt_lookup_num_tokens=3"),
    "attentions": (lambda model: {"output_attentions": True}, "got output_attentions=True"),
    "hidden states": (lambda model: {"output_hidden_states": True}, "got output_hidden_states=True"),
    "penalty": (lambda model: {"repetition_penalty": 1.2}, "logits processor RepetitionPenaltyLogitsProcessor"),
    "n-grams": (lambda model: {"no_repeat_ngram_size": 2}, "logits processor NoRepeatNGramLogitsProcessor"),
    "least length": (
        lambda model: {"min_new_tokens": 4, "eos_token_id": 5},
        "logits processor Min.*LengthLogitsProcessor",
    ),
    "a processor": (
        lambda model: {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])},
        "got the logits processor TemperatureLogitsWarper",
    ),
    "prefixes": (lambda model: {"prefix_allowed_tokens_fn": lambda row, ids: [1]}, "PrefixConstrainedLogitsProcessor"),
    "embeddings": (
        lambda model: {"inputs_embeds": model.get_input_embeddings()(torch.tensor([[1, 2]])), "input_ids": None},
        "got inputs_embeds=; supported inputs are input_ids and attention_mask",
    ),
    "cache": (own_cache, "got (cache|past_key_values)=, which it neither reads nor fills"),
    "positions": (
        lambda model: {"position_ids": torch.tensor([[4, 5, 6, 7]])},
        "got position_ids= that do not count the prompt's tokens from 0 on",
    ),
    "padding on the right": (
        lambda model: {"attention_mask": torch.tensor([[1, 1, 1, 0]])},
        "row 0 of attention_mask is not zeros and then ones; pad on the left",
    ),
    "a hole": (
        lambda model: {"attention_mask": torch.tensor([[1, 0, 1, 1]])},
        "row 0 of attention_mask is not zeros and then ones",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, model: Any, fast: Any) -> None:
    options, message = REFUSED[name]
    wanted = {"input_ids": torch.tensor([[5, 9, 1, 22]]), "max_new_tokens": 4, "eos_token_id": None, **options(model)}
    wanted.setdefault("attention_mask", None if "inputs_embeds" in wanted else torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(errors.InputError, match=message):
        model.generate(**{key: value for key, value in wanted.items() if value is not None}, custom_generate=fast)


def test_neutral_processors_pass(model: Any, fast: Any, words: Any) -> None:
    both(model, fast, encoded(words, CODE), logits_processor=LogitsProcessorList([LogitNormalization()]))
    both(model, fast, encoded(words, CODE), remove_invalid_values=True)


def test_a_row_that_ends_early_needs_a_pad_token(model: Any, fast: Any, words: Any) -> None:
    from transformers.generation.stopping_criteria import EosTokenCriteria

    inputs = encoded(words, *BATCH)
    free = model.generate(**inputs, max_new_tokens=8, eos_token_id=None)
    stop = StoppingCriteriaList([EosTokenCriteria(free[1, inputs["input_ids"].shape[1] + 1].item())])
    options = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": None, "stopping_criteria": stop}
    with pytest.raises(errors.InputError, match=r"a row has ended before others, and neither .* has a pad_token_id"):
        model.generate(**inputs, **options, custom_generate=fast)


# models and drafts


def test_the_model_is_unchanged(model: Any, fast: Any, words: Any) -> None:
    inputs = encoded(words, *BATCH)
    before = dict(model.__dict__), {name: value.clone() for name, value in model.state_dict().items()}
    config, logits = model.generation_config.to_dict(), model(**inputs).logits
    model.generate(**inputs, custom_generate=fast, max_new_tokens=8)
    assert model.__dict__ == before[0]
    assert model.generation_config.to_dict() == config
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
    assert torch.equal(model(**inputs).logits, logits)


def test_a_loaded_draft_serves(model: Any, files: Any, words: Any) -> None:
    draft = dflash_fn.load_zoo("tiny-code").draft
    both(model, custom_generate(draft), encoded(words, CODE))
    half = dflash_fn.load_zoo("tiny-code", dtype="bfloat16").draft
    with pytest.raises(errors.InputError, match="draft: got a Model in bfloat16 on cpu, the target is in float32"):
        model.generate(**encoded(words, CODE), custom_generate=custom_generate(half), max_new_tokens=2)
    target = dflash_fn.load_zoo("tiny-code").target
    with pytest.raises(errors.InputError, match="draft: got a Model with a TargetSpec, expected one with a DraftSpec"):
        model.generate(**encoded(words, CODE), custom_generate=custom_generate(target), max_new_tokens=2)


@pytest.mark.oracle
def test_upstreams_module_serves(model: Any, files: Any, words: Any) -> None:
    upstream = pytest.importorskip(
        "dflash.model", reason="needs upstream's package: pip install --no-deps dflash==0.1.0"
    )
    draft = upstream.DFlashDraftModel.from_pretrained(files.draft, dtype=torch.float32).eval()
    both(model, custom_generate(draft), encoded(words, CODE))


@pytest.mark.parametrize(
    ("design", "error"),
    [
        (DraftDesign(TargetDesign(hidden=48)), errors.HiddenSizeMismatch),
        (DraftDesign(TargetDesign(vocab=64)), errors.VocabularyMismatch),
        (DraftDesign(TargetDesign(layers=3)), errors.TargetLayersMismatch),
        (DraftDesign(TargetDesign(layers=3), taps=(0, 2)), errors.TappedLayerMismatch),
        (TargetDesign(), errors.ConfigError),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_at_the_first_call(
    design: DraftDesign | TargetDesign, error: type[errors.DflashError], checkpoints: Checkpoints
) -> None:
    fast = custom_generate(checkpoints.folder(design))
    model = read(checkpoints.folder(TargetDesign()))
    with pytest.raises(error):
        model.generate(torch.tensor([[5, 9, 1]]), custom_generate=fast, max_new_tokens=2, eos_token_id=None)


def test_a_loaded_draft_of_another_target_is_refused(checkpoints: Checkpoints) -> None:
    other = checkpoints.pair(dflash_fn.get_port("torch"), DraftDesign(TargetDesign(vocab=64))).draft
    model, fast = read(checkpoints.folder(TargetDesign())), custom_generate(other)
    with pytest.raises(errors.VocabularyMismatch):
        model.generate(torch.tensor([[5, 9, 1]]), custom_generate=fast, max_new_tokens=2, eos_token_id=None)


def test_a_pair_is_loaded_once_and_goes_with_its_model(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dflash_fn_torch.generate as module

    loads: list[Any] = []
    monkeypatch.setattr(module, "_load", lambda *what, load=module._load: loads.append(1) or load(*what))
    design = DraftDesign()
    model, fast = read(checkpoints.folder(design.target)), custom_generate(checkpoints.folder(design))
    ids = torch.tensor([[5, 9, 1]])
    for _ in range(3):
        model.generate(ids, custom_generate=fast, max_new_tokens=2, eos_token_id=None)
    assert len(loads) == 1
    other = read(checkpoints.folder(design.target))
    other.generate(ids, custom_generate=fast, max_new_tokens=2, eos_token_id=None)
    assert len(loads) == 2
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_changed_weights_are_read_anew(checkpoints: Checkpoints) -> None:
    design = DraftDesign()
    model, fast = read(checkpoints.folder(design.target)), custom_generate(checkpoints.folder(design))
    inputs = {"input_ids": torch.tensor([[5, 9, 1]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    first, _ = both(model, fast, inputs)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    second, _ = both(model, fast, inputs)
    assert first.sequences.tolist() != second.sequences.tolist()


def test_bare_calls_work_without_generate(model: Any, fast: Any, words: Any) -> None:
    config = replace_config(model, max_length=20)
    ids = encoded(words, "def f(x):")["input_ids"]
    assert fast(model, ids, LogitsProcessorList(), limit(20), config).shape == (1, 20)


def replace_config(model: Any, **changes: Any) -> Any:
    import copy

    config = copy.deepcopy(model.generation_config)
    config.update(**changes, eos_token_id=None)
    return config


def limit(length: int) -> Any:
    from transformers import MaxLengthCriteria

    return StoppingCriteriaList([MaxLengthCriteria(length)])
