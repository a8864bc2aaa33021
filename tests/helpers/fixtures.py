"""Fixtures of everything that runs on every port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dflash_fn
from dflash_fn import errors
from dflash_fn.port import Port
from tests.helpers.tiny import Checkpoints

__all__ = ["DTYPES", "checkpoints", "need_dtype", "own_threads", "port"]

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="session", params=dflash_fn.port_names())
def port(request: pytest.FixtureRequest) -> Port:
    """Each registered port in turn; one whose backend is not installed is skipped by name."""
    try:
        return dflash_fn.get_port(request.param)
    except errors.BackendMissing as error:
        pytest.skip(f"port {request.param}: {error}")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoint folders and pairs, each made once."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def own_threads() -> Iterator[None]:
    """Put back the threads of torch that a training run sets."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def need_dtype(port: Port, dtype: str) -> None:
    """Skip where a port does not run in a dtype."""
    if dtype not in port.info().dtypes:
        pytest.skip(f"port {port.name} does not run in {dtype}")
