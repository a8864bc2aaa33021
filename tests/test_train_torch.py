"""Training on torch: loss, optimisers, starts, tasks, killed runs, and drafts that load anywhere."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_fn import Pair, errors, fingerprint, load_pair, load_zoo
from dflash_fn.train import answers, checkpoints, evaluation, fitting, order, texts
from dflash_fn.train.budget import Budget
from dflash_fn.train.options import CorpusOptions, EvalOptions, FitOptions, TargetOptions, TextOptions, TrainOptions
from tests.helpers import training
from tests.helpers.fixtures import own_threads as own_threads
from tests.helpers.training import DESIGN, FIT, draft_run, prepare, task_of, train

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from dflash_fn_torch.train import optimiser, target_model  # noqa: E402
from dflash_fn_torch.train.draft_task import DraftTask, _walk  # noqa: E402
from dflash_fn_torch.train.loss import block_loss, leading_matches, slot_weights  # noqa: E402
from dflash_fn_torch.train.target_task import TargetTask  # noqa: E402
from torch import Tensor  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


pytestmark = pytest.mark.usefixtures("own_threads")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, texts and features."""
    made = tmp_path_factory.mktemp("training")
    prepare(made)
    return made


def numbers(*shape: int, name: str = "x") -> Tensor:
    return torch.from_numpy(order.normal(7, name, *shape))


def test_the_loss_is_a_weighted_mean_of_both_parts() -> None:
    logits, teacher = numbers(3, 5), numbers(3, 5, name="y")
    labels, weights = torch.tensor([4, 0, 2]), torch.tensor([1.0, 0.5, 0.0])
    loss, right = block_loss(logits, labels, weights, teacher=teacher, kl=0.25)
    q, p = logits.double().softmax(-1), teacher.double().softmax(-1)
    ce = -q[range(3), labels].log()
    kl = (p * (p / q).log()).sum(-1)
    expected = ((0.75 * ce + 0.25 * kl)[:2] * weights[:2]).sum() / 1.5
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    hits = (logits.argmax(-1) == labels).double()
    assert right == pytest.approx(float((hits * weights).sum() / 1.5))
    alone, _ = block_loss(logits, labels, weights, teacher=None, kl=0.0)
    assert float(alone) == pytest.approx(float((ce * weights).sum() / 1.5), rel=1e-6)


def test_slots_weigh_less_the_further_they_are() -> None:
    assert slot_weights(3, 4.0).tolist() == pytest.approx([1.0, np.exp(-0.25), np.exp(-0.5)])


def test_matches_end_at_the_first_wrong_guess() -> None:
    guess = torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3]])
    assert leading_matches(guess, torch.tensor([[1, 2, 3]] * 3)).tolist() == [3, 1, 0]


def test_a_walk_over_matches_is_what_decoding_emits() -> None:
    assert list(_walk(np.array([2, 0, 0, 1, 0, 0]), 7)) == [3, 2, 1]
    assert list(_walk(np.array([7, 0, 0]), 4)) == [3]
    assert list(_walk(np.array([], dtype=int), 1)) == []


