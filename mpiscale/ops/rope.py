"""Rotary position embedding: each pair of features turns by position x frequency."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import FLOAT64, Array, DType
from mpiscale.kernels import rope as kernels
from mpiscale.tensor import Tensor


def rope_table(
    positions: Array, head_size: int, base: float, dtype: DType
) -> tuple[Array, Array]:
    """Cosines and sines of position * base^(-2 i / head_size).

    positions [t] or [b, t], *global* positions -> two arrays [..., t, head_size / 2].
    """
    if head_size % 2:
        raise ValueError(f"RoPE turns pairs of features: head size {head_size} is odd")
    frequency = base ** (-np.arange(0, head_size, 2, dtype=FLOAT64) / head_size)
    angle = np.asarray(positions, FLOAT64)[..., None] * frequency
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def rope(x: Tensor, cos: Array, sin: Array) -> Tensor:
    """Turn the pairs (x_i, x_{i + d/2}) of every head (Su et al. 2021, eq. 34).

    x [b, t, heads, d], cos and sin [t, d/2] or [b, t, d/2] -> y [b, t, heads, d]
    Backward: the rotation by the opposite angle.
    """

    def backward(grad: Array) -> tuple[Array]:
        return (kernels.rope(grad, cos, -sin),)

    return Tensor.from_op(kernels.rope(x.data, cos, sin), (x,), backward)
