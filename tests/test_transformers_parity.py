"""Hidden states, logits and greedy text against transformers; a draft's logits against upstream's model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_fn import Pair, load_pair, prefill, rounds, zoo
from dflash_fn.divergence import Divergence, explain_divergence, first_difference
from dflash_fn.tolerances import UNIT, bound, rms_ratio
from tests.helpers.divergence import demand_near_tie, known_near_ties, parse_known
from tests.helpers.parity_models import (
    DRAFTS,
    MASK_TOKEN,
    TARGETS,
    Said,
    distance,
    draft_logits_by_port,
    draft_logits_by_upstream,
    in_dtype,
    rms_distance,
    said_by_port,
    said_by_transformers,
    tiny_draft,
    tiny_target,
)
from tests.helpers.upstream import as_numpy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DTYPES = sorted(UNIT)
CHUNKS = (24, 8, 1, 7)
LONG_CHUNKS = (256, 256, 80, 8)
"""Over the border of the port's bucket, 512."""

CODE = 'def mean(numbers):\n    """Arithmetic mean; 0 for an empty list."""\n    total = 0\n    for x in numbers:\n'
GREEDY = ("llama", "llama-tied", "llama-llama3", "qwen3", "qwen3-yarn", "qwen3-sliding")


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Write a line that `pytest -rP` shows of tests that pass."""
    return functools.partial(request.node.add_report_section, "call", "parity")


def text_of(size: int, vocab_size: int = 64) -> list[int]:
    return np.random.default_rng(size).integers(0, vocab_size, size).tolist()


def demand_within_bounds(pair: Pair, ours: Said, theirs: Said) -> None:
    """Compare every layer's hidden state, the last one's after the final norm, and the logits."""
    spec, dtype = pair.target.spec, pair.target.dtype
    assert len(ours.hidden) == len(theirs.hidden) == spec.num_layers
    for layer, (mine, other) in enumerate(zip(ours.hidden, theirs.hidden, strict=True), start=1):
        assert distance(mine, other) <= bound(dtype, "hidden", spec, layers=layer), f"layer {layer - 1}"
    assert distance(ours.logits, theirs.logits) <= bound(dtype, "logits", spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TARGETS)
def test_target_in_memory(name: str, dtype: str) -> None:
    """Besides the bounds: as near to the values in float64 as transformers itself, but for chance.

    Its norms stay in float32 even there, which in float32 favours transformers by a little.
    """
    model = in_dtype(tiny_target(name, seed=1), dtype)
    pair, ids = load_pair(model), text_of(sum(CHUNKS))
    ours, theirs = said_by_port(pair, ids, CHUNKS), said_by_transformers(model, ids)
    assert ours.logits.dtype is ours.hidden[0].dtype is getattr(torch, dtype)
    demand_within_bounds(pair, ours, theirs)
    exact = said_by_transformers(in_dtype(model, "float64"), ids)
    allowed = rms_ratio(len(ids))
    for mine, other, truth in zip(
        (*ours.hidden, ours.logits), (*theirs.hidden, theirs.logits), (*exact.hidden, exact.logits), strict=True
    ):
        assert rms_distance(mine, truth) <= allowed * rms_distance(other, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TARGETS)
def test_target_from_a_folder(name: str, dtype: str, tmp_path: Path) -> None:
    model = tiny_target(name, seed=2)
    model.save_pretrained(tmp_path)
    pair, ids = load_pair(tmp_path, dtype=dtype, device="cpu"), text_of(sum(CHUNKS))
    demand_within_bounds(pair, said_by_port(pair, ids, CHUNKS), said_by_transformers(in_dtype(model, dtype), ids))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-llama3", "qwen3-yarn", "qwen3-sliding"])
def test_target_on_a_long_text(name: str, dtype: str) -> None:
    model = in_dtype(tiny_target(name, seed=3), dtype)
    pair, ids = load_pair(model), text_of(sum(LONG_CHUNKS))
    demand_within_bounds(pair, said_by_port(pair, ids, LONG_CHUNKS), said_by_transformers(model, ids))


def test_the_comparison_can_fail() -> None:
    """A norm's epsilon of 1e-5 in place of 1e-6 is seen in float32."""
    model, other = tiny_target("llama", seed=1), tiny_target("llama", seed=1, rms_norm_eps=1e-5)
    pair, ids = load_pair(other), text_of(sum(CHUNKS))
    with pytest.raises(AssertionError, match="layer 0"):
        demand_within_bounds(pair, said_by_port(pair, ids, CHUNKS), said_by_transformers(model, ids))


