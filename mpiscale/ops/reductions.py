"""Sum, mean and max over axes; their gradients spread out again."""

from __future__ import annotations

import math

import numpy as np

from mpiscale.backend import Array, accumulation_dtype, is_float
from mpiscale.tensor import Tensor

Axis = int | tuple[int, ...] | None


def sum(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """y = sum of x over `axis` (all axes if None);  dx = dy, repeated."""
    axes, shape = _axes(axis, x.ndim), x.shape
    wide = accumulation_dtype(x.dtype) if is_float(x.dtype) else x.dtype
    total = x.data.sum(axis=axes, keepdims=keepdims, dtype=wide)

    def backward(grad: Array) -> tuple[Array]:
        return (_spread(grad, axes, shape).copy(),)

    return Tensor.from_op(total.astype(x.dtype), (x,), backward)


def mean(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """y = mean of x over `axis`;  dx = dy / n, repeated.

    Raises:
        TypeError: if the elements are integers, whose mean is none.
        ValueError: if there is nothing to average.
    """
    axes, shape = _axes(axis, x.ndim), x.shape
    n = math.prod(shape[i] for i in axes)
    if n == 0:
        raise ValueError(f"mean over axes {axes} of shape {shape} has no elements")
    total = x.data.sum(axis=axes, keepdims=keepdims, dtype=accumulation_dtype(x.dtype))

    def backward(grad: Array) -> tuple[Array]:
        return (_spread(grad, axes, shape) / grad.dtype.type(n),)

    return Tensor.from_op((total / n).astype(x.dtype), (x,), backward)


def max(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """y = largest element over `axis`; equal ones share the gradient evenly."""
    axes, data = _axes(axis, x.ndim), x.data
    top = data.max(axis=axes, keepdims=True)
    y = top if keepdims else np.squeeze(top, axis=axes)

    def backward(grad: Array) -> tuple[Array]:
        is_top = data == top
        share = is_top / is_top.sum(axis=axes, keepdims=True)
        return ((_spread(grad, axes, data.shape) * share).astype(grad.dtype),)

    return Tensor.from_op(y, (x,), backward)


def _axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """`axis` as a tuple of indices from the front."""
    if axis is None:
        return tuple(range(ndim))
    axes = (axis,) if isinstance(axis, int) else axis
    for i in axes:
        if not -ndim <= i < ndim:
            raise ValueError(f"axis {i} of a tensor with {ndim} axes")
    return tuple(i % ndim for i in axes)


def _spread(grad: Array, axes: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Repeat a reduced gradient along the axes that were reduced."""
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return np.broadcast_to(grad.reshape(kept), shape)
