"""Clipping by the global norm: the direction is kept, the length is capped."""

from __future__ import annotations

import math

import numpy as np

from mpiscale.backend import Array


def sum_of_squares(grad: Array) -> float:
    """Sum of the squared elements; products and sums in float64."""
    flat = grad.reshape(-1).astype(np.float64, copy=False)
    return float(np.dot(flat, flat))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """min(1, max_norm / norm): what every gradient is multiplied with.

    A zero norm, and max_norm = inf, give 1.

    Source: R. Pascanu et al., "On the difficulty of training recurrent neural
    networks", 2013, algorithm 1.
    """
    if max_norm <= 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    return 1.0 if norm <= max_norm else max_norm / norm


def clip(grad: Array, norm: float, max_norm: float) -> None:
    """Scale `grad` in place so that the whole, of norm `norm`, has at most max_norm."""
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient != 1.0 and math.isfinite(norm):
        grad *= grad.dtype.type(coefficient)