@functools.cache
def zoo_model(name: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(zoo.fetch(name).target, dtype=torch.float32).eval()


def check_zoo_target(name: str, dtype: str) -> None:
    pair = load_pair(zoo.fetch(name).target, dtype=dtype, device="cpu")
    ids = pair.tokenizer.encode(CODE)
    chunks = (len(ids) - 9, 8, 1)
    demand_within_bounds(
        pair, said_by_port(pair, ids, chunks), said_by_transformers(in_dtype(zoo_model(name), dtype), ids)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_code(dtype: str) -> None:
    check_zoo_target("tiny-code", dtype)


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm2(dtype: str) -> None:
    check_zoo_target("smollm2-135m", dtype)


def compare_greedy(pair: Pair, model: Any, ids: list[int], max_new_tokens: int) -> Divergence | None:
    """Decode by both, and return where the texts first part, if they do."""
    settings = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, return_dict_in_generate=True, output_logits=True, pad_token_id=0
    )
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    infos = [info for _, info in rounds(prefill(pair, ids), pair, max_new_tokens=max_new_tokens, stop_token_ids=())]
    ours = [(token, info.logits[0, slot]) for info in infos for slot, token in enumerate(info.emitted[0])]
    index = first_difference([token for token, _ in ours], out.sequences[0, len(ids) :].tolist())
    if index is None:
        return None
    return explain_divergence(
        "greedy text",
        len(ids) + index,
        as_numpy(ours[index][1]),
        as_numpy(out.logits[index][0]),
        relative_bound=bound(pair.target.dtype, "logits", pair.target.spec),
    )


def report_greedy(pair: Pair, model: Any, ids: list[int], max_new_tokens: int, report: Callable[[str], None]) -> None:
    """Equality is not promised, since kernels of another shape sum in another order: demand a near tie, and report."""
    found = compare_greedy(pair, model, ids, max_new_tokens)
    report(f"first divergence: {found}")
    if found is not None:
        demand_near_tie(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_text_of_tiny_targets(name: str, dtype: str, report: Callable[[str], None]) -> None:
    model = in_dtype(tiny_target(name, seed=4), dtype)
    report_greedy(load_pair(model), model, text_of(11), 24, report)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_text_of_tiny_code(dtype: str, report: Callable[[str], None]) -> None:
    files, model = zoo.fetch("tiny-code"), in_dtype(zoo_model("tiny-code"), dtype)
    pair = load_pair(files.target, files.draft, dtype=dtype, device="cpu")
    report_greedy(pair, model, pair.tokenizer.encode(CODE), 48, report)


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_text_of_smollm2(dtype: str, shared: Path, report: Callable[[str], None]) -> None:
    model = in_dtype(zoo_model("smollm2-135m"), dtype)
    pair = load_pair(
        zoo.fetch("smollm2-135m").target, shared / "drafts" / "smollm2-135m-starter", dtype=dtype, device="cpu"
    )
    row = json.loads((shared / "data" / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()[3])
    report_greedy(pair, model, pair.tokenizer.encode(row["question"]), 48, report)


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target_name", ["llama", "qwen3-groups-of-3"])
@pytest.mark.parametrize("draft_name", DRAFTS)
def test_draft_logits(draft_name: str, target_name: str, dtype: str) -> None:
    """The same features through both; ours reads them in chunks, upstream's model at once."""
    upstream = pytest.importorskip("dflash.model", reason="needs upstream's package, dflash 0.1.0")
    target = in_dtype(tiny_target(target_name, seed=5), dtype)
    draft = in_dtype(tiny_draft(upstream, draft_name, target, seed=6, block_size=8), dtype)
    pair = load_pair(target, draft)
    assert pair.draft is not None
    spec, ids = pair.draft.spec, text_of(sum(CHUNKS))
    hidden = said_by_transformers(target, ids).hidden
    features = torch.cat([hidden[layer] for layer in spec.target_layer_ids], dim=-1)
    block = [17, *[MASK_TOKEN] * 7]
    ours = draft_logits_by_port(pair, features, block, CHUNKS)
    theirs = draft_logits_by_upstream(draft, target, features, block)
    assert distance(ours, theirs) <= bound(dtype, "draft_logits", spec)


# --- the reports themselves ---


def explain(ours: list[float], theirs: list[float], bound_of_two: float) -> Divergence:
    mine, other = np.array(ours, np.float32), np.array(theirs, np.float32)
    return explain_divergence("target, step 2, slot 1", 31, mine, other, relative_bound=bound_of_two / 2.0)


def test_a_report_shows_position_and_both_gaps() -> None:
    found = explain([0.0, 2.0, 1.75], [0.0, 1.5, 2.0], 0.5)
    assert str(found) == (
        "target, step 2, slot 1, position 31: ours 1 before 2 by 0.25, theirs 2 before 1 by 0.5 (rounding may do 1); "
        "logits up to 0.5 apart (rounding may do 0.5): a near tie"
    )
    demand_near_tie(found)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([0.0, 2.0, 1.0], [0.0, 1.9, 2.0]),  # our gap is wide
        ([0.0, 2.0, 1.9], [0.0, 1.0, 2.0]),  # theirs is
        ([1.5, 2.0, 1.9], [0.0, 1.9, 2.0]),  # another logit is far off
    ],
)
def test_a_wide_gap_or_distance_excuses_nothing(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(AssertionError, match="NO near tie"):
        demand_near_tie(explain(ours, theirs, 0.25))


def test_known_near_ties_name_tests_that_exist() -> None:
    source = (Path(__file__).parent / "test_upstream_parity.py").read_text(encoding="utf-8")
    for name in known_near_ties("torch"):
        assert f"def {name.partition('[')[0]}(" in source


def test_a_known_near_tie_without_a_reason_is_an_error() -> None:
    assert parse_known(["# why", "", "test_a[b: c]: gap of 1e-6 at 31"]) == {"test_a[b": "c]: gap of 1e-6 at 31"}
    with pytest.raises(ValueError, match="one 'NAME: REASON'"):
        parse_known(["test_a[b]:"])
    with pytest.raises(ValueError, match="one 'NAME: REASON'"):
        parse_known(["test_a: x", "test_a: y"])
