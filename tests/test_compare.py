"""Two ways side by side: what agrees, what parts at a near tie, and a mistake that is called one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import dflash_fn
from dflash_fn import errors, load_zoo
from dflash_fn.bench import ways
from dflash_fn.bench.compare import compare
from dflash_fn.bench.noise import FACTOR, FEW
from dflash_fn.bench.ways import Answer, Recipe, Way, parse
from dflash_fn.cli.commands import app
from dflash_fn.tolerances import UNIT, typical
from tests.helpers.faults import Faulty, rolled_back_one_short

pytest.importorskip("torch")
PROMPT = "def mean(values):"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ours", Recipe()),
        ("block=4", Recipe(block=4)),
        ("ours, port=mlx,width=16", Recipe(port="mlx", width=16)),
        ("transformers,dtype=bfloat16", Recipe("transformers", dtype="bfloat16")),
        ("draft=ngram", Recipe(draft="ngram")),
    ],
)
def test_recipes(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm", "way 'vllm': got engine 'vllm', expected one of: ours, transformers, mlx-lm"),
        ("", "way '': got engine '', expected one of"),
        ("ours,blocks=4", "got 'blocks=4', expected one of: block=..., draft=..., dtype=..., port=..., width=..."),
        ("ours,block", "got 'block', expected one of: block=..."),
        ("ours,block=8,width=4", "got block=8 above width=4; the block must fit in"),
        ("ours,block=99", "got more than 32 slots, the most that a port verifies at once"),
        ("ours,block=4,block=8", "way 'ours,block=4,block=8': got block= twice, expected it once"),
        ("ours,block=0", "got block=0, expected a number of at least 1"),
        ("transformers,block=4", "got 'block=4', expected one of: dtype=..."),
    ],
)
def test_recipes_that_are_none(text, message):
    with pytest.raises(errors.InputError) as caught:
        parse(text)
    assert message in str(caught.value)


def scripted(way: Way, rows: np.ndarray) -> Way:
    """Return a way that emits the argmax of each row of logits."""

    def answer(ids: Sequence[int], count: int) -> Answer:
        return Answer(rows.argmax(-1).tolist(), list(rows))

    return replace(way, answer=answer)


def noisy(rows: np.ndarray, size: float) -> np.ndarray:
    """Move each row's last element, which is nobody's choice, by `size`."""
    moved = rows.copy()
    moved[:, -1] += size
    return moved


def both_ways(dtype: str, rows: np.ndarray, other: np.ndarray, **options):
    spec = load_zoo("tiny-code").target.spec
    way = Way("a", dtype, spec, None, lambda ids, count: Answer([], []), **options)
    return compare(scripted(way, rows), scripted(way, other), [("x", [1, 2])], len(rows))


def peaked(count: int, gap: float) -> np.ndarray:
    rows = np.zeros((count, 6))
    rows[:, 2], rows[:, 4] = 10.0, 10.0 - gap
    return rows


def parted(rows: np.ndarray, apart: float) -> np.ndarray:
    """Move the last row's two best by `apart`, towards each other and past."""
    other = rows.copy()
    other[-1, 2] -= apart
    other[-1, 4] += apart
    return other


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize(("share", "near"), [(0.9, True), (1.1, False)])
def test_a_near_tie_is_as_near_as_the_measured_noise(dtype, share, near):
    spec = load_zoo("tiny-code").target.spec
    noise = 0.4 * typical(dtype, spec)
    apart = share * FACTOR * noise * 10.0
    rows = peaked(FEW + 1, 1.5 * apart)
    other = noisy(rows, noise * 10.0)
    found = both_ways(dtype, rows, parted(other, apart))
    (one,) = found.prompts
    assert found.noise.measured == pytest.approx(noise)
    assert (found.noise.positions, found.noise.plausible) == (FEW, True)
    assert one.divergence is not None
    assert (one.divergence.position, one.divergence.ours.best, one.divergence.theirs.best) == (FEW + 2, 2, 4)
    assert one.divergence.bound == pytest.approx(FACTOR * noise * 10.0, rel=1e-3)
    assert one.explained == near


