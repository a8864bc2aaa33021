import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

import dflash_fn
from dflash_fn import errors, load_zoo, metrics
from dflash_fn.cli import answer, chat, check, exits, machine, pairs, prove, render, terminal
from dflash_fn.cli import generate as generate_module
from dflash_fn.cli import ports as ports_module
from dflash_fn.cli.commands import app
from dflash_fn.pacing import Adaptive
from dflash_fn.text import chat_prompt
from tests.helpers.hearing import HEARING

TINY_CODE = Path(dflash_fn.__file__).parent / "zoo" / "pairs" / "tiny-code"
TARGET, DRAFT = str(TINY_CODE / "target"), str(TINY_CODE / "draft")
PROMPT = "import random"
FEW = ("--max-new-tokens", "12")
KEYS = [
    "text", "tokens", "prompt_tokens", "finish_reason", "steps", "num_accepted", "block_sizes", "tau", "ttft_s",
    "tpot_s", "tokens_per_s", "pair", "port", "dtype", "device", "block_size", "width", "seed",
    "policy",
]  # fmt: skip
NOTHING = {
    "tokens_identical": None, "logits_identical": None, "baseline_tokens_per_s": None, "speedup": None,
}  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


def invoke(*args, stdin=None):
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("generate", PROMPT), ", or share the model by --tensor-parallel N"),
        (("compare", "ours", "transformers", PROMPT), ""),
    ],
)
def test_of_several_processes_the_first_refuses_what_all_would_print(monkeypatch, arguments, instead):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {arguments[0]}: got 2 processes (WORLD_SIZE), which would all do and print the same; start it without "
        f"torchrun{instead}\n"
    )
    monkeypatch.setenv("RANK", "1")
    done = invoke(*arguments)
    assert (done.exit_code, done.output) == (2, "")


def invoke_json(*args, stdin=None):
    result = invoke(*args, "--json", stdin=stdin)
    assert result.stdout.endswith("}\n")
    assert result.stdout.count("\n") == 1
    return result, json.loads(result.stdout)