def test_adamw_is_torchs() -> None:
    options = FitOptions(weight_decay=0.1, betas=(0.9, 0.99))
    ours = {"layers.0.a": numbers(4, 3), "b": numbers(5)}
    theirs = {name: weight.clone().requires_grad_() for name, weight in ours.items()}
    state = optimiser.new(options, ours)
    decayed = [{"params": [theirs["layers.0.a"]]}, {"params": [theirs["b"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(decayed, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in range(4):
        grads = {name: numbers(*weight.shape, name=f"{name}{step}") for name, weight in ours.items()}
        for name, weight in theirs.items():
            weight.grad = grads[name].clone()
        reference.step()
        state.move(ours, grads, step, 0.01)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name].detach(), rtol=1e-5, atol=1e-6)


def test_muon_takes_matrices_of_layers_and_moves_them_by_nearly_orthogonal_steps() -> None:
    weights = {"model.layers.0.x.weight": numbers(6, 4), "model.embed_tokens.weight": numbers(9, 4), "norm": numbers(4)}
    state = optimiser.new(FitOptions(optimiser="muon"), weights)
    assert set(state.second) == {"model.embed_tokens.weight", "norm"}
    before = weights["model.layers.0.x.weight"].clone()
    state.move(weights, {name: numbers(*weight.shape, name="g") for name, weight in weights.items()}, 0, 0.1)
    sizes = torch.linalg.svdvals((weights["model.layers.0.x.weight"] - before) / 0.1)
    assert float(sizes.min()) > 0.6 * 1.5**0.5
    assert float(sizes.max()) < 1.25 * 1.5**0.5


def test_a_softmax_over_all_ids_in_other_clothes_is_the_same(folder: Path) -> None:
    whole, some = (task_of(folder, draft_run(folder, negatives=count)) for count in (None, 2000))
    assert isinstance(whole, DraftTask)
    assert whole.step(0, 1e-3).loss == pytest.approx(some.step(0, 1e-3).loss, rel=1e-6)
    few = task_of(folder, draft_run(folder, negatives=0))
    head, labels = few.candidates(torch.from_numpy(few.common), 0)
    assert len(head) == len(few.common)
    assert torch.equal(labels, torch.arange(len(head)))


def test_states_from_the_cache_are_those_of_the_target(folder: Path) -> None:
    from dflash_fn_torch.train.features import hidden_states, load_model, padded

    task = task_of(folder, draft_run(folder))
    chosen = np.array([3, 0, 7])
    ids, _ = padded(task.texts, chosen)
    model = load_model(folder / "target", "cpu")
    torch.testing.assert_close(
        task.states(chosen, ids), hidden_states(model, torch.from_numpy(ids), (0, 1)), rtol=1e-4, atol=1e-4
    )
    pair = load_pair(folder / "target")
    known = pair.port.asarray(ids[:1], "cpu")
    cache = pair.port.new_cache(pair.target, ids.shape[1])
    ours = pair.port.target_pass(pair.target, cache, known, taps=(0, 1), head=False, exact_rows=False)
    torch.testing.assert_close(task.states(chosen[:1], ids[:1])[..., :64], ours.features, rtol=1e-4, atol=1e-4)


def test_a_two_layer_draft_learns_what_it_has_seen(folder: Path) -> None:
    fit = replace(FIT, steps=120, rate=0.03, optimiser="muon", checkpoint_every=1000)
    run = draft_run(folder, fit=fit, held_out=0.05)
    task = task_of(folder, run)
    before = task.score()["tau_seen"]
    fitting.fit(task, fit, folder / "learned", made_with="same")
    seen = task.tau(np.arange(task.trained))
    assert before < 1.5
    assert seen > 3.0
    (folder / "learned" / "draft").mkdir()
    task.export(folder / "learned" / "draft")
    pair = load_pair(folder / "target", folder / "learned" / "draft")
    prompts = [(str(i), task.texts[i][: task.texts.starts[i]].tolist()) for i in range(task.trained)]
    found = evaluation.evaluate(pair, prompts, EvalOptions(max_new_tokens=24))
    assert evaluation.summary(found)["tau"] == pytest.approx(seen, abs=0.15)  # the draft was rounded to bfloat16
    assert evaluation.exactness(pair, prompts, found)


def run_until(folder: Path, name: str, step: int | None) -> bool:
    """Train in a process of its own, and kill it after a step; return whether it came to its end."""
    command = [sys.executable, "-m", "tests.helpers.training", str(folder), name]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if step is not None and int(line) >= step:
                process.kill()
                break
        process.stdout.read()
    return process.returncode == 0


def killed_and_resumed(folder: Path, name: str, kills: int) -> None:
    """Kill a run at random steps, resume it each time, and compare it with one that nobody disturbed."""
    train(folder, f"{name}-whole")
    steps = sorted(random.Random(name).sample(range(2, FIT.steps - 1), kills))
    assert not any(run_until(folder, name, step) for step in steps), steps
    assert run_until(folder, name, None)
    whole, parts = (checkpoints.latest(folder / place) for place in (f"{name}-whole", name))
    assert whole is not None
    assert parts is not None
    assert parts.step == whole.step == FIT.steps
    assert parts.curve == whole.curve
    assert whole.arrays.keys() == parts.arrays.keys()
    for key, bits in whole.arrays.items():
        assert np.array_equal(bits.values, parts.arrays[key].values), key
    drafts = [fingerprint.of_folder(folder / place / "draft") for place in (f"{name}-whole", name)]
    assert drafts[0] == drafts[1]


def test_p20_a_killed_run_ends_with_the_same_weights(folder: Path) -> None:
    """P20: SIGKILL at two random steps, resumed each time."""
    killed_and_resumed(folder, "twice", 2)


@pytest.mark.slow
def test_p20_a_run_killed_ten_times_ends_with_the_same_weights(folder: Path) -> None:
    """P20: SIGKILL at ten random steps, resumed each time."""
    killed_and_resumed(folder, "ten-times", 10)


def test_a_run_with_nan_in_its_features_stops_and_keeps_its_last_checkpoint(folder: Path, tmp_path: Path) -> None:
    task = task_of(folder, draft_run(folder))
    fitting.fit(task, replace(FIT, steps=7), tmp_path, made_with="same")
    broken = replace(task, cache=np.full_like(task.cache, np.nan))
    before = {name: weight.detach().clone() for name, weight in broken.weights.items()}
    with pytest.raises(errors.NonFiniteError, match=r"step 7: the loss is nan.*step-00000007.safetensors"):
        fitting.fit(broken, FIT, tmp_path, made_with="same")
    assert all(torch.equal(weight, before[name]) for name, weight in broken.weights.items())
    assert checkpoints.load(checkpoints.saved(tmp_path)[-1]).step == 7


@pytest.mark.parametrize("start", ["layers", "ridge"])
def test_a_start_that_is_fitted_is_better_than_none(folder: Path, start: str) -> None:
    layers = {"start_layers": (0, 1)} if start == "layers" else {}
    blind, ready = (
        task_of(folder, draft_run(folder, start=name, **more)) for name, more in (("random", {}), (start, layers))
    )
    assert ready.step(0, 0.0 + 1e-9).loss < blind.step(0, 1e-9).loss


def test_copied_layers_are_the_targets(folder: Path) -> None:
    from safetensors.numpy import load_file

    task = task_of(folder, draft_run(folder, start="layers", start_layers=(1, 0)))
    known = load_file(folder / "target" / "model.safetensors")
    for own, layer in ((0, 1), (1, 0)):
        for part in ("self_attn.q_proj", "self_attn.k_norm", "input_layernorm"):
            ours = task.weights[f"layers.{own}.{part}.weight"].detach().numpy()
            assert np.array_equal(ours, known[f"model.layers.{layer}.{part}.weight"])


def target_run(architecture: Any, **changes: object) -> tuple[TargetOptions, TrainOptions, np.ndarray]:
    fit = FitOptions(steps=8, rate=0.02, warmup=2, optimiser="muon", checkpoint_every=3, log_every=1)
    options = TargetOptions(
        architecture=architecture, layers=4, full_every=2, grow_from=2, grow_at=0.5, hidden=32, inner=48,
        heads=2, kv_heads=1, head_dim=16, linear_heads=2, linear_dim=16, max_context=64, sequence=16, batch=4,
        bigrams=5, fit=fit,
    )  # fmt: skip
    run = TrainOptions(corpus=CorpusOptions(vocab_size=300), target=options)
    stream = (np.arange(3000) % 61 + np.arange(3000) // 61 % 3).astype(np.uint16)
    return replace(options, **changes), run, stream


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_p20_a_growing_target_resumes_with_the_same_bits(architecture: str, tmp_path: Path) -> None:
    """P20: also before, at and after the step at which layers are added."""
    options, run, stream = target_run(architecture)
    whole = TargetTask(options, run, stream, stream[:200], "cpu")
    done = fitting.fit(whole, options.fit, tmp_path / "whole", made_with="same")
    losses = [point["loss"] for point in done.curve]
    assert losses[-1] < losses[0]
    assert len(whole.model.model.layers) == 4
    for pause in (3, 4, 5, 8):
        torch.rand(3)  # a global generator that moves on changes nothing
        part = TargetTask(options, run, stream, stream[:200], "cpu")
        budget = Budget(pause + 1 - _done(tmp_path), clock=itertools.count().__next__)
        fitting.fit(part, options.fit, tmp_path / "parts", made_with="same", budget=budget)
        assert _done(tmp_path) == pause
    for name, weight in whole.weights.items():
        assert torch.equal(weight, part.weights[name]), name


def _done(folder: Path) -> int:
    found = checkpoints.latest(folder / "parts")
    return found.step if found else 0


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_exported_target_is_the_trained_one(architecture: str, tmp_path: Path) -> None:
    from dflash_fn_torch.train.features import load_model

    options, run, stream = target_run(architecture, grow_from=None)
    task = TargetTask(options, run, stream, stream[:200], "cpu")
    for step in range(3):
        task.step(step, 0.01)
    task.export(tmp_path)
    ids = torch.from_numpy(stream[None, :16].astype(np.int64))
    with torch.no_grad():
        for weight in task.weights.values():
            weight.copy_(weight.to(torch.bfloat16))
        expected = task.model(ids).logits
    torch.testing.assert_close(load_model(tmp_path, "cpu")(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_deeper_target_has_each_layer_twice() -> None:
    options, _, _ = target_run("qwen3")
    small = target_model.make(options, 300, 2, 0)
    with torch.no_grad():
        for weight in small.parameters():
            weight.add_(0.01)
    deep, origin = target_model.deepened(small, options)
    first, third = (dict(deep.named_parameters())[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 2))
    assert torch.equal(first, third)
    assert origin["model.layers.3.mlp.up_proj.weight"] == "model.layers.1.mlp.up_proj.weight"
    halved = dict(deep.named_parameters())["model.layers.2.mlp.down_proj.weight"]
    assert torch.equal(halved * 2, dict(small.named_parameters())["model.layers.0.mlp.down_proj.weight"])


def test_bigrams_are_nearly_their_own_entropy() -> None:
    options, _, _ = target_run("qwen3")
    model = target_model.make(replace(options, hidden=64), 40, 2, 0)
    after = np.array([(7 * token + 3) % 40 for token in range(40)])
    stream, drawn = [5], order.numbers(0, "bigrams", 0, 6000)
    for number in drawn:
        stream.append(int(after[stream[-1]]) if number < 0.8 else int(number * 1e6) % 40)
    target_model.fit_bigrams(model, np.array(stream), 60)
    with torch.no_grad():
        logits = model(torch.tensor([stream[:2000]])).logits[0, :-1]
    loss = float(torch.nn.functional.cross_entropy(logits, torch.tensor(stream[1:2000])))
    assert loss < 1.45  # the law's entropy is 1.24 nats, and a uniform guess costs 3.69


def test_answers_are_greedy_and_rows_do_not_matter(folder: Path) -> None:
    pair = load_pair(folder / "target")
    asked = [answers.Asked((5, 9, 1)), answers.Asked((7,)), answers.Asked((3, 3), answer=(4, 5, 6))]
    made = answers.answer(pair, asked, 6)
    alone = [answers.answer(pair, [one], 6)[0] for one in asked]
    assert sorted(made) == sorted(alone)
    assert ((3, 3, 4, 5, 6), 2) in made
    assert DESIGN.vocab > max(max(ids) for ids, _ in made)
    assert texts.pack(made).answer_tokens == 6 + 6 + 3
    assert training.FIT.steps == FIT.steps


CHAT_TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chatty() -> Pair:
    """The embedded target, with a chat template."""
    pair = replace(load_zoo("tiny-code"), draft=None)
    pair.tokenizer.chat_template = CHAT_TEMPLATE
    return pair


def test_the_target_writes_user_turns_from_its_own_template(chatty: Pair) -> None:
    options = TextOptions(kind="chat", turn_tokens=6, openers=("import ",), opened=1.0)
    ask = answers.ask_chat(chatty, options, 3)
    asked = ask(0, 3)
    assert asked == ask(0, 3)
    rendered = [chatty.tokenizer.decode(list(one.ids)) for one in asked]
    assert all(text.startswith("# user\nimport") for text in rendered)
    assert all(text.endswith("<|endoftext|>\n# assistant\n") for text in rendered)
    assert len(set(rendered)) == 3
    assert answers.ask_chat(chatty, options, 4)(0, 3) != asked
    with pytest.raises(errors.InputError, match="the target's tokenizer has no chat template; use 'continue'"):
        answers.ask_chat(replace(chatty, tokenizer=load_zoo("tiny-code").tokenizer), options, 3)


def test_prompts_and_conversations_of_files(chatty: Pair, tmp_path: Path) -> None:
    rows = [
        {"question": "one?"},
        {"messages": [{"role": "user", "content": "two?"}]},
        {"messages": [{"role": "user", "content": "three?"}, {"role": "assistant", "content": "3"}]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ask, count = answers.ask_given(chatty, [str(file)])
    assert count == 3
    asked = ask(0, 3)
    rendered = [chatty.tokenizer.decode(list(one.ids)) for one in asked]
    assert rendered == [f"# user\n{word}?<|endoftext|>\n# assistant\n" for word in ("one", "two", "three")]
    assert [one.answer is None for one in asked] == [True, True, False]
    assert chatty.tokenizer.decode(list(asked[2].answer or ())) == "3<|endoftext|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": ', r"row 1 \(line 2\): is no JSON"),
        ('{"text": "a"}', r"row 1 \(line 2\): has none of the fields prompt, question, problem, turns, messages"),
        ('{"messages": []}', r"row 1 \(line 2\): field 'messages': got \[\], expected a list of objects with a role"),
        ('{"messages": "hello"}', "field 'messages': got 'hello', expected a list of objects"),
        ('{"messages": [{"content": "no role"}]}', "field 'messages': got .*, expected a list of objects with a role"),
        ('{"prompt": ""}', "field 'prompt': is empty; expected text"),
        ("[1]", "got JSON of type list, expected an object"),
    ],
)
def test_rows_that_hold_no_prompt_are_named(row: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "one"}}\n{row}\n')
    with pytest.raises(errors.InputError, match=message):
        answers.read_given([str(file)])
    file.write_text("")
    with pytest.raises(errors.InputError, match=r"rows.jsonl: is empty; expected a JSON object a line"):
        answers.read_given([str(file)])


def test_prompts_cut_from_a_stream_begin_with_a_line_and_cross_no_end(chatty: Pair) -> None:
    text = "def first():\n    return 1\n\n\nclass Second:\n    value = 2\n" * 6
    ids = [*chatty.tokenizer.encode(text), 0, *chatty.tokenizer.encode(text), 0]
    ask = answers.ask_stream(chatty, np.array(ids), TextOptions(prompt_tokens=(5, 12)), 1)
    asked = ask(0, 40)
    assert asked[10:20] == ask(10, 20)
    assert all(0 not in one.ids and 1 <= len(one.ids) <= 12 for one in asked)
    starts = {chatty.tokenizer.decode(list(one.ids)).split("\n")[0] for one in asked}
    lines = ["def first():", "    return 1", "", "class Second:", "    value = 2"]
    assert all(any(line.startswith(start) for line in lines) for start in starts)
    assert len({len(one.ids) for one in asked}) > 4


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_trained_draft_loads_in_upstreams_package_and_guesses_the_same(folder: Path) -> None:
    upstream = pytest.importorskip(
        "dflash.model", reason="needs upstream's package: pip install --no-deps dflash==0.1.0"
    )
    from transformers import AutoModelForCausalLM

    from tests.helpers.upstream import first_divergence, our_rounds, upstream_rounds

    train(folder, "for-upstream")
    place = folder / "for-upstream" / "draft"
    theirs = upstream.DFlashDraftModel.from_pretrained(place, dtype=torch.float32, attn_implementation="sdpa").eval()
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, attn_implementation="sdpa")
    pair = load_pair(folder / "target", place)
    ids = [5, 9, 1, 22, 40, 7]
    found = first_divergence(
        pair,
        our_rounds(pair, ids, max_new_tokens=24, stop=()),
        upstream_rounds(upstream, theirs, target.eval(), ids, max_new_tokens=24, stop=()),
    )
    assert found is None or found.near_tie, str(found)