def test_noise_that_rounding_does_not_make_explains_nothing():
    limit = typical("bfloat16", load_zoo("tiny-code").target.spec)
    rows = peaked(FEW + 1, 0.01)
    found = both_ways("bfloat16", rows, parted(noisy(rows, 10.0 * limit * 1.1), 0.01))
    assert not found.noise.plausible
    assert not found.prompts[0].explained
    assert found.prompts[0].divergence is not None
    assert str(found.prompts[0].divergence.reason).startswith("already where the ways agree, their logits are")
    assert both_ways("bfloat16", rows, parted(noisy(rows, 10.0 * limit * 0.9), 0.01)).prompts[0].explained


@pytest.mark.parametrize(("share", "near"), [(0.9, True), (1.1, False)])
def test_few_positions_are_judged_by_what_rounding_typically_does(share, near):
    apart = share * FACTOR * typical("bfloat16", load_zoo("tiny-code").target.spec) / 2.0 * 10.0
    rows = peaked(1, 1.5 * apart)
    found = both_ways("bfloat16", rows, parted(rows, apart))
    assert (found.noise.measured, found.noise.positions, found.prompts[0].explained) == (None, 0, near)


def test_rows_that_agreed_in_every_bit_may_part_by_their_last_one():
    rows = peaked(FEW + 1, 0.05)
    assert both_ways("bfloat16", rows, parted(rows, 0.06)).prompts[0].explained  # 2 * 2**-8 * 10 is 0.078
    assert not both_ways("bfloat16", rows, parted(rows, 0.09)).prompts[0].explained


def test_a_choice_has_to_be_among_the_best_two_of_both():
    rows = peaked(FEW + 1, 0.05)
    other = parted(rows, 0.03)
    other[-1, 1], rows[-1, 1] = 9.93, 9.99  # before token 4, which the other way chose
    (one,) = both_ways("bfloat16", rows, other).prompts
    assert one.divergence is not None
    assert one.divergence.reason == "token 4 is the choice of one way, and not among the best two of the other"
    assert not one.explained
    rows[-1, 1] = rows[-1, 4]  # as good as token 4, and named before it
    assert both_ways("bfloat16", rows, other).prompts[0].explained


def test_where_the_contract_promises_bits_nothing_is_a_near_tie():
    rows = peaked(FEW + 1, 0.05)
    promise = ("torch", "bfloat16", 8)
    (one,) = both_ways("bfloat16", rows, parted(rows, 0.03), promise=promise).prompts
    assert one.divergence is not None
    assert (one.explained, one.divergence.bound) == (False, 0.0)
    assert one.divergence.reason == "the contract promises the same bits here"
    (one,) = both_ways("bfloat16", rows, noisy(rows, 1e-6), promise=promise).prompts
    assert (one.divergence, one.bits_identical, one.explained) == (None, False, False)
    assert both_ways("bfloat16", rows, rows.copy(), promise=promise).prompts[0].explained


def test_vocabularies_that_differ():
    pair = load_zoo("tiny-code")
    one = Way("a", "float32", pair.target.spec, None, lambda ids, count: Answer([], []))
    two = replace(one, name="b", spec=replace(pair.target.spec, vocab_size=7))
    with pytest.raises(errors.InputError, match="ways 'a' and 'b': got vocabularies of 2048 and 7, expected the same"):
        compare(one, two, [("x", [1])], 1)


def run(*arguments: str) -> tuple[int, dict]:
    done = CliRunner().invoke(app, ["compare", *arguments, "--max-new-tokens", "24", "--json"])
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout)


def test_shapes_proposers_and_transformers_say_the_same():
    code, found = run("ours,block=8", "ours,block=4,width=8,draft=both", PROMPT, "import os\n")
    assert code == 0
    assert [one["bits_identical"] for one in found["prompts"]] == [True, True]
    assert found["prompts"][0]["same_steps"] is False
    code, found = run("ours,block=8", "block=8,width=8", PROMPT)
    assert [one["same_steps"] for one in found["prompts"]] == [True]
    code, found = run("draft=ngram", "transformers", PROMPT)
    assert code == 0
    assert found["prompts"] == [
        {"prompt": "prompt 1", "tokens_alike": 24, "bits_identical": False, "same_steps": None, "divergence": None}
    ]


