"""Reshape, transpose, split, concatenate, stack, cast: values stay, places change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiscale.backend import Array, DType, is_float
from mpiscale.tensor import Tensor


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in rows of another length; -1 stands for what is left."""
    before = x.shape

    def backward(grad: Array) -> tuple[Array]:
        return (grad.reshape(before),)

    return Tensor.from_op(x.data.reshape(tuple(shape)), (x,), backward)


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Axes in the order `axes`; backward puts them back."""
    order = tuple(axes)
    if sorted(i % x.ndim for i in order) != list(range(x.ndim)):
        raise ValueError(f"axes {order} are no permutation of the axes of {x.shape}")
    back = np.argsort([i % x.ndim for i in order])

    def backward(grad: Array) -> tuple[Array]:
        return (grad.transpose(back),)

    return Tensor.from_op(x.data.transpose(order), (x,), backward)


def split(x: Tensor, sizes: Sequence[int], axis: int = -1) -> list[Tensor]:
    """Cut `x` along `axis` into pieces of the given lengths, as views."""
    if np.sum(sizes) != x.shape[axis]:
        raise ValueError(
            f"pieces {list(sizes)} add up to {int(np.sum(sizes))}, but axis {axis} of "
            f"shape {x.shape} has length {x.shape[axis]}"
        )
    pieces = np.split(x.data, np.cumsum(sizes)[:-1], axis=axis)
    shapes, dtype, x_ndim = [p.shape for p in pieces], x.dtype, x.ndim

    def backward(grads: tuple[Array | None, ...]) -> tuple[Array]:
        parts = [
            np.zeros(shape, dtype) if grad is None else grad
            for grad, shape in zip(grads, shapes, strict=True)
        ]
        joined = joined_view(parts) if axis in (-1, x_ndim - 1) else None
        return (np.concatenate(parts, axis=axis) if joined is None else joined,)

    return Tensor.from_multi_op(pieces, (x,), backward)


def joined_view(parts: Sequence[Array]) -> Array | None:
    """Parts that lie side by side along the last axis of one array, as one view of it.

    None if they do not, and have to be copied together.
    """
    first, at = parts[0], parts[0].ctypes.data
    for part in parts:
        belongs = (
            part.base is not None
            and part.base is first.base
            and part.strides == first.strides
            and part.shape[:-1] == first.shape[:-1]
            and part.strides[-1] == part.itemsize
            and part.ctypes.data == at
        )
        if not belongs:
            return None
        at += part.shape[-1] * part.itemsize
    shape = (*first.shape[:-1], sum(part.shape[-1] for part in parts))
    return np.lib.stride_tricks.as_strided(first, shape, first.strides)


def concatenate(tensors: Sequence[Tensor], axis: int = -1) -> Tensor:
    """Put tensors side by side along `axis`; each gets its piece of the gradient."""
    _check_one_type(tensors)
    ends = np.cumsum([x.shape[axis] for x in tensors])[:-1]

    def backward(grad: Array) -> tuple[Array, ...]:
        return tuple(np.split(grad, ends, axis=axis))

    data = np.concatenate([x.data for x in tensors], axis=axis)
    return Tensor.from_op(data, tensors, backward)


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Put tensors of one shape along a new axis."""
    _check_one_type(tensors)
    n = len(tensors)

    def backward(grad: Array) -> tuple[Array, ...]:
        return tuple(np.take(grad, i, axis=axis) for i in range(n))

    return Tensor.from_op(np.stack([x.data for x in tensors], axis), tensors, backward)


def cast(x: Tensor, dtype: DType) -> Tensor:
    """The same values in another floating-point type; the gradient is cast back."""
    before = x.dtype
    if not is_float(np.dtype(dtype)):
        raise TypeError(f"cast to a floating-point type, got {np.dtype(dtype)}")

    def backward(grad: Array) -> tuple[Array]:
        return (grad.astype(before),)

    return Tensor.from_op(x.data.astype(dtype), (x,), backward)


def _check_one_type(tensors: Sequence[Tensor]) -> None:
    types = sorted({str(x.dtype) for x in tensors})
    if len(types) > 1:
        raise TypeError(f"tensors of types {' and '.join(types)}: cast them to one")
