"""Central differences: what a derivative is, and so the test of every backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpiscale.backend import FLOAT64, Array
from mpiscale.tensor import Tensor


def check_gradients(
    f: Callable[..., Tensor],
    *arrays: Array,
    step: float = 1e-6,
    tolerance: float = 1e-7,
    seed: int = 0,
) -> None:
    """Compare backward() of `f(*tensors)` with (f(x + h) - f(x - h)) / 2 h, in float64.

    The output is weighted with random numbers, so that no error can cancel in a sum.

    Args:
        f: gets one tensor per array, returns one tensor of any shape.
        arrays: float64; the gradient of each is checked in every element.
        step: h, in units of x.
        tolerance: largest difference accepted, relative to 1 + |gradient|.

    Raises:
        AssertionError: with the argument, place and both values of the worst element.
    """
    for array in arrays:
        if array.dtype != FLOAT64:
            raise TypeError(f"gradients are checked in float64, got {array.dtype}")
    tensors = [Tensor(np.array(array), requires_grad=True) for array in arrays]
    y = f(*tensors)
    weights = np.random.default_rng(seed).normal(size=y.shape)
    y.backward(weights)
    for i, tensor in enumerate(tensors):
        got = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad
        expected = _central_differences(f, arrays, i, weights, step)
        error = np.abs(got - expected) / (1 + np.abs(expected))
        if error.size and not error.max() <= tolerance:  # NaN fails too
            place = np.unravel_index(int(np.argmax(error)), error.shape)
            raise AssertionError(
                f"argument {i} at {tuple(map(int, place))}: backward gives "
                f"{got[place]}, central differences {expected[place]}"
            )


def _central_differences(
    f: Callable[..., Tensor],
    arrays: Sequence[Array],
    i: int,
    weights: Array,
    step: float,
) -> Array:
    """d(sum(weights * f)) / d(arrays[i]), one element at a time."""
    result = np.zeros(arrays[i].shape)
    for place in np.ndindex(arrays[i].shape):
        total = 0.0
        for sign in (1, -1):
            shifted = [np.array(array) for array in arrays]
            shifted[i][place] += sign * step
            y = f(*(Tensor(array) for array in shifted)).data
            total += sign * float((weights * y).sum())
        result[place] = total / (2 * step)
    return result