def start(*args, **options):
    command = [*HEARING, sys.executable, "-m", "dflash_fn", *map(str, args)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(command, **options)


def read(stream, *size):
    assert stream is not None
    return stream.read(*size)


@pytest.fixture(scope="module")
def pair():
    return load_zoo("tiny-code")


@pytest.fixture
def no_weights(monkeypatch):
    """Loading anything is a failure."""

    def fail(*args, **options):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(dflash_fn, "load_pair", fail)


@pytest.fixture
def chat_target(tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(TARGET, folder)
    path = folder / "tokenizer_config.json"
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    return folder


# generate


def test_text_goes_to_stdout_and_the_summary_to_stderr(pair):
    result = invoke("generate", PROMPT, *FEW)
    assert result.exit_code == 0
    state = dflash_fn.decode(dflash_fn.prefill(pair, PROMPT), pair, max_new_tokens=12)
    assert result.stdout == pair.tokenizer.decode(state.tokens[0]) + "\n"
    assert "12 tokens" in result.stderr
    assert metrics.TAU_DEFINITION in result.stderr
    assert "steps by drafted tokens accepted:" in result.stderr
    assert "\x1b" not in result.output


def test_json_is_one_object_and_nothing_else(pair):
    result, value = invoke_json("generate", PROMPT, *FEW, "--seed", 5)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert list(value) == KEYS
    state = dflash_fn.prefill(pair, PROMPT)
    steps = list(dflash_fn.rounds(state, pair, max_new_tokens=12))
    assert value["tokens"] == list(steps[-1][0].tokens[0][len(state.tokens[0]) :])
    assert value["text"] == pair.tokenizer.decode(value["tokens"])
    assert value["prompt_tokens"] == len(state.tokens[0])
    assert value["finish_reason"] == "length"
    summary = metrics.summarize([info for _, info in steps])
    assert (value["steps"], value["num_accepted"], value["tau"]) == (
        summary.steps, list(summary.num_accepted), summary.tau,
    )  # fmt: skip
    assert (value["pair"], value["port"], value["dtype"], value["device"]) == ("tiny-code", "torch", "float32", "cpu")
    assert (value["block_size"], value["width"], value["seed"]) == (8, 8, 5)


def test_times_agree_with_each_other():
    _, value = invoke_json("generate", PROMPT, *FEW)
    assert value["ttft_s"] > 0
    assert value["tokens_per_s"] == pytest.approx(1 / value["tpot_s"])


@pytest.mark.parametrize(("budget", "steps"), [(0, 0), (1, 0)])
def test_too_few_tokens_have_no_tau_and_no_speed(budget, steps):
    result, value = invoke_json("generate", PROMPT, "--max-new-tokens", budget)
    assert result.exit_code == 0
    assert len(value["tokens"]) == budget
    assert (value["steps"], value["tau"], value["tpot_s"], value["tokens_per_s"]) == (steps, None, None, None)
    assert (value["ttft_s"] is None) is (budget == 0)
    assert invoke("generate", PROMPT, "--max-new-tokens", budget).exit_code == 0


@pytest.mark.parametrize(
    "mode", [(), ("--dtype", "bfloat16"), ("--block-size", 4), ("--width", 16), ("--block-size", 16)]
)
def test_check_finds_the_draft_to_change_nothing(mode):
    result, value = invoke_json("generate", PROMPT, *FEW, "--check", *mode)
    assert result.exit_code == 0
    assert list(value) == [*KEYS, "check"]
    assert list(value["check"]) == [
        "tokens_identical", "logits_identical", "baseline_tokens_per_s", "speedup", "not_done",
    ]  # fmt: skip
    assert value["check"]["not_done"] is None
    assert value["check"]["tokens_identical"] is value["check"]["logits_identical"] is True
    assert value["check"]["speedup"] == pytest.approx(value["tokens_per_s"] / value["check"]["baseline_tokens_per_s"])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--max-new-tokens", 0), "no token was decoded"),
        (("--max-new-tokens", 1), "the answer has one token, and the first is never drafted"),
        (("--max-new-tokens", 5, "--block-size", 1), "a block of 1 drafts nothing"),
    ],
)
def test_a_check_of_nothing_does_not_look_like_one_that_passed(flags, reason):
    result, value = invoke_json("generate", PROMPT, "--check", *flags)
    assert (result.exit_code, value["check"]) == (0, NOTHING | {"not_done": reason})
    assert f"check: nothing was checked, because {reason}\n" in invoke("generate", PROMPT, "--check", *flags).stderr


def test_check_says_so_to_people():
    result = invoke("generate", PROMPT, *FEW, "--check")
    assert "check: tokens and logits are those without the draft, bit for bit (12 tokens)" in result.stderr
    assert "times that without the draft" in result.stderr


@pytest.mark.parametrize("kind", ["tokens", "logits"])
def test_a_difference_is_told_and_has_an_exit_code(monkeypatch, kind):
    def altered(*args, **options):
        made = answer.decode_answer(*args, **options)
        if kind == "logits":
            return replace(made, digests=(*made.digests[:3], b"other", *made.digests[4:]))
        infos = [replace(info, emitted=((7,) * len(info.emitted[0]),)) for info in made.infos]
        return replace(made, infos=tuple(infos))

    monkeypatch.setattr(check, "decode_answer", altered)
    result, value = invoke_json("generate", PROMPT, *FEW, "--check")
    assert result.exit_code == exits.DIFFERENT == 1
    assert value["check"]["tokens_identical"] is (kind != "tokens")
    assert value["check"]["logits_identical"] is (kind != "logits")
    result = invoke("generate", PROMPT, *FEW, "--check")
    assert result.exit_code == 1
    index = 3 if kind == "logits" else 0
    assert f"check: {kind} differ from those without the draft, first at token {index} of the answer" in result.stderr


def test_a_block_size_above_the_drafts_widens_the_state():
    _, value = invoke_json("generate", PROMPT, *FEW, "--block-size", 12)
    assert (value["block_size"], value["width"]) == (12, 12)
    _, value = invoke_json("generate", PROMPT, *FEW, "--block-size", 4)
    assert (value["block_size"], value["width"]) == (4, 8)


def test_plain_decoding_of_a_target_alone():
    _, value = invoke_json("generate", PROMPT, *FEW, "--target", TARGET)
    assert (value["block_size"], value["width"], value["tau"]) == (1, 1, 1.0)
    assert value["pair"] == TARGET


