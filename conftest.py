"""What every test run shares: profiles, run-time shape checks of the ports, the folder `../shared`.

It lies here and not in tests/ so that `pytest properties` has it too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Threads that spin while they wait starve each other where cores are shared, as they are under xdist or beside an
# editor: a step was seen to take seven times longer. OpenMP reads this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Shapes and dtypes in the port's annotations are checked in tests and cost nothing elsewhere. A module that was
# imported before this line would escape the check.
assert "dflash_fn_torch" not in sys.modules, "dflash_fn_torch was imported before conftest.py could instrument it"
install_import_hook("dflash_fn_torch", "beartype.beartype")

OPT_IN = {
    "slow": ("--slow", "DFLASH_FN_SLOW"),
    "real_model": ("--real-model", "DFLASH_FN_REAL_MODEL"),
}

settings.register_profile(
    "default",
    max_examples=12,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dflash_fn")
    for marker, (option, variable) in OPT_IN.items():
        group.addoption(option, action="store_true", help=f"also run tests marked {marker} (or set {variable}=1)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {marker for marker in OPT_IN if not _wanted(config, marker)}
    dropped = [item for item in items if any(item.get_closest_marker(marker) for marker in left_out)]
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=dropped)


def _wanted(config: pytest.Config, marker: str) -> bool:
    option, variable = OPT_IN[marker]
    return bool(config.getoption(option)) or os.environ.get(variable) == "1" or marker in (config.option.markexpr or "")


@pytest.fixture(scope="module")
def shared() -> Path:
    """The folder beside the checkout with example configs, prompts and starter weights."""
    folder = Path(__file__).resolve().parents[1] / "shared"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder.name!r} beside the checkout")
    return folder
