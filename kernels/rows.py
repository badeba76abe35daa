"""Arrays of any leading shape as rows: what a row kernel takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpiscale.backend import Array


def as_rows(*arrays: Array) -> tuple[Any, ...]:
    """Arrays [..., n_i] -> number of rows, then each as [rows, n_i], C-contiguous.

    A contiguous array, and so any output, is viewed, not copied.
    """
    rows = math.prod(arrays[0].shape[:-1])
    matrices = [np.ascontiguousarray(a).reshape(rows, a.shape[-1]) for a in arrays]
    return rows, *matrices


def as_elements(*arrays: Array) -> tuple[Any, ...]:
    """Arrays of one shape -> number of elements, then each flat and contiguous."""
    return arrays[0].size, *(np.ascontiguousarray(a).reshape(-1) for a in arrays)