def test_without_a_draft_people_are_told_why_tau_is_1():
    result = invoke("generate", PROMPT, *FEW, "--target", TARGET)
    assert "tau 1.00" in result.stderr
    assert f"\n{render.NO_DRAFT}\n" in result.stderr
    assert metrics.TAU_DEFINITION not in result.stderr
    assert render.NO_DRAFT in invoke("generate", "--chat", "--target", TARGET, stdin="/quit\n").stderr


@pytest.fixture
def draft_of_100(tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(DRAFT, folder)
    path = folder / "config.json"
    path.chmod(0o644)
    path.write_text(path.read_text().replace('"block_size": 8', '"block_size": 100'))
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "the draft's block size is 100; port torch verifies 32 tokens at most, give --block-size 32 or less"),
        (("--block-size", 40), "--block-size is 40; port torch verifies 32 tokens at most, give --block-size 32 or"),
        (
            ("--block-size", 8, "--width", 33),
            "--width is 33; port torch verifies 32 tokens at most, give --width 32 or",
        ),
    ],
)
def test_a_block_that_no_verification_holds_is_called_a_block(draft_of_100, flags, message):
    result = invoke("generate", PROMPT, *FEW, "--draft", draft_of_100, *flags)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_draft_of_large_blocks_can_draft_smaller_ones(draft_of_100):
    _, value = invoke_json("generate", PROMPT, *FEW, "--draft", draft_of_100, "--block-size", 8)
    assert (value["block_size"], value["width"]) == (8, 32)


def test_target_and_draft_by_folder_and_a_draft_in_place_of_the_pairs_own():
    _, ours = invoke_json("generate", PROMPT, *FEW)
    _, folders = invoke_json("generate", PROMPT, *FEW, "--target", TARGET, "--draft", DRAFT)
    _, replaced = invoke_json("generate", PROMPT, *FEW, "--pair", "tiny-code", "--draft", DRAFT)
    assert ours["tokens"] == folders["tokens"] == replaced["tokens"]
    assert ours["num_accepted"] == folders["num_accepted"] == replaced["num_accepted"]
    assert replaced["pair"] == f"tiny-code + {DRAFT}"


def test_prompt_from_stdin_less_one_newline():
    _, value = invoke_json("generate", "-", *FEW, stdin=f"{PROMPT}\n")
    _, same = invoke_json("generate", PROMPT, *FEW)
    assert value["tokens"] == same["tokens"]


def test_chat_template_is_used_where_there_is_one(chat_target, pair):
    flags = ("--target", chat_target, "--draft", DRAFT, *FEW)
    templated, raw = invoke_json("generate", "hi", *flags)[1], invoke_json("generate", "hi", *flags, "--raw")[1]
    assert raw["prompt_tokens"] == len(pair.tokenizer.encode("hi"))
    assert templated["prompt_tokens"] == len(pair.tokenizer.encode("# user\nhi<|endoftext|>\n# assistant\n"))
    assert invoke("generate", "hi", *flags).stdout.rstrip("\n") == templated["text"].rstrip("\n")


def test_stop_token_ends_the_answer(chat_target):
    path = chat_target / "config.json"
    _, value = invoke_json("generate", PROMPT, *FEW)
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": value["tokens"][5]}))
    _, cut = invoke_json("generate", PROMPT, "--raw", *FEW, "--target", chat_target, "--draft", DRAFT)
    assert cut["finish_reason"] == "stop"
    assert cut["tokens"] == value["tokens"][: value["tokens"].index(value["tokens"][5]) + 1]


# errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate"], "no prompt; give one, or - to read it from stdin, or --chat"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--max-new-tokens", "-1"], "--max-new-tokens: got -1, expected 0 or more"),
        (["generate", "x", "--block-size", "0"], "--block-size: got 0, expected 1 or more"),
        (["generate", "x", "--width", "0"], "--width: got 0, expected 1 or more"),
        (["generate", "x", "--width", "4", "--block-size", "8"], "--width 4 is below --block-size 8"),
        (["generate", "x", "--seed", "-1"], "--seed: got -1, expected 0 or more"),
        (["generate", "x", "--seed", str(2**64)], "expected less than 2**64"),
        (["generate", "x", "--dtype", "int8"], "--dtype: got 'int8', expected one of: float32, bfloat16, float16"),
        (["generate", "x", "--pair", "tiny-code", "--target", "y"], "--pair and --target exclude each other"),
        (["generate", "x", "--target", ""], "--target: got an empty name"),
        (["generate", "x", "--chat", "--json"], "--chat and --json exclude each other"),
        (["generate", "x", "--chat", "--check"], "--chat and --check exclude each other"),
        (["generate", "-", "--chat"], "--chat reads its turns from stdin"),
        (["generate", "x", "--pair", "no-such"], "unknown pair 'no-such'; known pairs: tiny-code"),
        (
            ["generate", "x", "--target", TARGET, "--check"],
            "--check compares with and without a draft; there is none, give",
        ),
        (
            ["generate", "x", "--target", TARGET, "--block-size", "4"],
            "--block-size 4 needs a draft to fill the block; ",
        ),
        (["generate", "x", "--target", TARGET, "--block-size", "4", "--chat"], "there is none, give one by --draft"),
        (["trace", "record", "x", "y", "--target", TARGET, "--block-size", "2"], "--block-size 2 needs a draft"),
        (["generate", "a\udcffb"], "the prompt is no UTF-8 text (byte 0xff at offset 1); expected UTF-8"),
        (["doctor", "--pair", "tiny-code"], "--pair says what --prove is to run; add --prove, or leave --pair out"),
        (["doctor", "--device", "cpu"], "--device says what --prove is to run"),
        (["doctor", "--draft", DRAFT], "--draft says what --prove is to run"),
        (["doctor", "--compile"], "--compile says how --prove is to run; add --prove, or leave --compile out"),
        (["doctor", "--port", "no-such"], "unknown port 'no-such'; installed ports: "),
        (["doctor", "--prove", "--pair", "x", "--target", "y"], "--pair and --target exclude each other"),
    ],
)
def test_bad_input_is_one_line_before_any_weights(no_weights, args, message):
    result = invoke(*args)
    assert result.exit_code == exits.BAD_INPUT == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--width", "4"], "--width 4 is below the draft's block size 8; give --width 8 or more, or --block-size 4"),
        (["--port", "no-such"], "unknown port 'no-such'"),
        (["--device", "no-such"], "no device 'no-such'"),
        (["--target", "./no-such"], "./no-such"),
        (["--draft", TARGET], "draft"),
    ],
)
def test_what_loading_finds_wrong_is_one_line_too(args, message):
    result = invoke("generate", "x", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_target_without_a_tokenizer(chat_target):
    for path in chat_target.glob("tokenizer*"):
        path.unlink()
    result = invoke("generate", "x", "--target", chat_target)
    assert result.exit_code == 2
    assert "holds no tokenizer" in result.stderr


def test_a_tokenizer_without_its_file(chat_target):
    (chat_target / "tokenizer.json").unlink()
    result = invoke("generate", "x", "--target", chat_target)
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {chat_target}: there is no tokenizer.json, and what else is there makes no tokenizer; "
        "put the file there, or give another tokenizer\n"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "is a folder; expected a safetensors file of that name"),
        ("config.json", "cannot be read (Is a directory)"),
    ],
)
def test_a_folder_in_the_place_of_a_file(chat_target, name, message):
    (chat_target / name).unlink()
    (chat_target / name).mkdir()
    result = invoke("generate", "x", "--target", chat_target)
    assert (result.exit_code, result.stderr) == (2, f"error: {chat_target / name}: {message}\n")


@pytest.fixture
def log():
    """What transformers says of tokenizing."""

    class Handler(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    records, handler = [], Handler()
    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_a_prompt_that_fills_the_context(chat_target, log):
    path = chat_target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 2048}))
    result = invoke("generate", "x = 1\n" * 2000, *FEW, "--target", chat_target, "--raw")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the prompt has ")  # there is one row, and the user gave it no number
    assert "tokens; the target's context holds 2048, one of which must be left for an answer\n" in result.stderr
    assert log == []


