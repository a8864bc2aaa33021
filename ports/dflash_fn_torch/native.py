"""Our own CPU kernels (`kernels.cpp`), compiled once a machine by its C++ compiler and kept in the cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from dflash_fn import errors
from dflash_fn.zoo import cache

__all__ = ["KINDS", "Layer", "Pass", "Reach", "Stage", "compiler", "library"]

SOURCE = Path(__file__).with_name("kernels.cpp")

FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off")

COMPILERS = ("c++", "g++", "clang++")
"""Asked for in this order where the environment names none in `CXX`."""


KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""How kernels.cpp numbers what weights and caches hold."""


class Layer(ctypes.Structure):
    """`Layer` of kernels.cpp: a layer's weights."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "qk_norm", "post_norm")),
        *((name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "kv_heads", "dim")),
        ("eps", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


class Pass(ctypes.Structure):
    """`Pass` of kernels.cpp: what layers of one pass share."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "slots", "capacity", "turned")),
        *((name, ctypes.c_void_p) for name in ("starts", "positions", "cos", "sin", "work")),
        ("threads", ctypes.c_int32),
    )


class Reach(ctypes.Structure):
    """`Reach` of kernels.cpp: which keys queries see; window 0 is none."""

    _fields_ = (("causal", ctypes.c_int32), ("window", ctypes.c_int64))


class Stage(ctypes.Structure):
    """`Stage` of kernels.cpp: a layer of a pass."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layer", "call", "reach", "keys", "values", "tap")),
        ("stride", ctypes.c_int64),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Return the kernels, compiled first where this machine has none yet.

    Raises:
        BackendMissing: no C++ compiler, or one that cannot compile them.
        CacheFolderError: the cache folder cannot be written.
    """
    command = compiler()
    place = cache.root() / "kernels" / f"{_digest(command)}.so"
    loaded = _opened(place) if place.is_file() else None
    if loaded is None:  # none yet, or a file that was damaged since
        _compile(command, place)
        loaded = _opened(place)
    if loaded is None:
        raise errors.BackendMissing(
            f"compile: {shlex.join(command)} made a library that cannot be loaded or lacks the kernels ({place}); name "
            "another compiler in CXX, or do without compile"
        )
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.dflash_panel.restype = loaded.dflash_work.restype = number
    loaded.dflash_work.argtypes = [pointer, pointer]
    loaded.dflash_kinds.restype = ctypes.c_int32
    loaded.dflash_layers.argtypes = [pointer, number, pointer]
    loaded.dflash_place.argtypes = [pointer, number, pointer, number]
    loaded.dflash_place.restype = loaded.dflash_layers.restype = loaded.dflash_product.restype = None
    matrix, norm = [pointer, ctypes.c_int32, number, number], [pointer, ctypes.c_float, pointer]
    loaded.dflash_product.argtypes = [*matrix, pointer, number, pointer, *norm, ctypes.c_int32]
    return loaded


def _opened(place: Path) -> ctypes.CDLL | None:
    try:
        loaded = ctypes.CDLL(str(place))
    except OSError:
        return None
    return loaded if hasattr(loaded, "dflash_layers") else None


def compiler() -> tuple[str, ...]:
    """Return the command of the C++ compiler: `$CXX`, or the first that is found.

    Raises:
        BackendMissing: there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for name in (named[0],) if named else COMPILERS:
        found = shutil.which(name)
        if found:
            return (found, *named[1:])
    raise errors.BackendMissing(
        f"compile: needs a C++ compiler with OpenMP, and found no {' or '.join(named[:1] or COMPILERS)}; install one "
        "(Debian: apt install g++), name one in CXX, or do without compile"
    )


def _compile(command: tuple[str, ...], place: Path) -> None:
    """Compile into a file of another name and rename it, so that whoever looks finds a whole one or none."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            made = Path(folder) / place.name
            call = [*command, *FLAGS, _tuning(), str(SOURCE), "-o", str(made)]
            done = subprocess.run(call, capture_output=True, text=True, check=False)
            if done.returncode:
                raise errors.BackendMissing(
                    f"compile: {shlex.join(call)} failed; it needs a C++ compiler with OpenMP: name one in CXX, or do "
                    f"without compile\n{done.stderr.strip()}"
                )
            if not made.is_file():
                raise errors.BackendMissing(
                    f"compile: {shlex.join(call)} wrote no library; name a C++ compiler with OpenMP in CXX, or do "
                    "without compile"
                )
            made.replace(place)
    except OSError as error:
        raise errors.CacheFolderError(
            f"cache folder {place.parent}: the compiled kernels cannot be written ({error}); set DFLASH_FN_CACHE to "
            "another folder"
        ) from error


def _tuning() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _digest(command: tuple[str, ...]) -> str:
    """Name what the compiled file depends on: the source, the compiler, and the processor that it is tuned for."""
    binary = Path(command[0]).stat()
    parts = (SOURCE.read_text(encoding="utf-8"), FLAGS, command, binary.st_size, binary.st_mtime_ns, _processor())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
