"""The same weights through upstream's own package: the same drafted tokens, the same text, the same accepted counts.

In upstream's terms `acceptance_lengths[i]` is `num_emitted` of our step i + 1; its prefill is our step 0.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_fn import Pair, load_pair, load_zoo, zoo
from dflash_fn.text import chat_prompt
from tests.helpers.divergence import NearTie, known_near_ties
from tests.helpers.parity_models import DRAFTS, agreeing_pair, tiny_draft, tiny_target
from tests.helpers.upstream import OurRound, Round, first_divergence, our_rounds, upstream_rounds

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
upstream = pytest.importorskip("dflash.model", reason="needs upstream's package: pip install --no-deps dflash==0.1.0")

pytestmark = [
    pytest.mark.oracle,
    # upstream calls transformers by a name that transformers 5 is about to drop
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

BLOCKS = (2, 4, 8)
TARGET_NAMES = ("llama", "llama-llama3", "llama-tied", "qwen3", "qwen3-tied", "qwen3-sliding")
PROMPT = (5, 9, 1, 22, 40, 7, 7, 2, 31)
CODE_PROMPTS = (
    "def fibonacci(n):\n",
    'class Stack:\n    """A list with push and pop."""\n\n    def __init__(self):\n        self.items = []\n\n',
)
HUMANEVAL_ROWS = range(20, 40)
HUMANEVAL_TOKENS = 96

Trace = tuple[list[OurRound], list[Round]]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Write a line that `pytest -rP` shows of tests that pass."""
    return functools.partial(request.node.add_report_section, "call", "parity")


@pytest.fixture(autouse=True)
def known_near_tie(request: pytest.FixtureRequest) -> None:
    """Expect `NearTie`, and nothing else, where tests/known/torch.txt says so; kernels elsewhere may agree."""
    reason = known_near_ties("torch").get(request.node.name)
    if reason:
        request.applymarker(pytest.mark.xfail(reason=reason, raises=NearTie, strict=False))


def run_both(pair: Pair, draft: Any, target: Any, ids: Sequence[int], tokens: int, stop: Sequence[int] = ()) -> Trace:
    """Run both for some tokens more than are to be compared, so that enough of upstream's blocks are whole."""
    budget = tokens + 2 * pair.block_size
    theirs = upstream_rounds(upstream, draft, target, ids, max_new_tokens=budget, stop=stop)
    return our_rounds(pair, ids, max_new_tokens=budget, stop=stop), theirs


def demand_parity(pair: Pair, trace: Trace) -> None:
    """Fail where the two differ: with `NearTie` where rounding explains it."""
    found = first_divergence(pair, *trace)
    if found is not None:
        raise NearTie(str(found)) if found.near_tie else AssertionError(str(found))


def emitted_counts(trace: Trace) -> tuple[list[int], list[int]]:
    """Tokens emitted per step by ours and by upstream, the prefill left out."""
    ours, theirs = trace
    counts = [len(step.info.emitted[0]) for step in ours[1 : len(theirs)]]
    return counts, [len(step.emitted) for step in theirs[1:]]


def tau(emitted: Sequence[int]) -> float:
    """Mean of tokens emitted per step."""
    return sum(emitted) / len(emitted)


def check_tiny_pair(target_name: str, draft_name: str, block_size: int, seed: int) -> None:
    target = tiny_target(target_name, seed)
    draft = tiny_draft(upstream, draft_name, target, seed + 100, block_size)
    pair = load_pair(target, draft)
    trace = run_both(pair, draft, target, PROMPT, 20)
    assert sum(len(step.emitted) for step in trace[1]) > 20
    demand_parity(pair, trace)


@pytest.mark.parametrize("draft_name", DRAFTS)
@pytest.mark.parametrize("target_name", TARGET_NAMES)
def test_random_drafts_guess_the_same(target_name: str, draft_name: str) -> None:
    index = TARGET_NAMES.index(target_name) + list(DRAFTS).index(draft_name)
    check_tiny_pair(target_name, draft_name, BLOCKS[index % len(BLOCKS)], seed=index)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("draft_name", DRAFTS)
@pytest.mark.parametrize("target_name", TARGET_NAMES)
def test_random_drafts_guess_the_same_at_every_block_size(target_name: str, draft_name: str, block_size: int) -> None:
    check_tiny_pair(target_name, draft_name, block_size, seed=20)


@functools.cache
def agreeing_trace(family: str, block_size: int, seed: int) -> tuple[Pair, Trace]:
    target, draft = agreeing_pair(upstream, family, seed, block_size)
    pair = load_pair(target, draft)
    return pair, run_both(pair, draft, target, PROMPT, 48)


AGREEING = list(itertools.product(("llama", "qwen3"), BLOCKS, (0, 1)))