def test_an_error_in_the_middle_of_an_answer_has_a_line_of_its_own(monkeypatch):
    def fail_later(*args, **options):
        left = 3
        for made in real(*args, **options):
            yield made
            left -= 1
            if not left:
                raise errors.NonFiniteError("row 0, step 3: the target's logits hold NaN")

    real = dflash_fn.rounds
    whole = invoke("generate", PROMPT, *FEW).stdout
    monkeypatch.setattr(dflash_fn, "rounds", fail_later)
    for result in (invoke("generate", PROMPT, *FEW), invoke("generate", "--chat", *FEW, stdin=f"{PROMPT}\n")):
        assert result.exit_code == 2
        assert result.stdout.endswith("\n")
        assert result.stdout.removesuffix("\n") in whole
        assert result.stderr == "error: step 3: the target's logits hold NaN\n"
    result = invoke("generate", PROMPT, *FEW, "--json")
    assert (result.exit_code, result.stdout) == (2, "")


def test_stdin_that_is_no_text():
    result = invoke("generate", "-", stdin=b"x\xff\xfe")
    assert (result.exit_code, result.stderr) == (
        2, "error: the prompt is no UTF-8 text (byte 0xff at offset 1); expected UTF-8\n",
    )  # fmt: skip


def test_line_ends_of_windows_are_read_as_ours():
    _, value = invoke_json("generate", "-", *FEW, stdin=b"x = 1\r\ny\r\n")
    assert value["tokens"] == invoke_json("generate", "x = 1\ny", *FEW)[1]["tokens"]


def test_usage_errors_have_the_same_code():
    for args in (["generate", "x", "--target"], ["generate", "x", "--no-such"], ["no-such"]):
        assert invoke(*args).exit_code == 2


def test_errors_of_several_lines_become_one(monkeypatch):
    def fail(*args, **options):
        raise errors.CheckpointError("first\n  second")

    monkeypatch.setattr(generate_module, "open_pair", fail)
    assert invoke("generate", "x").stderr == "error: first second\n"


def test_unknown_exceptions_keep_their_traceback(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(generate_module, "open_pair", fail)
    assert isinstance(invoke("generate", "x").exception, RuntimeError)


# Ctrl-C and pipes


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


def test_ctrl_c_keeps_what_was_written(ctrl_c_after):
    _, whole = invoke_json("generate", PROMPT, "--max-new-tokens", 40)
    ctrl_c_after(5)  # the prompt is the first thing that is fed
    result, value = invoke_json("generate", PROMPT, "--max-new-tokens", 40, "--check")
    assert result.exit_code == exits.INTERRUPTED == 130
    assert value["finish_reason"] == "interrupted"
    assert value["steps"] == 3
    assert value["tokens"] == whole["tokens"][: len(value["tokens"])]
    assert value["check"] == NOTHING | {"not_done": "Ctrl-C came first"}


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_while_the_draft_is_checked_says_that_it_is_not_done(ctrl_c_after, as_json):
    whole = invoke_json("generate", PROMPT, *FEW)[1]
    ctrl_c_after(whole["steps"] + 5)
    result = invoke("generate", PROMPT, *FEW, "--check", *(["--json"] if as_json else []))
    assert result.exit_code == 130
    if as_json:
        value = json.loads(result.stdout)
        assert value["tokens"] == whole["tokens"]
        assert value["check"] == NOTHING | {"not_done": "Ctrl-C came first"}
    else:
        assert "12 tokens" in result.stderr
        assert "check: nothing was checked, because Ctrl-C came first\n" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="SIGINT is sent another way there")
def test_sigint_to_the_process():
    process = start("generate", PROMPT, "--max-new-tokens", 1900, "--block-size", 1)
    assert read(process.stdout, len(PROMPT) + 40).startswith(PROMPT)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.endswith("\n")
    assert "tau 1.00" in err
    assert "Traceback" not in err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE semantics")
def test_a_broken_pipe_is_quiet():
    process = start("generate", PROMPT, "--max-new-tokens", 1900, "--block-size", 1)
    with process:
        assert read(process.stdout, 4) == PROMPT[:4]
        process.stdout.close()  # pyright: ignore[reportOptionalMemberAccess]
        err = read(process.stderr)
    assert process.returncode == exits.BROKEN_PIPE
    assert err == ""


