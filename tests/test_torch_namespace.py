"""What the torch port's namespace does by itself is what array-api-compat does, on every kind of array."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
compat = pytest.importorskip("array_api_compat.torch")
namespace = pytest.importorskip("dflash_fn_torch.namespace", exc_type=ImportError)

VALUES = torch.tensor([[[1.0, 3.0, 3.0, -2.0], [0.0, -0.0, -1.0, 0.0]], [[-torch.inf] * 4, [5.0, torch.inf, 7.0, 7.0]]])
ODD = torch.tensor([[[2.0, torch.nan, torch.inf, torch.nan], [1.0, 2.0, 3.0, torch.nan]]])
CASES = [VALUES, ODD, VALUES.to(torch.bfloat16), ODD.to(torch.float16), VALUES.double()[:, :, ::2], VALUES[:, :0]]
CASES += [VALUES[:, 1:].clone().requires_grad_()]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("x", CASES)
def test_searches_and_checks_of_numbers(x: Any) -> None:
    same(namespace.isfinite(x), compat.isfinite(x))
    for axis in (-1, 2):
        for keepdims in (False, True):
            same(namespace.max(x, axis=axis, keepdims=keepdims), compat.max(x, axis=axis, keepdims=keepdims))
            same(namespace.argmax(x, axis=axis, keepdims=keepdims), compat.argmax(x, axis=axis, keepdims=keepdims))
    same(namespace.sum(x, axis=-1), compat.sum(x, axis=-1))
    same(namespace.sum(x), compat.sum(x))
    same(namespace.astype(x, torch.float64), compat.astype(x, torch.float64))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
def test_counts(kind: Any) -> None:
    x = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).to(kind)
    same(namespace.all(x, axis=-1), compat.all(x, axis=-1))
    same(namespace.all(x), compat.all(x))
    same(namespace.sum(x, axis=-1, dtype=torch.int64), compat.sum(x, axis=-1, dtype=torch.int64))
    same(namespace.concat([x, x], axis=1), compat.concat([x, x], axis=1))
    same(namespace.concat([x, x], axis=None), compat.concat([x, x], axis=None))
    if kind != torch.bool:
        same(namespace.cumulative_prod(x, axis=-1), compat.cumulative_prod(x, axis=-1))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_picks_with_negative_indices_and_fewer_of_them(axis: int) -> None:
    x, places = torch.arange(12).view(3, 4), torch.tensor([[0, 2], [1, -1], [2, 0]])
    same(namespace.take_along_axis(x, places[:, :1], axis=1), compat.take_along_axis(x, places[:, :1], axis=1))
    square = torch.arange(6).view(3, 2)
    same(
        namespace.take_along_axis(square, places % 2, axis=axis), compat.take_along_axis(square, places % 2, axis=axis)
    )
    same(namespace.take_along_axis(x, places, axis=1), compat.take_along_axis(x, places, axis=1))


def test_every_other_name_is_the_standards() -> None:
    assert namespace.exp is compat.exp
    assert namespace.int32 is torch.int32
