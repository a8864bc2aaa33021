"""Seconds from a cold process: `import dflash_fn`, `dflash-fn --help`, `dflash-fn generate`, and where its time goes.

The parts are those of `generate` on the torch port, one after the other in a process of their own: the interpreter, the
imports of this package, of torch, of the port and of what reads the tokenizer; the tokenizer; with `--compile` the
compiled kernels (from the cache folder, where they are after the first run); the weights, read, converted and laid out
for products; the prompt; the opening step, which gives the first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from dflash_fn.bench.common import markdown

__all__ = ["main"]

IMPORT = "import time; t = time.perf_counter(); import dflash_fn; print(time.perf_counter() - t)"

PARTS = """
import json, sys, time
begun = time.time()
pair, compiled, started = sys.argv[1], sys.argv[2] == "True", float(sys.argv[3])
parts, last = {"interpreter": begun - started}, time.perf_counter()

def part(name):
    global last
    now = time.perf_counter()
    parts[name], last = now - last, now

import dflash_fn
import dflash_fn.zoo
part("import dflash_fn")
import torch
part("import torch")
port = dflash_fn.get_port("torch")
part("import of the port")
import transformers
from transformers import PreTrainedTokenizerFast
part("import of transformers")
files = dflash_fn.zoo.fetch(pair)
part("zoo")
tokenizer = port.load_tokenizer(files.target)
part("tokenizer")
if compiled:
    port = port.compiling()
    part("compiled kernels")
loaded = dflash_fn.load_pair(files.target, files.draft, port=port, tokenizer=tokenizer)
part("weights")
state = dflash_fn.prefill(loaded, "def f(x):")
part("prompt")
next(dflash_fn.rounds(state, loaded, max_new_tokens=8))
part("first token")
print(json.dumps(parts))
"""


def _process(*arguments: str) -> tuple[float, str]:
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - begun, done.stdout


def _first_token(*arguments: str) -> float:
    """Return the time from starting the process to the first token; one token is asked for, so that it is the last."""
    whole, out = _process("-m", "dflash_fn", "generate", "def f(x):", "--max-new-tokens", "1", "--json", *arguments)
    assert json.loads(out)["tokens"]
    return whole


def _parts(pair: str, compiled: bool) -> dict[str, float]:
    return json.loads(_process("-c", PARTS, pair, str(compiled), str(time.time()))[1])


def main(arguments: list[str] | None = None) -> int:
    """Measure and print two tables; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.start", description=__doc__)
    parser.add_argument("--pair", default="tiny-code")
    parser.add_argument("--compile", action="store_true", help="run on kernels compiled for this machine")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    flags = ("--pair", options.pair, *(["--compile"] if options.compile else []))
    ways: dict[str, Callable[[], float]] = {
        "import dflash_fn": lambda: float(_process("-c", IMPORT)[1]),
        "dflash-fn --help": lambda: _process("-m", "dflash_fn", "--help")[0],
        f"generate {' '.join(flags)}, whole process, one token": lambda: _first_token(*flags),
    }
    rows = []
    for name, run in ways.items():
        run()
        rows.append([name, f"{statistics.median(run() for _ in range(options.runs)):.2f}"])
    print(markdown(["what", f"median of {options.runs}, s"], rows))  # noqa: T201
    taken = [_parts(options.pair, options.compile) for _ in range(options.runs)]
    medians = [[name, f"{statistics.median(run[name] for run in taken):.3f}"] for name in taken[0]]
    print("\n" + markdown(["part", f"median of {options.runs}, s"], medians))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