@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo terminals")
@pytest.mark.parametrize("no_colour", [False, True])
def test_escape_codes_are_for_terminals_and_for_those_who_want_them(no_colour):
    import pty

    ours, theirs = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm-256color"}
    env |= {"NO_COLOR": "1"} if no_colour else {}
    with start("generate", PROMPT, *FEW, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        seen = b""
        try:
            while part := os.read(ours, 4096):
                seen += part
        except OSError:  # Linux says so at the end
            pass
    os.close(ours)
    assert process.returncode == 0
    assert PROMPT.encode() in seen
    assert (b"\x1b[" in seen) is not no_colour


def test_a_long_prompt_is_seen_to_be_read(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal.reading(256, 600)
    terminal.reading(600, 600)
    assert capsys.readouterr().err == "\r\x1b[2Kreading the prompt: 256 of 600 tokens\r\x1b[2K"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    terminal.reading(256, 600)
    assert capsys.readouterr().err == ""


def test_control_characters_do_not_reach_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.write("a\x1b[2J\tb\n\x9b\x7f")
    assert capsys.readouterr().out == "a␛[2J\tb\n\ufffd␡"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    terminal.write("a\x1b[2J")
    assert capsys.readouterr().out == "a\x1b[2J"


# chat


@pytest.fixture
def answers(monkeypatch):
    """All answers that a chat gives, in order."""
    made = []

    def recorded(*args, **options):
        made.append(answer.decode_answer(*args, **options))
        return made[-1]

    monkeypatch.setattr(chat, "decode_answer", recorded)
    return made


def test_chat_extends_the_template_of_the_whole_conversation(chat_target, answers, pair):
    flags = ("--chat", "--target", chat_target, "--draft", DRAFT, "--max-new-tokens", 6)
    result = invoke("generate", "hi", *flags, stdin="\nmore\n/quit\nnever\n")
    assert result.exit_code == 0
    assert len(answers) == 2
    assert result.stdout == "".join(made.text.removesuffix("\n") + "\n" for made in answers)
    assert result.stderr.count("tokens/s") == 2
    pair.tokenizer.chat_template, plain = CHAT_TEMPLATE, pair.tokenizer.chat_template
    said = [("user", "hi"), ("assistant", answers[0].text), ("user", "more")]
    ids = chat_prompt(pair.tokenizer, [{"role": role, "content": content} for role, content in said])
    pair.tokenizer.chat_template = plain
    second = answers[1].state.tokens[0][: answers[1].prompt_tokens]
    assert pair.tokenizer.decode(second) == pair.tokenizer.decode(ids)
    assert second[: len(answers[0].state.tokens[0])] == answers[0].state.tokens[0]


def test_chat_without_a_template_goes_on_with_a_line_of_text(answers, pair):
    result = invoke("generate", "--chat", "--max-new-tokens", 5, stdin="def a():\nx = 1")
    assert result.exit_code == 0
    text = pair.tokenizer.decode(answers[1].state.tokens[0])
    first = answers[0].text
    assert text == f"def a():{first}" + ("" if first.endswith("\n") else "\n") + f"x = 1{answers[1].text}"


def test_ctrl_c_in_an_answer_goes_on_with_the_chat(ctrl_c_after, answers):
    ctrl_c_after(4)
    result = invoke("generate", "--chat", "--max-new-tokens", 40, stdin="def a():\nx = 1\n")
    assert result.exit_code == 0
    assert [made.interrupted for made in answers] == [True, False]
    assert len(answers[0].tokens) < len(answers[1].tokens) == 40
    assert result.stderr.count("cut by Ctrl-C") == 1


def test_ctrl_c_at_the_prompt_ends_the_chat(monkeypatch):
    def pressed():
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "read_line", pressed)
    result = invoke("generate", "--chat")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"y = 2; " * 2000, "one of which must be left for an answer"),
        (b"y\xff", "the line is no UTF-8 text (byte 0xff at offset 1); expected UTF-8"),
    ],
)
def test_a_line_that_cannot_be_used_is_left_out_of_the_chat(answers, line, message):
    flags = ("generate", "--chat", *FEW)
    result = invoke(*flags, stdin=b"x\n" + line + b"\nz = 3\n")
    assert result.exit_code == 2  # a script is told, though the conversation went on
    assert result.stderr.count("error: ") == 1
    assert f"{message} (this line is left out; the conversation goes on)\n" in result.stderr
    assert invoke(*flags, stdin="x\nz = 3\n").stdout == result.stdout
    assert answers[1].state.tokens == answers[3].state.tokens


def test_a_first_line_that_is_too_long_is_left_out_too(answers):
    result = invoke("generate", "y = 2; " * 2000, "--chat", *FEW, stdin="x\n")
    assert (result.exit_code, result.stderr.count("left out")) == (2, 1)
    assert result.stdout == answers[0].text + "\n"


