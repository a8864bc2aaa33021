"""The wheel holds what it should and nothing else, and works where there is no checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import dflash_fn

ROOT = Path(__file__).resolve().parents[1]
PORTS = ("dflash_fn_jax", "dflash_fn_mlx", "dflash_fn_torch")
DIST_INFO = f"dflash_fn-{dflash_fn.__version__}.dist-info"
LIMIT = 28 * 2**20
WHERE = """
import json, dflash_fn, dflash_fn_torch, dflash_fn.zoo
from importlib.metadata import distribution
entries = distribution("dflash-fn").locate_file("dflash_fn")
print(json.dumps([dflash_fn.__file__, dflash_fn_torch.__file__, dflash_fn.zoo.__file__, str(entries)]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed in; what it depends on comes from the running interpreter."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


def run_installed(site: Path, *command: str) -> str:
    """Run python outside the checkout; PYTHONPATH comes before site-packages and so before an editable install."""
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-P", *command], cwd=site.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_top_level_names(names: list[str]) -> None:
    assert {name.partition("/")[0] for name in names} == {"dflash_fn", *PORTS, DIST_INFO}


def test_size(wheel: Path) -> None:
    assert wheel.stat().st_size < LIMIT


def test_every_source_file_is_inside(names: list[str]) -> None:
    folders = [(ROOT, ROOT / "dflash_fn"), *((ROOT / "ports", ROOT / "ports" / port) for port in PORTS)]
    sources = {str(path.relative_to(base)) for base, folder in folders for path in folder.rglob("*.py")}
    assert sources <= set(names)


def test_data_is_inside(names: list[str]) -> None:
    assert {"dflash_fn/py.typed", *(f"{port}/py.typed" for port in PORTS)} <= set(names)
    assert {"dflash_fn/trace/view.css", "dflash_fn/trace/view.js"} <= set(names)
    pairs = ROOT / "dflash_fn" / "zoo" / "pairs"
    data = {str(path.relative_to(ROOT)) for path in pairs.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert any(name.endswith(".safetensors") for name in data)
    assert data <= set(names)


def test_nothing_else_is_inside(names: list[str]) -> None:
    assert [name for name in names if "test" in Path(name).parts[0] or Path(name).name.startswith("test_")] == []
    assert [name for name in names if name.endswith((".pyc", ".tmp", ".lock"))] == []


def test_licence_is_inside(names: list[str]) -> None:
    assert {f"{DIST_INFO}/licenses/LICENSE", f"{DIST_INFO}/licenses/NOTICE"} <= set(names)


def test_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{DIST_INFO}/entry_points.txt").decode()
    entries = ConfigParser()
    entries.read_string(text)
    assert {section: dict(entries[section]) for section in entries.sections()} == {
        "console_scripts": {"dflash-fn": "dflash_fn.cli.main:run"},
        "dflash_fn.ports": {port.removeprefix("dflash_fn_"): f"{port}.port:load" for port in PORTS},
    }


def test_it_imports_from_where_it_was_installed(site: Path) -> None:
    files = json.loads(run_installed(site, "-c", WHERE))
    assert all(Path(file).is_relative_to(site) for file in files), files


def test_it_finds_its_port(site: Path) -> None:
    assert "torch" in json.dumps(json.loads(run_installed(site, "-m", "dflash_fn", "ports", "--json")))
