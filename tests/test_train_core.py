"""Training, as far as it needs no framework: options, order, schedule, the loop, checkpoints, corpora, texts."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_fn import errors, prompts
from dflash_fn.cli.train import TrainRequest, options_of
from dflash_fn.container import Bits
from dflash_fn.train import bpe, checkpoints, corpus, curve, fitting, order, overlap, packages, texts
from dflash_fn.train.budget import Budget, asked_by_ctrl_c, parse_duration
from dflash_fn.train.options import (
    CorpusOptions,
    DraftOptions,
    FitOptions,
    TargetOptions,
    TextOptions,
    TrainOptions,
    digest,
    from_dict,
    to_dict,
)
from dflash_fn.train.recipes import RECIPES, recipe
from dflash_fn.train.schedule import rate_at
from dflash_fn.train.trainer import Measured


class Descent:
    """A task without a framework: plain gradient descent on a noisy quadratic, with momentum to be restored."""

    def __init__(self, wrong_from: int | None = None, wrong: float = float("nan")) -> None:
        self.x, self.speed = np.full(3, 4.0), np.zeros(3)
        self.wrong_from, self.wrong = wrong_from, wrong

    def step(self, index: int, rate: float) -> Measured:
        noise = order.numbers(1, "noise", index, 3) - 0.5
        grad = 2.0 * self.x + noise
        if self.wrong_from is not None and index >= self.wrong_from:
            return Measured(self.wrong, 1.0, 3, {})
        self.speed = 0.9 * self.speed + grad
        self.x = self.x - rate * self.speed
        return Measured(float((self.x**2).sum()) + 1.0, float(np.abs(grad).max()), 3, {"x": float(self.x[0])})

    def score(self) -> dict[str, float]:
        return {"tau": 1.0}

    def arrays(self) -> dict[str, Bits]:
        return {"x": Bits("float64", self.x.copy()), "speed": Bits("float64", self.speed.copy())}

    def restore(self, index: int, arrays: Mapping[str, Bits]) -> None:
        self.x, self.speed = arrays["x"].values.copy(), arrays["speed"].values.copy()

    def export(self, folder: Path) -> None:
        raise NotImplementedError


FIT = FitOptions(steps=40, rate=0.01, warmup=4, checkpoint_every=7, log_every=5)


@pytest.mark.parametrize("name", RECIPES)
def test_options_survive_a_file(name: str) -> None:
    options = RECIPES[name]
    assert from_dict(TrainOptions, json.loads(json.dumps(to_dict(options)))) == options
    assert digest(options) == digest(from_dict(TrainOptions, to_dict(options)))
    assert digest(replace(options, seed=options.seed + 1)) != digest(options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 3}, "options: got the key 'step', expected one of steps, rate"),
        ({"steps": 2.5}, "options.steps: got 2.5, expected a value of type int"),
        ({"steps": True}, "options.steps: got True, expected a value of type int"),
        ({"steps": 0}, "fit.steps: got 0, expected 1 or more"),
        ({"decay": "never"}, "options.decay: got 'never', expected one of cosine, linear"),
        ({"betas": [0.9]}, r"options.betas: got \[0.9\], expected a list of 2"),
        ({"rate": -1}, "fit.rate: got -1.0, expected a number above 0"),
        ({"rate": math.inf}, "fit.rate: got inf, expected a number above 0"),
        ({"warmup": -5}, "fit.warmup: got -5, expected 0 or more"),
        ({"score_every": -1}, "fit.score_every: got -1, expected 0 or more"),
        ({"weight_decay": -100}, "fit.weight_decay: got -100.0, expected 0 or more"),
        ({"last_rate": 50}, "fit.last_rate: got 50.0, expected a share from 0 to 1"),
        ({"betas": [2, 3]}, r"fit.betas: got \(2.0, 3.0\), expected two numbers from 0, below 1"),
    ],
)
def test_wrong_options_are_named(values: dict, message: str) -> None:
    with pytest.raises(errors.InputError, match=message):
        from_dict(FitOptions, values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("threads=0", "threads: got 0, expected 1 or more"),
        ("shared_words=0", "shared_words: got 0, expected 1 or more"),
        ("eval.block_size=0", "eval.block_size: got 0, expected 1 or more"),
        ("eval.max_new_tokens=0", "eval.max_new_tokens: got 0, expected 1 or more"),
        ("eval.rows=0", "eval.rows: got 0, expected 1 or more"),
        ("draft.inner=0", "draft.inner: got 0, expected 1 or more"),
        ("draft.layers=0", "draft.layers: got 0, expected 1 or more"),
        ("draft.sequences=0", "draft.sequences: got 0, expected 1 or more"),
        ("draft.anchors=0", "draft.anchors: got 0, expected 1 or more"),
        ("draft.negatives=-1", "draft.negatives: got -1, expected 0 or more"),
        ("draft.taps=[3,3]", r"draft.taps: got \(3, 3\), expected each layer once"),
        ("target.heads=0", "target.heads: got 0, expected 1 or more"),
        ("target.sequence=1", "target.sequence: got 1, expected 2 or more"),
        ("text.opened=2", "text.opened: got 2.0, expected a share from 0 to 1"),
        ("corpus.run=0", "corpus.run: got 0, expected 1 or more"),
    ],
)
def test_values_out_of_range_are_named_where_they_are_read(change: str, message: str) -> None:
    with pytest.raises(errors.InputError, match=message):
        options_of(TrainRequest("out", recipe="tiny-code", changes=(change,)))


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(errors.InputError, match="one a draft layer"):
        DraftOptions(layers=2, start_layers=(0, 2, 5))
    with pytest.raises(errors.InputError, match="a target's folder, or options of a target to train, and not both"):
        TrainOptions()
    with pytest.raises(errors.InputError, match="a multiple of 3"):
        TargetOptions(architecture="qwen3_5", layers=6, grow_from=2)
    with pytest.raises(errors.InputError, match="JSONL files to answer"):
        TextOptions(kind="given")
    with pytest.raises(errors.InputError, match="name==version, so that the run can be repeated"):
        CorpusOptions(packages=("attrs",))
    with pytest.raises(errors.InputError, match="unknown recipe 'x'; known recipes: tiny-code"):
        recipe("x")


def test_an_epoch_takes_everything_once_and_the_next_one_another_order() -> None:
    taken = np.concatenate([order.batch(3, "texts", step, 4, 10) for step in range(5)])
    first, second = taken[:10], taken[10:]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()
    assert np.array_equal(order.batch(3, "texts", 2, 4, 10), taken[8:12])


def test_numbers_depend_on_seed_purpose_and_index_alone() -> None:
    known = order.numbers(0, "a", 5, 6)
    assert np.array_equal(known[:3], order.numbers(0, "a", 5, 3))
    assert len({order.numbers(*key, 1)[0] for key in ((0, "a", 5), (1, "a", 5), (0, "b", 5), (0, "a", 6))}) == 4
    drawn = order.numbers(0, "a", 1 << 33, 4000)
    assert 0 <= drawn.min() <= drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.03
    normal = order.normal(0, "w", 4000)
    assert abs(normal.mean()) < 0.1
    assert abs(normal.std() - 1.0) < 0.05


def test_anchors_have_a_token_after_them_and_lie_in_the_answer() -> None:
    starts, lengths = np.array([3, 0, 9]), np.array([12, 4, 10])
    places, real = order.anchors(0, 1, starts, lengths, 5)
    assert real.sum(axis=1).tolist() == [5, 3, 0]  # the last answer has one token, with nothing after it
    for row in range(3):
        chosen = places[row][real[row]]
        assert len(set(chosen.tolist())) == len(chosen)
        assert all(starts[row] <= place < lengths[row] - 1 for place in chosen)
    assert (places < lengths[:, None]).all()
    assert not np.array_equal(places, order.anchors(0, 2, starts, lengths, 5)[0])


def test_every_anchor_is_drawn_as_often_as_another() -> None:
    counts = np.zeros(8)
    for step in range(400):
        counts[order.anchors(0, step, np.array([0]), np.array([9]), 2)[0][0]] += 1
    assert counts.sum() == 800
    assert abs(counts - 100).max() < 40  # four standard deviations of a binomial law


def test_the_rate_rises_holds_and_falls() -> None:
    options = FitOptions(steps=100, rate=2.0, warmup=10, hold=0.5, last_rate=0.1)
    rates = [rate_at(step, options) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9:51] == [2.0] * 42
    assert all(a > b for a, b in itertools.pairwise(rates[51:]))
    assert rates[-1] == pytest.approx(0.2, abs=0.01)
    assert rate_at(100, options) == pytest.approx(0.2)


def fitted(folder: Path, task: Descent, **options: object) -> fitting.Fitted:
    return fitting.fit(task, replace(FIT, **options), folder, made_with="same")


def test_a_fit_writes_its_curve_and_keeps_the_last_checkpoints(tmp_path: Path) -> None:
    done = fitted(tmp_path, Descent(), score_every=20)
    assert done.done
    assert [point["step"] for point in done.curve] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert [point["step"] for point in done.curve if "tau" in point] == [20, 40]
    assert curve.read(tmp_path / fitting.CURVE) == list(done.curve)
    assert [path.name for path in checkpoints.saved(tmp_path)] == [
        "step-00000035.safetensors",
        "step-00000040.safetensors",
    ]


def test_p20_a_paused_fit_ends_with_the_same_bits(tmp_path: Path) -> None:
    """P20: where a run pauses changes nothing, nor whether its newest file is damaged."""
    whole = Descent()
    fitted(tmp_path / "whole", whole)
    ticks = iter(range(1000))
    task = Descent()
    for attempt in range(100):
        task = Descent()
        budget = Budget(4, clock=lambda: next(ticks))
        if fitting.fit(task, FIT, tmp_path / "parts", made_with="same", budget=budget).done:
            break
        if attempt == 6:
            newest = checkpoints.saved(tmp_path / "parts")[-1]
            newest.write_bytes(newest.read_bytes()[:-9])
    assert np.array_equal(task.x, whole.x)
    assert curve.read(tmp_path / "parts" / fitting.CURVE) == curve.read(tmp_path / "whole" / fitting.CURVE)


def test_a_checkpoint_of_other_options_is_refused(tmp_path: Path) -> None:
    fitted(tmp_path, Descent(), steps=8)
    with pytest.raises(errors.InputError, match=r"was made with other options, data or threads \(same, now other\)"):
        fitting.fit(Descent(), FIT, tmp_path, made_with="other")


def test_nan_stops_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(errors.NonFiniteError, match=r"step 17: the loss is nan .* checkpoint is .*step-00000014"):
        fitted(tmp_path, Descent(wrong_from=17))
    assert checkpoints.load(checkpoints.saved(tmp_path)[-1]).step == 14
    assert [point["step"] for point in curve.read(tmp_path / fitting.CURVE)] == [5, 10, 15]  # up to where it went wrong


def test_an_exploding_loss_stops(tmp_path: Path) -> None:
    with pytest.raises(errors.TrainingDiverged, match=r"times its lowest value \(the limit is 3\).*lower fit.rate"):
        fitted(tmp_path, Descent(wrong_from=20, wrong=1e6))


def test_a_checkpoint_from_when_the_loss_had_grown_is_not_called_good(tmp_path: Path) -> None:
    assert "checkpoint is none, as none was kept from before; resuming ends here again" in checkpoints.advice(tmp_path)
    for step, smoothed in ((1, 2.0), (2, 2.1), (3, 5.0)):
        point = checkpoints.Checkpoint(step, Descent().arrays(), (), smoothed, 2.0, "same")
        checkpoints.save(tmp_path, point, keep=3)
    assert f"the last good checkpoint is {tmp_path / 'step-00000002.safetensors'} (smoothed loss 2.1)" in (
        checkpoints.advice(tmp_path)
    )


def test_a_damaged_curve_is_named(tmp_path: Path) -> None:
    (tmp_path / "curve.jsonl").write_text('{"step": 1, "lo')
    with pytest.raises(errors.InputError, match=r"curve.jsonl: is no curve .* the next checkpoint writes it anew"):
        curve.read(tmp_path / "curve.jsonl")


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    task = Descent()
    task.x[0] = np.inf
    point = checkpoints.Checkpoint(7, task.arrays(), (), 1.0, 1.0, "same")
    with pytest.raises(errors.NonFiniteError, match="step 7: x holds NaN or infinity, and is not saved"):
        checkpoints.save(tmp_path, point, keep=2)
    assert not checkpoints.saved(tmp_path)


@pytest.fixture
def hearing() -> Iterator[None]:
    """Hear Ctrl-C, even where the tests were started deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hearing")
