"""The core imports no array library, ports import no other port, and so on; and a test that these tests can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.import_rules import loaded_by, read_modules, violations

ROOT = Path(__file__).resolve().parents[1]

# One line of source a rule, in a made-up checkout; the value is a part of what must be reported.
BROKEN = {
    "dflash_fn/lazy.py": ("def f():\n    import torch\n", "dflash_fn.lazy:2 imports torch: the core never"),
    "dflash_fn/tokens.py": ("from transformers import AutoTokenizer", "imports transformers.AutoTokenizer: the core"),
    "dflash_fn/dynamic.py": ("import importlib\nimportlib.import_module('mlx.core')", "imports mlx.core: the core"),
    "dflash_fn/backdoor.py": ("from dflash_fn_torch.port import load", "imports dflash_fn_torch.port.load: the core"),
    "dflash_fn/pretty.py": ("try:\n    import rich.table\nexcept ImportError:\n    pass", "only the cli imports typer"),
    "dflash_fn/eager.py": ("import huggingface_hub", "module-level imports are the standard library and numpy"),
    "dflash_fn/records.py": ("from . import errors", "imports dflash_fn.errors: records import nothing of ours"),
    "dflash_fn/upward.py": ("from dflash_fn import cli", "imports dflash_fn.cli: nothing outside the cli"),
    "dflash_fn/deep/down.py": ("from ..cli.main import run", "imports dflash_fn.cli.main.run: nothing outside"),
    "dflash_fn/cli/fast.py": ("import jax", "imports jax: the core never"),
    "dflash_fn/steps.py": ("while True:\n    pass", "dflash_fn.steps:1 has a while"),
    "dflash_fn/opening.py": ("while True:\n    pass", "dflash_fn.opening:1 has a while"),
    "dflash_fn/policies/rule.py": ("def f():\n    while True:\n        pass", "dflash_fn.policies.rule:2 has a while"),
    "dflash_fn/loop.py": ("while True:\n    pass\nwhile True:\n    pass", "dflash_fn.loop:3 has a while"),
    "ports/dflash_fn_torch/port.py": ("from dflash_fn_mlx import port", "a port never imports another port"),
    "ports/dflash_fn_mlx/port.py": ("import dflash_fn.cli.main", "imports dflash_fn.cli.main: nothing outside"),
}

SOUND = {
    "dflash_fn/__init__.py": "from dflash_fn.loop import decode",
    "dflash_fn/__main__.py": "from dflash_fn.cli.main import run",
    "dflash_fn/hub.py": "def f():\n    from huggingface_hub import snapshot_download",
    "dflash_fn/records.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dflash_fn import port",
    "dflash_fn/loop.py": "import numpy as np\ndef decode():\n    while True:\n        pass",
    "dflash_fn/cli/main.py": "import typer\nimport rich.console\nfrom .. import loop",
    "dflash_fn/text.py": "def f():\n    while True:\n        pass",
    "ports/dflash_fn_torch/port.py": "import torch\nfrom dflash_fn_torch import cache\nfrom dflash_fn import records",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def core_modules(root: Path) -> list[str]:
    return [module.name for module in read_modules(root) if module.package == "dflash_fn" and not module.in_cli]


def test_this_checkout_keeps_the_rules() -> None:
    assert violations(ROOT) == []


def test_a_sound_checkout_passes(tmp_path: Path) -> None:
    assert violations(write(tmp_path, SOUND)) == []


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_rule_is_reported(name: str, tmp_path: Path) -> None:
    text, report = BROKEN[name]
    found = violations(write(tmp_path, SOUND | {name: text}))
    assert len(found) == 1
    assert report in found[0]


def test_importing_the_library_loads_no_framework() -> None:
    assert loaded_by(["dflash_fn"], [ROOT]) == {}


def test_importing_every_core_module_loads_no_framework() -> None:
    names = core_modules(ROOT)
    assert "dflash_fn.records" in names
    assert loaded_by(names, [ROOT]) == {}


def test_a_framework_that_gets_loaded_is_seen(tmp_path: Path) -> None:
    fakes = {"torch/__init__.py": "", "dflash_fn_mlx.py": ""}
    broken = {"dflash_fn/__init__.py": "", "dflash_fn/a.py": "import torch", "dflash_fn/b.py": "import dflash_fn_mlx"}
    root = write(tmp_path, fakes | broken)
    assert loaded_by(core_modules(root), [root]) == {"torch": "dflash_fn.a", "dflash_fn_mlx": "dflash_fn.b"}
