"""Write docs/reference from the docstrings of every public module: `python docs/build_reference.py`.

The sources are read and not imported, so this needs nothing installed and runs no code. A module is public when no
part of its name starts with an underscore; the command line describes itself (`dflash-fn --help`). A name is public
when its module's `__all__` lists it.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MARK = "<!-- Written by docs/build_reference.py from the docstrings. Change those, then run it again. -->\n"
LEFT_OUT = {"cli", "__main__"}
SECTION = re.compile(r"(Args|Attributes|Example|Examples|Guarantees|Note|Raises|Returns|Source|Yields):\s*")
ITEM = re.compile(r"([\w.*]+(?:, [\w.*]+)*): (.*)")
AS_LIST = {"Args", "Attributes", "Guarantees", "Raises"}

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Page:
    """One module's page, and what keeps it from being complete."""

    module: str
    summary: str
    text: str
    problems: list[str] = field(default_factory=list)


def main() -> None:
    """Write the pages, and remove those that are no longer due."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    folder = parser.parse_args().root / "docs" / "reference"
    folder.mkdir(exist_ok=True)
    wanted = files(build_pages(folder.parents[1]))
    for path in stale(folder, wanted):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")


def stale(folder: Path, wanted: dict[str, str]) -> list[Path]:
    """Return the pages of a reference folder that are missing, out of date or no longer due."""
    written = [path for path in folder.glob("*.md") if path.read_text(encoding="utf-8").startswith(MARK)]
    paths = sorted({*written, *(folder / name for name in wanted)})
    return [path for path in paths if not path.is_file() or path.read_text("utf-8") != wanted.get(path.name)]


def build_pages(root: Path) -> list[Page]:
    """Read every public module of a checkout."""
    trees = dict(public_modules(root))
    return [build_page(name, tree, set(trees)) for name, tree in trees.items()]


def public_modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield names and syntax trees, the core first."""
    for package in (root / "dflash_fn", *sorted((root / "ports").glob("dflash_fn_*"))):
        for path in sorted(package.rglob("*.py"), key=lambda path: path.with_suffix("").parts):
            parts = [part for part in path.relative_to(package.parent).with_suffix("").parts if part != "__init__"]
            if not LEFT_OUT.intersection(parts) and not any(part.startswith("_") for part in parts):
                yield ".".join(parts), ast.parse(path.read_text(encoding="utf-8"), str(path))


def files(pages: list[Page]) -> dict[str, str]:
    """Return file name -> text for all pages and their index."""
    rows = [f"* [`{page.module}`]({page.module}.md): {page.summary}" for page in pages]
    index = "\n".join([MARK, "# Reference", "", *rows, ""])
    return {"README.md": index} | {f"{page.module}.md": page.text for page in pages}


def build_page(module: str, tree: ast.Module, modules: set[str]) -> Page:
    """Render a module: its docstring, then each name of its `__all__`."""
    docstring = ast.get_docstring(tree) or ""
    page = Page(module, docstring.partition("\n")[0], "")
    if not docstring:
        page.problems.append(f"{module}: no module docstring")
    known = definitions(tree)
    names = public_names(tree)
    if names is None:
        names = []
        loose = [name for name, node in known.items() if isinstance(node, Definition) and not name.startswith("_")]
        if loose:
            page.problems.append(f"{module}: no __all__, but public definitions such as {loose[0]}")
    chunks = [_entry(page, name, known.get(name), tree, modules) for name in names]
    page.text = "\n\n".join([MARK + f"\n# `{module}`", markdown(docstring), *chunks]).rstrip() + "\n"
    return page


def public_names(tree: ast.Module) -> list[str] | None:
    """Return `__all__`, or None where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return what each name of a module's top level is defined or imported by."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, Definition):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(target): node for target in targets}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
    return found


def _entry(page: Page, name: str, node: ast.stmt | None, tree: ast.Module, modules: set[str]) -> str:
    heading = f"## `{name}`\n\n"
    if isinstance(node, ast.ImportFrom) and node.module:
        source = f"{node.module}.{name}" if f"{node.module}.{name}" in modules else node.module
        if source in modules:
            return heading + f"From [`{source}`]({source}.md)."
    docstring = _docstring(node, tree)
    if name == "__version__":
        docstring = "The version of the library."
    if node is None or not docstring:
        page.problems.append(f"{page.module}.{name}: {'no docstring' if node else 'in __all__, but not defined'}")
        return heading.rstrip()
    parts = [f"```python\n{_header(node)}\n```", markdown(docstring)]
    if isinstance(node, ast.ClassDef):
        parts += [_method(method) for method in node.body if isinstance(method, Definition) and _shown(method)]
    return heading + "\n\n".join(parts)


def _docstring(node: ast.stmt | None, tree: ast.Module) -> str:
    if isinstance(node, Definition):
        return ast.get_docstring(node) or ""
    after = tree.body[tree.body.index(node) + 1 :][:1] if node else []
    value = after[0].value if after and isinstance(after[0], ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _shown(method: Definition) -> bool:
    hidden = method.name.startswith("_") and method.name != "__call__"
    return not hidden and bool(ast.get_docstring(method))


def _method(method: Definition) -> str:
    return f"### `{method.name}`\n\n```python\n{_header(method)}\n```\n\n{markdown(ast.get_docstring(method) or '')}"


def _header(node: ast.stmt) -> str:
    """Return a signature, or a class with its fields, or an assignment, as source."""
    if isinstance(node, ast.ClassDef):
        return _class_header(node)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{node.name}({_arguments(node.args)}){result}"
    return ast.unparse(node)


def _class_header(node: ast.ClassDef) -> str:
    decorators = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]
    bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
    fields = [f"    {ast.unparse(item)}" for item in node.body if isinstance(item, (ast.Assign, ast.AnnAssign))]
    return "\n".join([*decorators, f"class {node.name}" + (f"({bases}):" if bases else ":"), *(fields or ["    ..."])])


def _arguments(args: ast.arguments) -> str:
    line = ast.unparse(args)
    return line if len(line) <= 90 else "".join(f"\n    {part}," for part in _split(line)) + "\n"


def _split(line: str) -> list[str]:
    """Cut at the commas that stand in no bracket."""
    parts, depth = [""], 0
    for character in line:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def markdown(docstring: str) -> str:
    """Turn a docstring with sections such as `Args:` into Markdown."""
    out: list[str] = []
    lines = docstring.splitlines()
    while lines:
        line = lines.pop(0)
        section = SECTION.fullmatch(line)
        if not section:
            out.append(line)
            continue
        body: list[str] = []
        while lines and (not lines[0] or lines[0].startswith(" ")):
            body.append(lines.pop(0)[4:])
        out += [f"**{section[1]}**", "", *_section(section[1], "\n".join(body).strip("\n").splitlines()), ""]
    return "\n".join(out).strip()


def _section(title: str, body: list[str]) -> list[str]:
    if title in AS_LIST:
        return [_item(line) for line in body]
    if any(line.startswith(">>> ") for line in body):
        return ["```python", *body, "```"]
    return body


def _item(line: str) -> str:
    item = ITEM.fullmatch(line)
    return f"* `{item[1]}`: {item[2]}" if item else line


if __name__ == "__main__":
    main()
