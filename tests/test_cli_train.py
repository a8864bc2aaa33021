"""`dflash-fn train` from end to end, on a few files and models of a few thousand weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from typer.testing import CliRunner

import dflash_fn
from dflash_fn import errors, fingerprint
from dflash_fn.cli import exits
from dflash_fn.cli.commands import app
from dflash_fn.cli.train import TrainRequest, options_of
from dflash_fn.train import texts
from dflash_fn.train.options import TrainOptions, from_dict
from dflash_fn.train.overlap import exclude
from tests.helpers.fixtures import own_threads as own_threads

CONFIG = Path(dflash_fn.__file__).parent / "config"
PROMPTS = ("def add(first, second):\n    '''Return the sum of two numbers that are not too large.'''\n", "import os\n")
SMALL = {
    "threads": 1,
    "corpus.stdlib": False,
    "corpus.packages": [],
    "corpus.folders": [str(CONFIG)],
    "corpus.held_out": 1,
    "corpus.vocab_size": 300,
    "target.layers": 2,
    "target.grow_from": 1,
    "target.hidden": 32,
    "target.inner": 48,
    "target.head_dim": 8,
    "target.max_context": 192,
    "target.sequence": 32,
    "target.batch": 4,
    "target.bigrams": 10,
    "target.fit.steps": 30,
    "target.fit.score_every": 10,
    "target.fit.checkpoint_every": 10,
    "text.pieces": 24,
    "text.prompt_tokens": [4, 12],
    "text.max_new_tokens": 16,
    "text.rows": 8,
    "draft.layers": 1,
    "draft.taps": [0, 1],
    "draft.start_layers": [1],
    "draft.sequences": 4,
    "draft.anchors": 4,
    "draft.fit.steps": 20,
    "draft.fit.warmup": 2,
    "draft.fit.score_every": 10,
    "draft.fit.checkpoint_every": 5,
    "eval.max_new_tokens": 12,
    "eval.file_prompt": 16,
    "eval.head_bytes": 200,
}


def invoke(*args: Any) -> Any:
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in args)])


def small(prompts: Path) -> list[str]:
    values = SMALL | {"eval.prompts": [str(prompts)]}
    return [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]


pytestmark = pytest.mark.usefixtures("own_threads")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, prompts: Path) -> Path:
    """A whole run, paused once on the way: stage by stage first, the rest with --resume."""
    out = tmp_path_factory.mktemp("run") / "out"
    first = invoke(
        "--out", out, "--recipe", "tiny-code", "--exclude", prompts, *small(prompts), "--stage", "corpus,target"
    )
    assert first.exit_code == 0, first.stderr
    assert not (out / "data").exists()
    paused = invoke("--out", out, "--resume", "--time-budget", "0s")
    assert paused.exit_code == 0, paused.stderr
    assert f"paused; everything is saved. Go on with: dflash-fn train --out {out} --resume" in paused.stdout.replace(
        "\n", " "
    )
    rest = invoke("--out", out, "--resume", "--json")
    assert rest.exit_code == 0, rest.stderr
    found = json.loads(rest.stdout)
    assert found["paused"] is False
    assert found["sets"].keys() == {"held-out files", "own"}
    return out


def test_the_pair_loads_and_decodes_as_the_target_alone(run: Path) -> None:
    pair = dflash_fn.load_pair(run / "target" / "model", run / "draft")
    assert pair.block_size == 8
    state = dflash_fn.prefill(pair, "import os\n")
    guessed, plain = (dflash_fn.decode(state, pair, max_new_tokens=20, block_size=size) for size in (8, 1))
    assert guessed.tokens == plain.tokens


def test_what_a_run_leaves_behind(run: Path) -> None:
    facts = json.loads((run / "eval" / "done.json").read_text())
    assert facts["exact"] is True
    assert 0 < facts["bits_per_byte"] < 8
    assert 1 <= facts["sets"]["own"]["tau"] <= 8
    curve = [json.loads(line) for line in (run / "fit" / "curve.jsonl").read_text().splitlines()]
    assert [point["step"] for point in curve if "tau" in point] == [10, 20]
    assert from_dict(TrainOptions, json.loads((run / "draft" / "training.json").read_text())).name == "tiny-code"
    fit = json.loads((run / "fit" / "done.json").read_text())
    assert fit["digest"] == fingerprint.of_folder(run / "draft")


def test_others_may_read_what_the_umask_lets_them_read(run: Path) -> None:
    mode = (run / "draft" / "config.json").stat().st_mode
    for file in (run / "draft" / "model.safetensors", run / "target" / "model" / "model.safetensors"):
        assert file.stat().st_mode == mode


def test_the_model_card_says_what_was_done(run: Path) -> None:
    text = (run / "MODEL_CARD.md").read_text()
    corpus = json.loads((run / "corpus" / "done.json").read_text())
    assert f"Held out, never trained on: `{corpus['held_out'][0]}`" in text
    assert f"* {len(list(CONFIG.glob('*.py'))) - 1} Python files, " in text
    assert "no text shares 10 words in a row with a prompt of these files (2 prompts): `own.jsonl`" in text
    assert "| held-out files | 1 |" in text
    assert "Apache-2.0, of the weights" in text
    assert "The same text as without the draft: yes." in text


def test_the_model_card_shows_answers_as_they_are(run: Path) -> None:
    shown = json.loads((run / "eval" / "done.json").read_text())["samples"]
    assert [one["name"] for one in shown[1:]] == ["own/0", "own/1"]
    pair = dflash_fn.load_pair(run / "target" / "model", run / "draft")
    for one, prompt in zip(shown[1:], PROMPTS, strict=True):
        assert one["prompt"] == prompt
        state = dflash_fn.decode(dflash_fn.prefill(pair, prompt), pair, max_new_tokens=12)
        assert one["answer"] == pair.tokenizer.decode(state.tokens[0][-12:])
    assert f"````python\n{PROMPTS[0]}▶{shown[1]['answer']}\n````" in (run / "MODEL_CARD.md").read_text()


def test_held_out_files_are_in_no_training_text(run: Path) -> None:
    import numpy as np

    ((name, text),) = json.loads((run / "corpus" / "held_out.json").read_text())
    assert (CONFIG / name.partition("/")[2]).read_text() == text
    pair = dflash_fn.load_pair(run / "target" / "model")
    trained = pair.tokenizer.decode(np.load(run / "corpus" / "train.npy").tolist())
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    runs = ["\n".join(lines[i : i + 3]) for i in range(len(lines) - 2)]
    stripped = "\n".join(line.strip() for line in trained.split("\n") if line.strip())
    assert not any(one in stripped for one in runs)
    known = exclude(PROMPTS, 10)
    made = texts.read(run / "data" / "texts.safetensors")
    assert not any(known.near(pair.tokenizer.decode(made[i].tolist())) for i in range(len(made)))


def test_done_stages_are_skipped_and_the_same_run_again_gives_the_same_bits(
    run: Path, prompts: Path, tmp_path: Path
) -> None:
    times = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    again = invoke("--out", run, "--resume", "--stage", "corpus,target,data,features,fit")
    assert again.exit_code == 0, again.stderr
    assert times == {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    fresh = invoke("--out", tmp_path / "out", "--recipe", "tiny-code", "--exclude", prompts, *small(prompts),
                   "--stage", "corpus,target,data,features,fit")  # fmt: skip
    assert fresh.exit_code == 0, fresh.stderr
    for place in ("target/model", "draft"):
        assert fingerprint.of_folder(tmp_path / "out" / place) == fingerprint.of_folder(run / place)


def test_a_target_may_answer_on_compiled_kernels(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("dflash_fn_torch.native", exc_type=ImportError)
    shutil.copytree(run, tmp_path / "out")
    options = json.loads((run / "options.json").read_text()) | {"compile": True}
    (tmp_path / "out" / "options.json").write_text(json.dumps(options))
    done = invoke("--out", tmp_path / "out", "--resume")
    assert done.exit_code == 0, done.stderr
    for stage in ("data", "eval"):
        plain, compiled = (json.loads((out / stage / "done.json").read_text()) for out in (run, tmp_path / "out"))
        assert not plain["made_with"].endswith("-compiled")
        assert compiled["made_with"].endswith("-compiled")
    assert compiled["exact"] is True
    assert "tokens a second with the draft on compiled kernels, " in (tmp_path / "out" / "MODEL_CARD.md").read_text()


def test_a_folder_with_a_run_is_not_taken_for_another(run: Path, prompts: Path) -> None:
    taken = invoke("--out", run, "--recipe", "tiny-code", "--exclude", prompts)
    assert taken.exit_code == exits.BAD_INPUT
    assert "holds a run already; go on with it by --resume, or give another folder" in taken.stderr
    other = invoke(
        "--out", run, "--resume", "--recipe", "tiny-code", "--exclude", prompts, *small(prompts), "--seed", 5
    )
    assert other.exit_code == exits.BAD_INPUT
    assert "its run has other options (seed)" in other.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing to train; give --recipe NAME or --target PATH, or --resume"),
        (["--resume"], "holds no run to resume; give --recipe or --target"),
        (["--recipe", "x"], "unknown recipe 'x'; known recipes: tiny-code"),
        (["--recipe", "tiny-code", "--target", "y"], "--recipe and --target exclude each other"),
        (["--recipe", "tiny-code", "--stage", "bake"], "unknown stage 'bake'; the stages are: corpus, target, data"),
        (["--recipe", "tiny-code", "--stage", "fit"], "run the stage"),
        (["--recipe", "tiny-code", "--set", "draft.depth=2"], "--set draft.depth=2: names no option"),
        (
            ["--recipe", "tiny-code", "--set", "draft.layers=two"],
            "draft.layers: got 'two', expected a value of type int",
        ),
        (["--recipe", "tiny-code", "--time-budget", "long"], "time budget: got 'long', expected a duration"),
        (["--recipe", "tiny-code", "--port", "jax"], "port jax cannot train; use --port torch"),
        (["--resume", "--seed", "3"], "--seed is for a new run, which --recipe or --target names"),
    ],
)
def test_what_cannot_be_done_is_one_line(flags: list[str], message: str, tmp_path: Path, prompts: Path) -> None:
    if "jax" in flags:
        pytest.importorskip("jax")
    named = ["--exclude", prompts] if "--recipe" in flags else []
    result = invoke("--out", tmp_path / "out", *flags, *named)
    assert result.exit_code == exits.BAD_INPUT
    assert message in result.stderr


def test_files_are_looked_for_before_hours_have_gone_by(tmp_path: Path, prompts: Path) -> None:
    result = invoke("--out", tmp_path / "out", "--recipe", "tiny-code", "--exclude", tmp_path / "none.jsonl")
    assert result.exit_code == exits.BAD_INPUT
    assert "none.jsonl: no such file of prompts to keep out or to measure on; name others" in result.stderr
    assert not (tmp_path / "out").exists()
    made = options_of(TrainRequest("out", recipe="tiny-code", exclude=(str(prompts),)))
    assert made is not None
    assert made.exclude == made.eval.prompts == (str(prompts),)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "draft.taps=[1,6]"], "draft.taps: got layer 6; the target has 0 to 5"),
        (["--set", "draft.mask_token_id=9999"], "draft.mask_token_id: got 9999, expected an id from 0 to 2047"),
        (["--set", "draft.mask_token_id=-1"], "draft.mask_token_id: got -1, expected an id from 0 to 2047"),
        (["--set", 'draft.start="layers"', "--set", "draft.start_layers=[0,2,7]"], "draft.start_layers: got layer 7"),
        (["--set", "eval.block_size=4096"], "eval.block_size: got 4096, expected less than the context, 2048"),
        (["--set", 'text.kind="chat"'], "the tokenizer of tiny-code has no chat template; use 'continue'"),
        (["--stage", "bake"], "unknown stage 'bake'; the stages are: corpus, target, data"),
        (["--stage", ""], "unknown stage ''"),
        (["--stage", "data,"], "unknown stage ''"),
        (["--threads", "0"], "threads: got 0, expected 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    flags: list[str], message: str, tmp_path: Path, prompts: Path
) -> None:
    (tmp_path / "a.txt").write_text("import os\n" * 200)
    named = ["--target", "tiny-code", "--data", tmp_path / "a.txt", "--exclude", prompts]
    result = invoke("--out", tmp_path / "out", *named, *flags)
    assert result.exit_code == exits.BAD_INPUT
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_rows_are_read_before_anything_is_written(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    result = invoke("--out", tmp_path / "out", "--target", "tiny-code", "--data", rows)
    assert result.exit_code == exits.BAD_INPUT
    assert "rows.jsonl, row 0 (line 1): has none of the fields prompt, question, problem, turns, messages" in (
        result.stderr
    )
    assert not (tmp_path / "out").exists()


def test_data_files_are_prompts_or_plain_text(tmp_path: Path) -> None:
    def of(*files: str) -> Any:
        return options_of(TrainRequest("out", target="tiny-code", files=files))

    assert of("a.jsonl", "b.jsonl").text.kind == "given"
    assert options_of(TrainRequest("out", recipe="tiny-code", files=("a.jsonl",))).text.kind == "given"  # pyright: ignore
    with pytest.raises(errors.InputError, match=r"got JSONL \(a.jsonl\) and plain text \(b.txt\), expected one of"):
        of("b.txt", "a.jsonl")
    with pytest.raises(errors.InputError, match=r"--data b.json: got one JSON file, expected JSONL, named so"):
        of("a.txt", "b.json")


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(out: str, tmp_path: Path, prompts: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("--out", tmp_path / out, "--recipe", "tiny-code", "--exclude", prompts, *small(prompts))
    assert result.exit_code == exits.BAD_INPUT
    assert f"error: {tmp_path / out / 'options.json'}: cannot be written (" in result.stderr


def test_results_that_were_lost_or_cut_off_are_made_again(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    texts_file, draft = copy / "data" / "texts.safetensors", copy / "draft" / "model.safetensors"
    whole, weights = texts_file.read_bytes(), draft.read_bytes()
    texts_file.write_bytes(whole[:-9])
    shutil.rmtree(copy / "draft")
    (copy / "target" / "model" / "model.safetensors").unlink()
    (copy / "fit" / "checkpoints" / "curve.jsonl").write_text("{")
    result = invoke("--out", copy, "--resume")
    assert result.exit_code == 0, result.stderr
    assert texts.read(texts_file).digest == texts.read(run / "data" / "texts.safetensors").digest
    assert draft.read_bytes() == weights
    assert (copy / "target" / "model" / "model.safetensors").read_bytes() == (
        run / "target" / "model" / "model.safetensors"
    ).read_bytes()
    assert "no picture of the curve" in result.stderr
    (copy / "data" / "done.json").write_text("[]")
    broken = invoke("--out", copy, "--resume")
    assert broken.exit_code == exits.BAD_INPUT
    assert "done.json: got JSON of type list, expected an object; delete it" in broken.stderr


def test_a_run_without_prompts_says_that_nothing_was_measured(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("import os\nimport sys\n\n\ndef main():\n" * 40)
    tiny = {"text.pieces": 8, "text.max_new_tokens": 8, "draft.layers": 1, "draft.sequences": 2, "draft.fit.steps": 2}
    changes = [part for key, value in tiny.items() for part in ("--set", f"{key}={value}")]
    out = tmp_path / "out"
    result = invoke("--out", out, "--target", "tiny-code", "--data", tmp_path / "a.txt", *changes)
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "nothing was measured: no prompts were named" in said
    assert "MODEL_CARD.md" in said
    card = (out / "MODEL_CARD.md").read_text()
    assert "Nothing was measured: the run names no prompts" in card
    assert "* Kept out: nothing; no prompts were named (`exclude`)." in card
    assert "Not settled; whoever passes the draft on looks at the licences of its target" in card
    assert "The same text" not in card


def test_a_draft_for_any_target_has_taps_over_its_depth(tmp_path: Path) -> None:
    target = Path(dflash_fn.__file__).parent / "zoo" / "pairs" / "tiny-code" / "target"
    (tmp_path / "a.txt").write_text("text")
    made = options_of(TrainRequest("out", target=str(target), files=(str(tmp_path / "a.txt"),)))
    assert made is not None
    assert made.text.kind == "continue"
    assert made.draft.taps == (0, 1, 2, 3, 4)
    assert made.source == str(target)
    assert options_of(TrainRequest("out", target="tiny-code")).text.kind == "chat"  # pyright: ignore
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    with pytest.raises(errors.InputError, match="names 1 layers, expected 2 or more"):
        options_of(TrainRequest("out", target=str(tmp_path)))


@pytest.mark.slow
def test_a_hybrid_pair_from_end_to_end(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hybrid = {"target.full_every": 2, "target.grow_from": None, "target.linear_heads": 2, "target.linear_dim": 8}
    changes = [part for key, value in hybrid.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    result = invoke(
        "--out", out, "--recipe", "tiny-code-hybrid", "--exclude", prompts, *small(prompts), *changes, "--json"
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["exact"] is True
    pair = dflash_fn.load_pair(out / "target" / "model", out / "draft")
    assert {kind.value for kind in pair.target.spec.layer_kinds} == {"linear_attention", "full_attention"}
