"""The command line as a process: streams that are closed, full or left, and Ctrl-C at any moment."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hearing import HEARING

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="these are the manners of POSIX shells")

LINE = ("generate", "import random", "--max-new-tokens", "3")
NO_SPACE = "error: stdout cannot be written to (No space left on device); the output is not whole\n"
needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


def shell(redirections, *args, stdin=b"", **environment):
    """Run the command line in a shell and return (exit code, stdout, stderr)."""
    command = ["bash", "-c", f'"$0" -m dflash_fn "$@" {redirections}', sys.executable, *args]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, env=os.environ | environment)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


# streams


@pytest.mark.parametrize("args", [LINE, ("--help",)])
def test_a_closed_stdout(args):
    message = "error: stdout is closed, and all results go there; send it to a file or to /dev/null\n"
    assert shell(">&-", *args) == (2, "", message)


def test_a_closed_stderr_and_a_closed_stdin_that_nobody_needs():
    code, out, err = shell("<&- 2>&-", *LINE)
    assert (code, err) == (0, "")
    assert out.startswith("import random")
    assert out.endswith("\n")


@pytest.mark.parametrize("args", [("generate", "-"), ("generate", "--chat")])
def test_a_closed_stdin_that_is_to_be_read(args):
    message = "error: stdin is closed, and there is text to be read from it; connect it to a file or a pipe\n"
    assert shell("<&-", *args) == (2, "", message)


def test_a_stdin_that_cannot_be_read(tmp_path):
    assert shell(f"0>{tmp_path / 'file'}", "generate", "-") == (
        2, "", "error: stdin cannot be read (Bad file descriptor)\n",
    )  # fmt: skip


def test_all_three_closed():
    assert shell("<&- >&- 2>&-", *LINE) == (2, "", "")


@needs_dev_full
@pytest.mark.parametrize("args", [LINE, ("doctor",), ("--help",), ("--version",)])
def test_a_full_stdout(args):
    assert shell(">/dev/full", *args) == (2, "", NO_SPACE)


@needs_dev_full
def test_a_full_stderr_does_not_end_the_work():
    code, out, _ = shell("2>/dev/full", *LINE)
    assert (code, out.startswith("import random")) == (0, True)


@pytest.mark.parametrize("args", [("doctor",), ("--help",)])
def test_a_reader_who_has_gone(args):
    code, out, err = shell("| true; echo ${PIPESTATUS[0]}", *args)
    assert (code, out, err) == (0, "141\n", "")


def test_bytes_that_are_no_text_where_the_locale_lets_them_pass():
    message = "error: the prompt is no UTF-8 text (byte 0xff at offset 1); expected UTF-8\n"
    assert shell("", "generate", b"a\xff", LC_ALL="C") == (2, "", message)
    assert shell("", "generate", "-", stdin=b"a\xff", LC_ALL="C") == (2, "", message)


# Ctrl-C


SLOW = "import sys, time\nprint('loading', file=sys.stderr, flush=True)\n"
MANNERS = {
    "interruptible": "time.sleep(60)\n",
    "interrupt turned into an error": "try:\n    time.sleep(60)\nexcept BaseException:\n    raise ImportError('no')\n",
    "interrupt swallowed": "try:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)\n",
}


@pytest.fixture(params=MANNERS)
def slow_port(request, tmp_path):
    """A port whose import takes long, as those of large frameworks do; the folder to put on the path."""
    (tmp_path / "slow_port.py").write_text(SLOW + MANNERS[request.param])
    facts = tmp_path / "slow_port-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: slow_port\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[dflash_fn.ports]\na-slow-one = slow_port:load\n")
    return tmp_path


def interrupt_at(word, *args, **environment):
    """Start the command line, press Ctrl-C once stderr has a line with a word, and return (exit code, stdout, rest)."""
    command = [*HEARING, sys.executable, "-m", "dflash_fn", *args]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=os.environ | environment) as process:
        assert process.stderr is not None
        assert word in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("args", [("generate", "x", "--port", "a-slow-one"), ("ports",), ("ports", "--json")])
def test_ctrl_c_while_a_framework_is_imported(slow_port, args):
    path = os.pathsep.join([str(slow_port), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert interrupt_at("loading", *args, PYTHONPATH=path) == (130, "", "interrupted\n")


def test_ctrl_c_while_the_command_line_itself_is_imported(tmp_path):
    (tmp_path / "typer.py").write_text(SLOW + MANNERS["interruptible"])
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert interrupt_at("loading", "--version", PYTHONPATH=path) == (130, "", "interrupted\n")