@pytest.fixture
def broken_rollback(monkeypatch):
    right = dflash_fn.load_pair

    def broken(target, draft, **options):
        pair = right(target, draft, **options)
        port = Faulty(pair.port, {"select": rolled_back_one_short}) if draft else pair.port
        return replace(pair, port=port)

    monkeypatch.setattr(ways, "load_pair", broken)


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize("width", [1, 8])
def test_a_broken_rollback_is_not_explained(broken_rollback, dtype, width):
    code, found = run(f"block=8,dtype={dtype}", f"draft=none,width={width},dtype={dtype}", PROMPT)
    assert code == 1
    (one,) = found["prompts"]
    assert found["noise"]["promised_same_bits"] == (width == 8)
    assert one["divergence"]["near_tie"] is False
    assert one["divergence"]["slots"][1] == 0
    assert (one["divergence"]["reason"] == "the contract promises the same bits here") == (width == 8)


def test_tokens_are_shown_as_text(broken_rollback):
    shown = CliRunner().invoke(app, ["compare", "ours,block=8", "draft=none", PROMPT, "--max-new-tokens", "24"])
    assert shown.exit_code == 1
    assert shown.stdout.startswith("A  ours,block=8\nB  draft=none\n")
    assert "NOT explained by rounding" in shown.stdout
    assert re.search(r"A chose '[^']+' \(\d+\) before '[^']+' \(\d+\) by [\d.]+ in slot \d, B chose '", shown.stdout)
    assert shown.stdout.endswith("1 prompt: 0 alike, 0 part at a near tie, 1 not explained by rounding\n")


PROMPTS = ("import os\nimport sys\n\n\ndef", "class A:", "def mean(values):")
HALF = ("block=8,dtype=bfloat16", "transformers,dtype=bfloat16")


def frequencies_halved(model) -> None:
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq * 0.5


def mlp_left_out(model) -> None:
    model.model.layers[3].mlp.down_proj.weight.data.zero_()


@pytest.mark.parametrize("fault", [frequencies_halved, mlp_left_out])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[2:]], ids=["several", "one"])
def test_a_mistake_from_the_first_token_on_is_not_explained(monkeypatch, fault, prompts):
    right = ways.transformers_model

    def broken(source, dtype):
        model = right(source, dtype)
        fault(model)
        return model

    monkeypatch.setattr(ways, "transformers_model", broken)
    code, found = run(*HALF, *prompts)
    gone = [one["divergence"] for one in found["prompts"] if one["divergence"]]
    assert code == 1
    assert gone
    assert not any(one["near_tie"] for one in gone)


@pytest.mark.parametrize(
    ("other", "dtype"),
    [("transformers", "bfloat16"), ("transformers", "float16"), ("width=1,draft=none", "bfloat16")],
)
def test_honest_runs_are_explained(other, dtype):
    code, found = run(f"block=8,dtype={dtype}", f"{other},dtype={dtype}", *PROMPTS)
    assert code == 0
    assert found["noise"]["plausible"]
    assert found["noise"]["positions"] >= 24
    gone = [one["divergence"] for one in found["prompts"] if one["divergence"]]
    # which prompts part, if any, hangs on the processor
    assert all(one["near_tie"] and len(one["texts"]) == 2 for one in gone)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ours", "nobody", "x"], "way 'nobody': got engine 'nobody'"),
        (["ours", "ours"], "no prompts; give some, or --data FILE"),
        (["ours", "ours", "x", "--max-new-tokens", "0"], "--max-new-tokens: got 0, expected 1 or more"),
        (["ours", "ours", "x", "--pair", "a", "--target", "b"], "--pair and --target exclude each other"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    done = CliRunner().invoke(app, ["compare", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {message}")
