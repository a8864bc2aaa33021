"""Who may import whom, read off the syntax trees: see CONTRIBUTING.md, "Where a file belongs".

Imports under `if TYPE_CHECKING:` do not happen at run time and are not looked at. Lazy imports inside functions
count like any other, except for the rule on module-level imports.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FRAMEWORKS = frozenset({"torch", "mlx", "mlx_lm", "jax", "jaxlib", "equinox", "transformers"})
TERMINAL = frozenset({"typer", "rich"})
CORE_PACKAGES = sys.stdlib_module_names | {"numpy", "dflash_fn"}
LOOPLESS = ("dflash_fn.opening", "dflash_fn.steps", "dflash_fn.policies")
PORT_PREFIX = "dflash_fn_"
ENTRY = "dflash_fn.__main__"


@dataclass(frozen=True, slots=True)
class Module:
    """A source file and the name that it is imported by."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """Top-level package."""
        return self.name.partition(".")[0]

    @property
    def in_bench(self) -> bool:
        """Whether it measures other people's code, and so may import it inside the functions that do."""
        return within(self.name, "dflash_fn.bench")

    @property
    def in_cli(self) -> bool:
        """Whether it may use typer, rich and `dflash_fn.cli`."""
        return within(self.name, "dflash_fn.cli") or self.name == ENTRY


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name, absolute; `from a import b` gives `a.b`."""

    name: str
    line: int
    at_module_level: bool

    @property
    def package(self) -> str:
        """Top-level package."""
        return self.name.partition(".")[0]


def within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or lies in it."""
    return name == package or name.startswith(package + ".")


def read_modules(root: Path) -> list[Module]:
    """Parse the core and all ports of a checkout."""
    packages = [root / "dflash_fn", *sorted((root / "ports").glob("dflash_fn_*"))]
    return [_read(path, package.parent) for package in packages for path in sorted(package.rglob("*.py"))]


def _read(path: Path, base: Path) -> Module:
    parts = path.relative_to(base).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path)))


def run_time_imports(module: Module) -> Iterator[Import]:
    """Everything that a module imports when it, or a function of it, runs."""
    yield from _walk(module, module.tree.body, at_module_level=True)


def _walk(module: Module, nodes: Iterable[ast.AST], *, at_module_level: bool) -> Iterator[Import]:
    for node in nodes:
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for name in _imported_names(module, node):
            yield Import(name, getattr(node, "lineno", 0), at_module_level)
        yield from _walk(module, _children(node), at_module_level=at_module_level and not inside)


def _children(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        return node.orelse
    return ast.iter_child_nodes(node)


def _imported_names(module: Module, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _absolute(module, node)
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = ast.unparse(node.func).rpartition(".")[2]
        return [str(node.args[0].value)] if name in {"import_module", "__import__"} else []
    return []


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    own_package = parts if module.path.name == "__init__.py" else parts[:-1]
    base = own_package[: len(own_package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def violations(root: Path) -> list[str]:
    """Return a line for each broken rule of a checkout, sorted."""
    modules = read_modules(root)
    found = [line for module in modules for item in run_time_imports(module) for line in _judge(module, item)]
    return sorted({*found, *_loops(modules)})


def _judge(module: Module, item: Import) -> Iterator[str]:
    where = f"{module.name}:{item.line} imports {item.name}"
    if within(item.name, "dflash_fn.cli") and not module.in_cli:
        yield f"{where}: nothing outside the cli imports the cli"
    if module.package == "dflash_fn":
        yield from _judge_core(module, item, where)
    elif item.package.startswith(PORT_PREFIX) and item.package != module.package:
        yield f"{where}: a port never imports another port"


def _judge_core(module: Module, item: Import, where: str) -> Iterator[str]:
    if module.in_bench and not item.at_module_level:
        return
    if item.package in FRAMEWORKS or item.package.startswith(PORT_PREFIX):
        yield f"{where}: the core never imports an array library, transformers or a port"
    elif item.package in TERMINAL and not module.in_cli:
        yield f"{where}: only the cli imports typer and rich"
    elif item.at_module_level and item.package not in CORE_PACKAGES | TERMINAL:
        yield f"{where}: the core's module-level imports are the standard library and numpy"
    if module.name == "dflash_fn.records" and item.package == "dflash_fn":
        yield f"{where}: records import nothing of ours"


def _loops(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        whiles = [node.lineno for node in ast.walk(module.tree) if isinstance(node, ast.While)]
        if module.name == "dflash_fn.loop":
            whiles = whiles[1:]
        elif not any(within(module.name, package) for package in LOOPLESS):
            continue
        yield from (f"{module.name}:{line} has a while: the loop holds the only one" for line in whiles)


IMPORT_EACH = """
import importlib, json, sys
names, unwanted, blamed = json.loads(sys.argv[1]), set(json.loads(sys.argv[2])), {}
for name in names:
    importlib.import_module(name)
    found = {module.partition(".")[0] for module in sys.modules}
    for package in found:
        if package in unwanted or package.startswith("dflash_fn_"):
            blamed.setdefault(package, name)
print(json.dumps(blamed))
"""


def loaded_by(names: list[str], search: list[Path]) -> dict[str, str]:
    """Import modules in a fresh interpreter; return which of them first brought in each unwanted package."""
    code = f"import sys; sys.path[:0] = {[str(path) for path in search]!r}\n{IMPORT_EACH}"
    unwanted = sorted(FRAMEWORKS | TERMINAL)
    command = [sys.executable, "-P", "-c", code, json.dumps(names), json.dumps(unwanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
