"""NumPy's broadcasting of shapes, undone for gradients; numbers as tensors."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array, is_float
from mpiscale.tensor import Tensor


def sum_to_shape(grad: Array, shape: tuple[int, ...]) -> Array:
    """Sum `grad` over the axes along which an operand of `shape` was repeated."""
    if grad.shape == shape:
        return grad
    new_axes = tuple(range(grad.ndim - len(shape)))
    stretched = tuple(
        len(new_axes) + axis
        for axis, n in enumerate(shape)
        if n == 1 and grad.shape[len(new_axes) + axis] != 1
    )
    return grad.sum(axis=new_axes + stretched, keepdims=True).reshape(shape)


def as_tensor(value: Tensor | Array | float, like: Tensor) -> Tensor:
    """`value` as a tensor; a plain number takes the type of `like`.

    Raises:
        TypeError: if an array or tensor of another type is mixed in.
    """
    if isinstance(value, (bool, int, float)):
        if isinstance(value, float) and not is_float(like.dtype):
            raise TypeError(
                f"{value} with a tensor of {like.dtype} would be cut to an integer: "
                "make the tensor from floats"
            )
        return Tensor(np.asarray(value, like.dtype))
    tensor = value if isinstance(value, Tensor) else Tensor(value)
    if tensor.dtype != like.dtype:
        raise TypeError(
            f"operands have types {like.dtype} and {tensor.dtype}: "
            "convert one of them first (ops.shapes.cast)"
        )
    return tensor


def operands(
    a: Tensor | Array | float, b: Tensor | Array | float
) -> tuple[Tensor, Tensor]:
    """Both operands as tensors of one type and of shapes that broadcast."""
    if isinstance(a, Tensor):
        x, y = a, as_tensor(b, a)
    elif isinstance(b, Tensor):
        x, y = as_tensor(a, b), b
    else:
        raise TypeError(
            f"expected a Tensor, got {type(a).__name__} and {type(b).__name__}"
        )
    try:
        np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        raise ValueError(
            f"shapes {x.shape} and {y.shape} do not broadcast: aligned at the last "
            "axis, each pair of lengths must be equal or one of them 1"
        ) from None
    return x, y