def test_ctrl_c_saves_between_two_steps(tmp_path: Path) -> None:
    budget = Budget()

    def report(step: int, point: dict) -> None:
        if step == 11:
            os.kill(os.getpid(), signal.SIGINT)

    with asked_by_ctrl_c(budget):
        done = fitting.fit(Descent(), FIT, tmp_path, made_with="same", budget=budget, report=report)
    assert done.ended is fitting.Ended.INTERRUPTED
    assert checkpoints.load(checkpoints.saved(tmp_path)[-1]).step == done.steps == 11


@pytest.mark.usefixtures("hearing")
def test_a_second_ctrl_c_interrupts() -> None:
    budget = Budget()
    with asked_by_ctrl_c(budget):
        os.kill(os.getpid(), signal.SIGINT)
        assert budget.spent
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("text", "seconds"), [("45s", 45), ("90m", 5400), ("1.5h", 5400), ("1h30m", 5400)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "m", "90 m", "1d", "-5s", "5s!"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(errors.InputError, match="expected a duration such as 45s, 90m or 1h30m"):
        parse_duration(text)


def test_a_picture_of_a_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scored = {"tau": 1.5, "tau_seen": 1.7}
    points = [{"step": step, "loss": 1.0 / step, **(scored if step % 2 else {})} for step in range(1, 9)]
    curve.draw(tmp_path / "curve.png", points, title="pair: fit")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_a_clear_error(tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from pathlib import Path; from dflash_fn.train import curve\n"
    code += "curve.draw(Path('x.png'), [{'step': 1, 'loss': 2.0}])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'needs matplotlib; run: pip install "dflash-fn[plot]"' in done.stderr


PROMPT = "def has_close_elements(numbers, threshold):\n    '''Check if any two numbers are closer than threshold'''"


def test_texts_near_a_prompt_are_known_whatever_their_layout() -> None:
    known = overlap.exclude([PROMPT, "short one"], 6)
    assert known.near("# CHECK if any\n# two numbers are closer, than ...")
    assert known.near("hasCloseElements? has_close_elements(numbers, threshold) Check")
    assert known.near("a SHORT one, indeed")
    assert not known.near("check if any three numbers are closer than a threshold")
    assert not overlap.exclude([], 6).near("anything at all")


def test_prompts_of_all_public_schemas_are_read(shared: Path) -> None:
    sizes = {name: len(prompts.read(shared / "data" / f"{name}.jsonl")) for name in ("humaneval", "gsm8k", "mt-bench")}
    assert sizes == {"humaneval": 64, "gsm8k": 50, "mt-bench": 40}
    assert len(prompts.read(shared / "data" / "mt-bench.jsonl")[0]) == 2
    with pytest.raises(errors.InputError, match="row 3: has none of the fields prompt"):
        prompts.turns_of({"text": "?"}, "row 3")


def source(*names: str) -> str:
    return "\n\n\n".join(
        f"def {name}(value):\n    total = value + {len(name)}\n    return total * {name}" for name in names
    )


def test_corpora_hold_files_out_and_drop_what_they_repeat() -> None:
    many = [f"name_{a}{b}" for a in "abcdefghijklmn" for b in "abcdefghijklmn"]
    named = [
        ("a.py", source(*many[:80])),
        ("b.py", source(*many[80:])),
        ("copy_of_a.py", source(*many[:80], "own")),
        ("near.py", source("x") + "\n" + PROMPT),
        ("table.py", "DATA = [" + "1234567890, " * 50 + "]"),
        ("empty.py", " \n"),
    ]
    options = CorpusOptions(held_out=1)
    train, held_out, near = corpus.divide(named, options, overlap.exclude([PROMPT], 8))
    assert near == ["near.py"]
    ((name, text),) = held_out
    assert dict(named)[name] == text
    rest = dict(train)
    assert name not in rest
    assert not {"near.py", "table.py", "empty.py"} & rest.keys()
    lines = [line for body in rest.values() for line in body.split("\n") if line.startswith("def ")]
    assert len(lines) == len(set(lines))
    if name != "b.py":
        assert all(f"def {known}(" not in "\n".join(rest.values()) for known in many[:80])
    assert corpus.divide(reversed(named), options, overlap.exclude([PROMPT], 8))[1] == held_out


def wheel(folder: Path, name: str, licence: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\n{licence}\n\ntext\n")
        for entry, content in files.items():
            archive.writestr(entry, content)
    return path


def test_wheels_are_read_sorted_with_their_licence(tmp_path: Path) -> None:
    files = {
        "pk/b.py": b"b = 1\r\n",
        "pk/a.py": b"a = 1\n",
        "pk/c.txt": b"no",
        "pk/bad.py": b"\xff\xfe",
        "pk/e.py": b"",
    }
    wheel(tmp_path, "pk", "License-Expression: MIT", files)
    (package,) = packages.fetch(("pk==1.0",), tmp_path)
    assert (package.name, package.licence, len(package.sha256)) == ("pk==1.0", "MIT", 64)
    assert list(packages.sources(package, longest=100)) == [
        ("pk==1.0/pk/a.py", "a = 1\n"),
        ("pk==1.0/pk/b.py", "b = 1\n"),
    ]


@pytest.mark.parametrize(
    "licence",
    [
        "License-Expression: GPL-3.0-only",
        "Classifier: License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",
        "",
    ],
)
def test_only_permissive_licences_are_taken(tmp_path: Path, licence: str) -> None:
    wheel(tmp_path, "pk", licence, {})
    with pytest.raises(errors.InputError, match=r"pk==1\.0: its licence is .*, expected a permissive one"):
        packages.fetch(("pk==1.0",), tmp_path)


def test_a_tokenizer_is_made_twice_alike_and_reads_what_it_wrote(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    body = [source(*(f"name_{i}" for i in range(60)), "größe")]
    first, second = (bpe.make(body, 290, most_bytes=10**6) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert [first.token_to_id(token) for token in (bpe.END, bpe.MASK)] == [0, 1]
    stream = bpe.encode(first, body)
    assert stream.dtype == np.uint16
    assert stream[-1] == 0
    assert first.decode(stream[:-1].tolist()) == body[0]
    with pytest.raises(errors.InputError, match=r"the text has pairs for 2[0-9]+ tokens only"):
        bpe.make(["ab"], 600, most_bytes=10)


def test_texts_survive_a_file_and_can_be_joined(tmp_path: Path) -> None:
    made = texts.join([texts.pack([((1, 2, 3), 1), ((4, 5), 1)]), texts.pack([]), texts.pack([((6, 7, 8, 9), 2)])])
    assert [made[i].tolist() for i in range(3)] == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert made.starts.tolist() == [1, 1, 2]
    assert made.answer_tokens == 5
    texts.write(tmp_path / "texts", made)
    assert texts.read(tmp_path / "texts").digest == made.digest
    assert made.subset(1, 3)[1].tolist() == [6, 7, 8, 9]
    with pytest.raises(errors.InputError, match="run the stage `data` first"):
        texts.read(tmp_path / "other")
