"""Seconds from a cold process: `import dflash_fn`, `dflash-fn --help`, and `dflash-fn generate` to its first token."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from dflash_fn.bench.common import markdown

__all__ = ["main"]

IMPORT = "import time; t = time.perf_counter(); import dflash_fn; print(time.perf_counter() - t)"


def _process(*arguments: str) -> tuple[float, str]:
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - begun, done.stdout


def _first_token(*arguments: str) -> float:
    """Return the time from starting the process to the first token; one token is asked for, so that it is the last."""
    whole, out = _process("-m", "dflash_fn", "generate", "def f(x):", "--max-new-tokens", "1", "--json", *arguments)
    assert json.loads(out)["tokens"]
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflash_fn.bench.start", description=__doc__)
    parser.add_argument("--pair", default="tiny-code")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    ways = {
        "import dflash_fn": lambda: float(_process("-c", IMPORT)[1]),
        "dflash-fn --help": lambda: _process("-m", "dflash_fn", "--help")[0],
        f"generate --pair {options.pair}, whole process, one token": lambda: _first_token("--pair", options.pair),
    }
    rows = []
    for name, run in ways.items():
        run()
        rows.append([name, f"{statistics.median(run() for _ in range(options.runs)):.2f}"])
    print(markdown(["what", f"median of {options.runs}, s"], rows))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
