"""Ports are found by entry points, in anyone's package, and imported only when they are asked for."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

import dflash_fn
from dflash_fn import errors
from dflash_fn.port import Port


def install(folder: Path, module: str, text: str) -> None:
    """Lay a package with a port called `mine` into a folder, as pip would."""
    (folder / f"{module}.py").write_text(text)
    facts = folder / f"{module}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[dflash_fn.ports]\nmine = {module}:load\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_names_are_sorted_and_each_there_once() -> None:
    names = dflash_fn.port_names()
    assert "torch" in names
    assert list(names) == sorted(set(names))


def test_a_port_in_someone_elses_package(packages: Path) -> None:
    install(packages, "abacus_for_dflash", "def load():\n    return 'beads'\n")
    assert "mine" in dflash_fn.port_names()
    assert "abacus_for_dflash" not in sys.modules
    assert dflash_fn.get_port("mine") == "beads"


def test_a_missing_backend_is_named_with_the_line_that_installs_it(packages: Path) -> None:
    install(packages, "beadless_for_dflash", "import beads_that_nobody_has\n")
    with pytest.raises(errors.BackendMissing) as caught:
        dflash_fn.get_port("mine")
    assert str(caught.value) == (
        "port 'mine' needs 'beads_that_nobody_has', which is not installed; "
        "the port comes with the package 'beadless_for_dflash', which says what it needs"
    )
    assert isinstance(caught.value, ImportError)
    assert "mine" in dflash_fn.port_names()


@pytest.mark.parametrize("own", [True, False])
def test_our_own_ports_are_installed_as_extras(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    package = importlib.metadata.distribution("dflash-fn") if own else None
    entry = importlib.metadata.EntryPoint("mine", "beads_that_nobody_has:load", "dflash_fn.ports")
    vars(entry).update(dist=package)
    monkeypatch.setattr("dflash_fn.registry.entry_points", lambda group: (entry,))
    with pytest.raises(errors.BackendMissing) as caught:
        dflash_fn.get_port("mine")
    assert str(caught.value) == (
        "port 'mine' needs 'beads_that_nobody_has', which is not installed; "
        'run: pip install "dflash-fn[mine]" (in a checkout: pip install ".[mine]")'
    )


def test_loading_a_pair_without_its_backend_says_so_first(packages: Path) -> None:
    install(packages, "second_beadless_for_dflash", "import beads_that_nobody_has\n")
    with pytest.raises(errors.BackendMissing):
        dflash_fn.load_pair(packages / "no such folder", port="mine")


def test_an_unknown_port_lists_the_known_ones(packages: Path) -> None:
    install(packages, "third_for_dflash", "")
    with pytest.raises(errors.UnknownPort) as caught:
        dflash_fn.get_port("yours")
    assert str(caught.value) == f"unknown port 'yours'; installed ports: {', '.join(dflash_fn.port_names())}"
    assert "mine" in str(caught.value)


def test_without_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_fn.registry.entry_points", lambda group: ())
    assert dflash_fn.port_names() == ()
    with pytest.raises(errors.UnknownPort) as caught:
        dflash_fn.get_port("torch")
    assert str(caught.value) == "unknown port 'torch'; installed ports: none"


@pytest.mark.parametrize("name", dflash_fn.port_names())
def test_a_port_has_everything_that_the_protocol_asks_for(name: str) -> None:
    try:
        port = dflash_fn.get_port(name)
    except errors.BackendMissing as error:
        pytest.skip(f"port {name}: {error}")
    asked = {member for member in dir(Port) if not member.startswith("_")}
    assert {member for member in asked if not hasattr(port, member)} == set()
    assert port.name == name
    assert port.info().name == name
    assert port.info().devices
    assert port.info().dtypes