@pytest.mark.parametrize(("family", "block_size", "seed"), AGREEING)
def test_agreeing_drafts_are_accepted_alike(family: str, block_size: int, seed: int) -> None:
    pair, trace = agreeing_trace(family, block_size, seed)
    demand_parity(pair, trace)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_agreeing_drafts_are_accepted_wholly_partly_and_not_at_all(block_size: int) -> None:
    counts = {
        count
        for family, size, seed in AGREEING
        if size == block_size
        for count in emitted_counts(agreeing_trace(family, size, seed)[1])[1]
    }
    assert {1, block_size} <= counts
    assert block_size < 4 or len(counts) > 3


def test_checkpoint_folders_that_upstream_writes_and_reads(tmp_path: Path) -> None:
    target, draft = agreeing_pair(upstream, "qwen3", 3, 4)
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    pair = load_pair(tmp_path / "target", tmp_path / "draft", device="cpu")
    again = upstream.DFlashDraftModel.from_pretrained(tmp_path / "draft").eval()
    demand_parity(pair, run_both(pair, again, target, PROMPT, 32))


def test_stop_tokens_end_both_at_the_same_token() -> None:
    target, draft = agreeing_pair(upstream, "llama", 0, 8)
    pair = load_pair(target, draft)
    text = [token for step in our_rounds(pair, PROMPT, max_new_tokens=24, stop=()) for token in step.info.emitted[0]]
    for stop in sorted(set(text)):
        ours, theirs = run_both(pair, draft, target, PROMPT, 24, stop=(stop,))
        demand_parity(pair, (ours, theirs))
        assert len(ours) == len(theirs)
        assert ours[-1].info.emitted[0][-1] == theirs[-1].emitted[-1] == stop


@functools.cache
def code_models() -> tuple[Pair, Any, Any]:
    files = zoo.fetch("tiny-code")
    assert files.draft is not None
    return load_zoo("tiny-code", device="cpu"), *upstream_models(files.target, files.draft)


def upstream_models(target: Path, draft: Path) -> tuple[Any, Any]:
    """Read a pair as upstream does: its draft, and transformers' target."""
    guess = upstream.DFlashDraftModel.from_pretrained(draft, dtype=torch.float32).eval()
    return guess, transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def code_trace(prompt: str, tokens: int) -> tuple[Pair, Trace]:
    pair, draft, target = code_models()
    ids = pair.tokenizer.encode(prompt)
    return pair, run_both(pair, draft, target, ids, tokens, pair.target.spec.eos_token_ids)


@pytest.mark.parametrize("prompt", CODE_PROMPTS, ids=["function", "class"])
def test_tiny_code(prompt: str) -> None:
    pair, trace = code_trace(prompt, 48)
    demand_parity(pair, trace)
    assert max(emitted_counts(trace)[1]) > 3


def rows_of(shared: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shared / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@functools.cache
def humaneval_trace(shared: Path, row: int) -> tuple[Pair, Trace]:
    return code_trace(rows_of(shared, "humaneval")[row]["prompt"], HUMANEVAL_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("row", HUMANEVAL_ROWS)
def test_tiny_code_on_humaneval(shared: Path, row: int) -> None:
    demand_parity(*humaneval_trace(shared, row))


@pytest.mark.slow
def test_tau_of_tiny_code_on_humaneval(shared: Path, report: Callable[[str], None]) -> None:
    ours: list[int] = []
    theirs: list[int] = []
    for row in HUMANEVAL_ROWS:
        mine, other = emitted_counts(humaneval_trace(shared, row)[1])
        ours, theirs = ours + mine, theirs + other
    report(f"tau: ours {tau(ours):.4f}, upstream {tau(theirs):.4f}, {len(theirs)} steps")
    assert tau(ours) == tau(theirs)
    assert tau(ours) > 2


@functools.cache
def real_models(shared: Path) -> tuple[Pair, Any, Any]:
    files, draft = zoo.fetch("smollm2-135m"), shared / "drafts" / "smollm2-135m-starter"
    return load_pair(files.target, draft, device="cpu"), *upstream_models(files.target, draft)


REAL_PROMPTS = (("humaneval", 3), ("humaneval", 11), ("gsm8k", 0), ("gsm8k", 7), ("mt-bench", 0), ("mt-bench", 21))


def question(shared: Path, name: str, row: int) -> str:
    found = rows_of(shared, name)[row]
    return found["question"] if name == "gsm8k" else found["prompt"] if name == "humaneval" else found["prompt"][0]


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize(("name", "row"), REAL_PROMPTS)
def test_smollm2(shared: Path, name: str, row: int, report: Callable[[str], None]) -> None:
    pair, draft, target = real_models(shared)
    ids = chat_prompt(pair.tokenizer, [{"role": "user", "content": question(shared, name, row)}])
    trace = run_both(pair, draft, target, ids, 64, pair.target.spec.eos_token_ids)
    ours, theirs = emitted_counts(trace)
    report(f"tau: ours {tau(ours):.4f}, upstream {tau(theirs):.4f}, {len(theirs)} steps")
    demand_parity(pair, trace)