def test_ctrl_c_while_a_line_is_read_leaves_it_out(monkeypatch, answers):
    def pressed(*args, **options):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "opened", pressed)
    result = invoke("generate", "--chat", *FEW, stdin="x\nz = 3\n")
    assert result.exit_code == 0
    assert "[Ctrl-C came before the first token; the line is left out]" in result.stderr
    assert result.stdout == invoke("generate", "--chat", *FEW, stdin="z = 3\n").stdout


# ports, doctor and the rest


def test_ports_lists_what_can_run():
    result, value = invoke_json("ports")
    assert result.exit_code == 0
    (torch,) = [port for port in value["ports"] if port["name"] == "torch"]
    assert torch["installed"] is True
    assert torch["problem"] is None
    assert torch["backend"].startswith("torch ")
    assert torch["dtypes"] == ["float32", "bfloat16", "float16"]
    assert "devices  " in invoke("ports").stdout


def test_ports_that_cannot_run_say_why(monkeypatch):
    def missing(name):
        raise errors.BackendMissing("port 'torch' needs 'torch', which is not installed")

    monkeypatch.setattr(ports_module.registry, "get_port", missing)
    result, value = invoke_json("ports")
    assert result.exit_code == 0
    assert value["ports"][0]["installed"] is False
    assert "cannot run: port 'torch' needs 'torch', which is not installed" in invoke("ports").stdout


def test_a_port_that_breaks_does_not_hide_the_others(monkeypatch):
    def broken(name):
        raise ZeroDivisionError("in someone's code")

    monkeypatch.setattr(ports_module.registry, "get_port", broken)
    assert "cannot run: ZeroDivisionError: in someone's code" in invoke("ports").stdout


def test_doctor_says_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_FN_CACHE", str(tmp_path / "not" / "there"))
    result, value = invoke_json("doctor")
    assert result.exit_code == 0
    assert value["dflash_fn"] == dflash_fn.__version__
    assert value["versions"]["torch"]
    assert value["port"]["name"] == "torch"
    assert value["device"] == value["port"]["devices"][0]
    assert value["cache"]["folder"] == str(tmp_path / "not" / "there")
    assert value["cache"]["free"] > 0
    present = {entry["name"]: entry["present"] for entry in value["pairs"]}
    assert present == {"tiny-code": True, "tiny-code-hybrid": True, "smollm2-135m": False}
    text = invoke("doctor").stdout
    assert re.search("pair tiny-code +present; ", text)
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_doctor_proves_the_contract(monkeypatch):
    monkeypatch.setattr(prove, "STARTS", (250,))
    monkeypatch.setattr(prove, "NUM_TOKENS", 10)
    result, value = invoke_json("doctor", "--prove")
    assert result.exit_code == 0
    assert [(made["dtype"], made["width"]) for made in value["prove"]] == [
        ("float32", 8), ("float32", 16), ("bfloat16", 8), ("bfloat16", 16),
    ]  # fmt: skip
    for made in value["prove"]:
        assert (made["start"], made["end"]) == (250, 260)
        assert made["tokens_identical"] is made["logits_identical"] is True
        assert made["first_difference"] is None
    assert "4 of 4 comparisons identical" in invoke("doctor", "--prove").stdout


def test_doctor_says_where_it_first_differs(monkeypatch):
    def altered(*args, **options):
        made = check.check_against_plain(*args, **options)
        return replace(made, logits_identical=False, first_difference=2)

    monkeypatch.setattr(prove, "STARTS", (20,))
    monkeypatch.setattr(prove, "NUM_TOKENS", 4)
    monkeypatch.setattr(prove, "check_against_plain", altered)
    result = invoke("doctor", "--prove")
    assert result.exit_code == 1
    assert "float32, width 8, tokens 20 to 24" in result.stdout
    assert "logits differ from position 22" in result.stdout
    assert "0 of 4 comparisons identical" in result.stdout


def test_the_starts_cross_the_borders():
    for start_, border in zip(prove.STARTS, (256, 384, 512), strict=True):
        assert start_ < border < start_ + prove.NUM_TOKENS


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"dflash-fn {dflash_fn.__version__}\n")


