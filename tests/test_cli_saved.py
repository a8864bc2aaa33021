"""`generate --save-state` and `--resume`, alone and with `--chat`."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

import dflash_fn
from dflash_fn import load_zoo
from dflash_fn.cli import answer
from dflash_fn.cli.commands import app
from dflash_fn.text import chat_prompt

TINY_CODE = Path(dflash_fn.__file__).parent / "zoo" / "pairs" / "tiny-code"
PROMPT = "import random"
CHAT_TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


def invoke(*args, stdin=None):
    return CliRunner().invoke(app, ["generate", *(str(arg) for arg in args)], input=stdin)


def invoke_json(*args, stdin=None):
    result = invoke(*args, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def pair():
    return load_zoo("tiny-code")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def no_weights(monkeypatch):
    """Loading anything is a failure."""

    def fail(*args, **options):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(dflash_fn, "load_pair", fail)


@pytest.fixture
def chat_target(tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(TINY_CODE / "target", folder)
    path = folder / "tokenizer_config.json"
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    return "--target", folder, "--draft", TINY_CODE / "draft"


@pytest.fixture
def ctrl_c_after(monkeypatch):
    """Return a function that lets a number of steps pass, then interrupts once."""

    def arrange(steps):
        left = [steps]

        def feed(*args):
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
            return real(*args)

        real = answer.feed
        monkeypatch.setattr(answer, "feed", feed)

    return arrange


def saved_state(file, pair, prompts=(PROMPT,), **options):
    """Write a state that has seen prompts and decoded 5 tokens a row."""
    begun = dflash_fn.prefill(pair, prompts, **options)
    state = dflash_fn.decode(begun, pair, max_new_tokens=5, block_size=min(pair.block_size, begun.width))
    dflash_fn.save_state(file, state, pair)
    return state


def test_what_is_resumed_goes_on_as_if_nothing_had_been(file):
    whole = invoke_json(PROMPT, "--max-new-tokens", 20)
    first = invoke_json(PROMPT, "--max-new-tokens", 8, "--save-state", file)
    rest = invoke_json("--resume", file, "--max-new-tokens", 12)
    assert first["tokens"] + rest["tokens"] == whole["tokens"]
    assert first["text"] + rest["text"] == whole["text"]
    assert rest["prompt_tokens"] == whole["prompt_tokens"] + 8


def test_the_text_so_far_is_shown_and_the_file_is_named(file):
    whole = invoke(PROMPT, "--max-new-tokens", 20)
    first = invoke(PROMPT, "--max-new-tokens", 8, "--save-state", file)
    assert first.stderr.endswith(f"state saved to {file}\n")
    assert invoke("--resume", file, "--max-new-tokens", 12).stdout == whole.stdout


def test_with_json_nothing_else_is_said(file):
    result = invoke(PROMPT, "--max-new-tokens", 4, "--save-state", file, "--json")
    assert (result.stderr, result.stdout.count("\n")) == ("", 1)
    assert file.is_file()


def test_a_prompt_is_added_as_it_is(file, pair):
    state = saved_state(file, pair)
    value = invoke_json("--resume", file, "\nclass Stack:", "--max-new-tokens", 6)
    more = dflash_fn.extend(state, pair, pair.tokenizer.encode("\nclass Stack:"))
    expected = dflash_fn.decode(more, pair, max_new_tokens=6).tokens[0]
    assert value["tokens"] == list(expected[len(more.tokens[0]) :])
    assert value["prompt_tokens"] == len(more.tokens[0])


def test_a_prompt_may_come_from_stdin(file, pair):
    saved_state(file, pair)
    given = invoke_json("--resume", file, "x = 1", "--max-new-tokens", 6)
    assert invoke_json("--resume", file, "-", "--max-new-tokens", 6, stdin="x = 1\n")["tokens"] == given["tokens"]


def test_with_a_template_a_prompt_is_the_next_turn(file, chat_target):
    first = invoke_json(*chat_target, "hi", "--max-new-tokens", 5, "--save-state", file)
    second = invoke_json(*chat_target, "--resume", file, "more", "--max-new-tokens", 3, "--save-state", file)
    pair = dflash_fn.load_pair(chat_target[1], chat_target[3])
    state = dflash_fn.load_state(file, pair)
    said = [("user", "hi"), ("assistant", first["text"]), ("user", "more")]
    ids = chat_prompt(pair.tokenizer, [{"role": role, "content": content} for role, content in said])
    assert pair.tokenizer.decode(state.tokens[0]) == pair.tokenizer.decode(ids) + second["text"]


def test_a_template_can_be_left_out(file, chat_target):
    first = invoke_json(*chat_target, "--raw", "x =", "--max-new-tokens", 5, "--save-state", file)
    result = invoke(*chat_target, "--raw", "--resume", file, "\ny =", "--max-new-tokens", 3)
    assert result.stdout.startswith(f"x ={first['text']}\ny =")


def test_dtype_width_and_pair_are_those_of_the_file(file, pair):
    other = load_zoo("tiny-code", dtype="bfloat16")
    saved_state(file, other, seed=9, width=4)
    value = invoke_json("--resume", file, "--max-new-tokens", 4)
    said = [value[name] for name in ("pair", "dtype", "width", "block_size", "seed")]
    assert said == ["tiny-code", "bfloat16", 4, 4, 9]
    dflash_fn.save_state(file, dflash_fn.prefill(pair, "x"), replace(pair, name="mine"))
    result = invoke("--resume", file)
    assert (result.exit_code, result.stderr) == (
        2, f"error: {file}: was made with 'mine', which is no zoo pair; name it by --target and --draft\n",
    )  # fmt: skip
    assert invoke("--resume", file, "--pair", "tiny-code", "--max-new-tokens", 3).exit_code == 0


def test_ctrl_c_saves_what_there_is(file, ctrl_c_after, pair):
    whole = invoke_json(PROMPT, "--max-new-tokens", 30)
    ctrl_c_after(5)
    result = invoke(PROMPT, "--max-new-tokens", 30, "--save-state", file)
    assert result.exit_code == 130
    assert f"state saved to {file}" in result.stderr
    state = dflash_fn.load_state(file, pair)
    assert (state.step, state.stop) == (4, (None,))
    rest = invoke_json("--resume", file, "--max-new-tokens", 30 - len(state.tokens[0]) + whole["prompt_tokens"])
    assert list(state.tokens[0][whole["prompt_tokens"] :]) + rest["tokens"] == whole["tokens"]


def test_a_state_that_has_ended_needs_a_prompt(file, pair):
    begun = dflash_fn.prefill(pair, PROMPT)
    dflash_fn.save_state(file, dflash_fn.decode(begun, pair, max_new_tokens=5, stop_token_ids=range(2048)), pair)
    result = invoke("--resume", file)
    assert (result.exit_code, result.stderr) == (
        2, "error: the saved state has ended (a stop token was emitted); give a prompt to add to it\n",
    )  # fmt: skip
    assert invoke("--resume", file, "\nx", "--max-new-tokens", 3).exit_code == 0


# refused before weights are loaded


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--save-state", "{tmp}/none/state", "x"], "--save-state {tmp}/none/state: there is no folder {tmp}/none"),
        (["--save-state", "{tmp}", "x"], "--save-state: {tmp} is a folder; give the name of a file"),
        (["--resume", "{tmp}/none"], "{tmp}/none: no such file"),
        (
            ["--resume", "{tmp}/good", "--width", 9],
            "--resume and --width exclude each other; a saved state",
        ),
        (["--resume", "{tmp}/good", "--seed", 0], "--resume and --seed exclude each other; a saved state"),
        (["--resume", "{tmp}/good", "--check"], "--resume and --check exclude each other; a saved state"),
        (["--resume", "{tmp}/good", "--dtype", "float16"], "was saved in float32, got --dtype float16; leave that out"),
        (["--resume", "{tmp}/good", "--block-size", 9], "was saved with width 8, which has no room for --block-size 9"),
        (["--resume", "{tmp}/rows"], "--resume {tmp}/rows: holds 2 rows; the command line goes on from one"),
        (["--resume", "{tmp}/bad"], "{tmp}/bad: was changed after it was written; its digest does not match"),
        (["--resume", "{tmp}/other"], "{tmp}/other: not a whole file that dflash_fn wrote ("),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--chat"]], ids=["once", "chat"])
def test_what_cannot_be_is_refused_before_weights_are_loaded(pair, tmp_path, no_weights, flags, text, mode):
    if mode and "--check" in flags:
        pytest.skip("--chat and --check exclude each other")
    saved_state(tmp_path / "good", pair)
    saved_state(tmp_path / "rows", pair, ["x", "y"])
    whole = (tmp_path / "good").read_bytes()
    (tmp_path / "bad").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (tmp_path / "other").write_text("hello")
    result = invoke(*(str(flag).format(tmp=tmp_path) for flag in flags), *mode)
    assert result.exit_code == 2
    assert text.format(tmp=tmp_path) in result.stderr
    assert result.stdout == ""


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="this user may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path, no_weights):
    tmp_path.chmod(0o500)
    result = invoke("x", "--save-state", tmp_path / "state")
    tmp_path.chmod(0o700)
    assert f"--save-state {tmp_path}/state: the folder {tmp_path} cannot be written to" in result.stderr


def test_a_state_of_another_pair(checkpoint_of_another, file, pair):
    saved_state(file, pair)
    result = invoke("--resume", file, "--target", checkpoint_of_another, "--draft", TINY_CODE / "draft")
    assert result.exit_code == 2
    assert f"error: {file}: was saved with another target (pair 'tiny-code', target digest " in result.stderr


@pytest.fixture
def checkpoint_of_another(tmp_path):
    """The target of tiny-code with one weight changed."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "another"
    shutil.copytree(TINY_CODE / "target", folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    tensors[name] = tensors[name] * 2
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    return folder


# chat


def test_a_chat_is_saved_after_each_answer_and_gone_on_with(file, pair):
    both = invoke("--chat", "--max-new-tokens", 6, "--save-state", file, stdin="x = 1\ny = 2\n")
    assert both.stderr.count(f"state saved to {file}") == 2
    known = dflash_fn.load_state(file, pair).tokens
    first = invoke("--chat", "--max-new-tokens", 6, "--save-state", file, stdin="x = 1\n/quit\n")
    second = invoke("--chat", "--max-new-tokens", 6, "--save-state", file, "--resume", file, stdin="y = 2\n")
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stdout + second.stdout == both.stdout
    assert dflash_fn.load_state(file, pair).tokens == known


def test_a_chat_with_a_template_is_gone_on_with(file, chat_target):
    options = (*chat_target, "--chat", "--max-new-tokens", 4, "--save-state", file)
    both = invoke(*options, stdin="hi\nmore\n")
    pair = dflash_fn.load_pair(chat_target[1], chat_target[3])
    known = dflash_fn.load_state(file, pair).tokens
    invoke(*options, stdin="hi\n")
    second = invoke(*options, "--resume", file, stdin="more\n")
    assert pair.tokenizer.decode(dflash_fn.load_state(file, pair).tokens[0]) == pair.tokenizer.decode(known[0])
    assert both.stdout.endswith(second.stdout)


def test_ctrl_c_in_a_chats_answer_is_saved_too(file, ctrl_c_after, pair):
    ctrl_c_after(4)
    result = invoke("--chat", "--max-new-tokens", 40, "--save-state", file, stdin="def a():\n")
    assert result.exit_code == 0
    assert "cut by Ctrl-C" in result.stderr
    assert dflash_fn.load_state(file, pair).stop == (None,)


def test_a_chat_in_which_nothing_was_said_saves_nothing(file):
    assert invoke("--chat", "--save-state", file, stdin="/quit\n").exit_code == 0
    assert not file.exists()
