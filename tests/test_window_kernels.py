"""What windows of bounded memory rest on: attention's kernels add nothing for blocks of keys that nobody sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

DTYPES = ("float32", "bfloat16", "float16")


def operands(slots: int, keys: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([slots, keys, seed])
    return rng.normal(size=(1, slots, 4, 16)), rng.normal(size=(1, 2, keys, 16)), rng.normal(size=(1, 2, keys, 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [1, 2, 5, 8, 16, 32])
def test_torch(slots: int, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    attention: Any = pytest.importorskip("dflash_fn_torch.attention", exc_type=ImportError)
    kv: Any = pytest.importorskip("dflash_fn_torch.cache", exc_type=ImportError)
    bucket, kind = kv.KV_BUCKET, getattr(torch, dtype)
    q, keys, values = (torch.tensor(x).to(kind) for x in operands(slots, 4 * bucket, 0))
    for window in (3, 100, 400, 700):
        for start in (2 * bucket + window, 2 * bucket + 300 + window):
            if start + slots > 4 * bucket:
                continue
            reach = attention.Reach(causal=True, window=window)
            made = [
                attention.attend(q, keys, values, (first,), attention.mask(
                    reach, torch.tensor([start]), slots, torch.tensor([first]), last - first, kind
                ))
                for first in (0, bucket, 2 * bucket)
                for last in (-(-(start + slots) // bucket) * bucket, 4 * bucket)
            ]  # fmt: skip
            assert all(torch.equal(one, made[0]) for one in made)
            assert torch.isfinite(made[0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [1, 2, 5, 8, 16, 32])
def test_mlx(slots: int, dtype: str) -> None:
    mx = pytest.importorskip("mlx.core")
    attention: Any = pytest.importorskip("dflash_fn_mlx.attention", exc_type=ImportError)
    kv: Any = pytest.importorskip("dflash_fn_mlx.cache", exc_type=ImportError)
    bucket, kind = kv.KV_BUCKET, getattr(mx, dtype)
    q, keys, values = (mx.array(x.astype(np.float32)).astype(kind) for x in operands(slots, 4 * bucket, 0))
    for window in (3, 100, 400, 700):
        for start in (2 * bucket + window, 2 * bucket + 200 + window):
            if start + slots > 4 * bucket:
                continue
            reach = attention.Reach(causal=True, window=window)
            made = [
                attention.attend(q, keys, values, (first,), attention.mask(
                    reach, mx.array([start]), slots, mx.array([first]), last - first
                ))
                for first in (0, bucket, 2 * bucket)
                for last in (-(-(start + slots) // bucket) * bucket, 4 * bucket)
            ]  # fmt: skip
            assert all(mx.array_equal(one, made[0]).item() for one in made)
