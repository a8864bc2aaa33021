"""The namespace that policies run in: numpy, with the one dtype of this port that numpy does not have."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["bfloat16"]

bfloat16 = np.dtype(ml_dtypes.bfloat16)
"""numpy has none of its own."""


def __getattr__(name: str) -> Any:
    return getattr(np, name)
