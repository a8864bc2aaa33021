"""Run the ```python blocks of a Markdown file, in order and in one namespace: `run_blocks.py FILE`.

Blocks with `>>>` are doctests. `<!-- not run: REASON -->` on the line before a fence leaves the block out.
"""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^(?P<before>[^\n]*\n)?```python\n(?P<code>.*?)^```\s*?$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Return (lines before it, code) of each block that is to be run."""
    blocks = BLOCK.finditer(text)
    kept = [block for block in blocks if not (block["before"] or "").startswith("<!-- not run:")]
    return [(text.count("\n", 0, block.start("code")), block["code"]) for block in kept]


def main(path: Path) -> None:
    """Run them; an exception or a failed doctest ends the process with an error."""
    namespace = {"__name__": "__main__"}
    for line, code in python_blocks(path.read_text(encoding="utf-8")):
        if ">>> " in code:
            test = doctest.DocTestParser().get_doctest(code, namespace, path.name, str(path), line)
            if doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False).failed:
                sys.exit(1)
            namespace.update(test.globs)
        else:
            exec(compile("\n" * line + code, str(path), "exec"), namespace)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