def test_the_command_line_starts_without_a_framework():
    code = (
        "import sys, dflash_fn.cli.commands; "
        "print(sorted({'torch', 'transformers', 'tokenizers', 'jax', 'mlx', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_library_does_not_import_the_command_line():
    code = "import sys, dflash_fn; print(sorted(m for m in sys.modules if m.startswith(('typer', 'dflash_fn.cli'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# parts


@pytest.mark.parametrize(
    ("left", "right", "index"), [("abc", "abd", 2), ("ab", "abc", 2), ("", "a", 0), ("ab", "ab", None), ("", "", None)]
)
def test_first_unequal(left, right, index):
    assert check.first_unequal(left, right) == check.first_unequal(right, left) == index


def test_bars_fit_any_width():
    summary = metrics.Summary(1003, 2000, (), 1.0, 0.0, (1000, 0, 3))
    for width in (12, 30, 60, 200):
        lines = render.bars(summary, width=width, letter="#").plain.splitlines()
        assert len(lines) == 3
        assert all(len(line) <= width for line in lines)
        assert lines[1] == " 1 0"
        assert lines[2] == " 2 # 3"


def test_entries_are_wrapped_below_themselves_on_a_terminal_only(capsys):
    from rich.console import Console

    value = "one two three four five six seven eight"
    terminal.print_entry(Console(width=40, force_terminal=True, color_system=None), "name", value)
    terminal.print_entry(Console(width=40, soft_wrap=True, color_system=None), "name", value)
    wrapped = capsys.readouterr().out.splitlines()
    assert wrapped == [
        "name               one two three four",
        "                   five six seven eight",
        "name               one two three four five six seven eight",
    ]


def test_memory_and_free_space(tmp_path):
    found = machine.memory()
    assert found.total is None or found.total > 0
    assert machine.free_space(tmp_path / "no" / "such") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_draft_that_the_pair_lacks_is_asked_for(monkeypatch):
    monkeypatch.setattr(pairs, "_folders", lambda name, report: (Path(TARGET), None))
    result = invoke("doctor", "--prove", "--pair", "tiny-code")
    assert result.exit_code == 2
    assert "--prove compares with and without a draft; there is none, give one by --draft" in result.stderr


def test_a_draft_can_be_given_to_doctor(monkeypatch):
    monkeypatch.setattr(prove, "STARTS", (20,))
    monkeypatch.setattr(prove, "NUM_TOKENS", 4)
    result, value = invoke_json("doctor", "--prove", "--target", TARGET, "--draft", DRAFT, "--device", "cpu")
    assert (result.exit_code, len(value["prove"]), value["device"]) == (0, 4, "cpu")


def test_a_chosen_block_size_leaves_the_text(pair):
    result, value = invoke_json("generate", PROMPT, *FEW, "--block-size", "auto", "--check")
    plain = dflash_fn.decode(dflash_fn.prefill(pair, PROMPT), pair, max_new_tokens=12, block_size=1)
    assert result.exit_code == 0
    assert value["tokens"] == list(plain.tokens[0][-12:])
    assert len(value["block_sizes"]) == value["steps"]
    assert set(value["block_sizes"]) <= {1, 2, 4, 8}
    assert value["check"]["logits_identical"]


def test_a_chosen_block_size_is_told_though_it_never_changed(monkeypatch):
    monkeypatch.setattr("dflash_fn.pacing.auto", lambda *args, **options: Adaptive({4: 1.0}))
    result = invoke("generate", PROMPT, *FEW, "--block-size", "auto")
    steps = result.stderr.split(" steps")[0].rsplit(" ", 1)[-1]
    assert f"\nblocks: {steps} steps of 4\n" in result.stderr
    assert "blocks:" not in invoke("generate", PROMPT, *FEW, "--block-size", "4").stderr


def test_a_block_size_that_is_none_and_one_that_its_policy_does_not_allow():
    result = invoke("generate", PROMPT, "--block-size", "eight")
    assert result.exit_code == 2
    assert "'eight' is neither a number nor 'auto'" in result.output
    result = invoke("generate", PROMPT, "--block-size", "auto", "--policy", "token_rejection", "--temperature", 1)
    assert result.exit_code == 2
    assert "--block-size auto: policy 'token_rejection, T=1' judges whole blocks" in result.stderr
