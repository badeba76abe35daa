"""Arithmetic, element by element, with broadcasting; each op beside its derivative."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.ops.broadcasting import operands, sum_to_shape
from mpiscale.tensor import Tensor

Operand = Tensor | Array | float


def add(a: Operand, b: Operand) -> Tensor:
    """y = a + b;  da = dy, db = dy."""
    x, y = operands(a, b)
    x_shape, y_shape = x.shape, y.shape

    def backward(grad: Array) -> tuple[Array, Array]:
        return sum_to_shape(grad, x_shape), sum_to_shape(grad, y_shape)

    return Tensor.from_op(x.data + y.data, (x, y), backward)


def subtract(a: Operand, b: Operand) -> Tensor:
    """y = a - b;  da = dy, db = -dy."""
    x, y = operands(a, b)
    x_shape, y_shape = x.shape, y.shape

    def backward(grad: Array) -> tuple[Array, Array]:
        return sum_to_shape(grad, x_shape), sum_to_shape(-grad, y_shape)

    return Tensor.from_op(x.data - y.data, (x, y), backward)


def multiply(a: Operand, b: Operand) -> Tensor:
    """y = a b;  da = b dy, db = a dy."""
    x, y = operands(a, b)
    x_data, y_data = x.data, y.data

    def backward(grad: Array) -> tuple[Array, Array]:
        dx = sum_to_shape(grad * y_data, x_data.shape)
        return dx, sum_to_shape(grad * x_data, y_data.shape)

    return Tensor.from_op(x_data * y_data, (x, y), backward)


def divide(a: Operand, b: Operand) -> Tensor:
    """y = a / b;  da = dy / b, db = -y dy / b."""
    x, y = operands(a, b)
    x_shape, divisor = x.shape, y.data
    quotient = x.data / divisor

    def backward(grad: Array) -> tuple[Array, Array]:
        dx = grad / divisor
        return sum_to_shape(dx, x_shape), sum_to_shape(-dx * quotient, divisor.shape)

    return Tensor.from_op(quotient, (x, y), backward)


def negative(x: Tensor) -> Tensor:
    """y = -x;  dx = -dy."""

    def backward(grad: Array) -> tuple[Array]:
        return (-grad,)

    return Tensor.from_op(-x.data, (x,), backward)


def power(x: Tensor, exponent: float) -> Tensor:
    """y = x^n for a number n;  dx = n x^(n - 1) dy."""
    data = x.data

    def backward(grad: Array) -> tuple[Array]:
        return (grad * (exponent * data ** (exponent - 1)).astype(grad.dtype),)

    return Tensor.from_op((data**exponent).astype(data.dtype), (x,), backward)


def exp(x: Tensor) -> Tensor:
    """y = e^x;  dx = y dy."""
    y = np.exp(x.data)

    def backward(grad: Array) -> tuple[Array]:
        return (grad * y,)

    return Tensor.from_op(y, (x,), backward)


def log(x: Tensor) -> Tensor:
    """y = ln x;  dx = dy / x."""
    x_data = x.data

    def backward(grad: Array) -> tuple[Array]:
        return (grad / x_data,)

    return Tensor.from_op(np.log(x_data), (x,), backward)


def sqrt(x: Tensor) -> Tensor:
    """y = sqrt(x);  dx = dy / (2 y), and 0 where y = 0.

    The slope at 0 is infinite; 0 is a subgradient of the norm there and keeps one
    all-zero vector from turning every parameter into NaN.
    """
    y = np.sqrt(x.data)

    def backward(grad: Array) -> tuple[Array]:
        slope = np.divide(0.5, y, out=np.zeros_like(y), where=y != 0)
        return (grad * slope,)

    return Tensor.from_op(y, (x,), backward)


def where(condition: Array, a: Operand, b: Operand) -> Tensor:
    """y = a where `condition`, else b; the gradient goes to the one that was taken."""
    x, y = operands(a, b)
    x_shape, y_shape = x.shape, y.shape

    def backward(grad: Array) -> tuple[Array, Array]:
        zero = np.zeros((), grad.dtype)
        to_x = sum_to_shape(np.where(condition, grad, zero), x_shape)
        return to_x, sum_to_shape(np.where(condition, zero, grad), y_shape)

    return Tensor.from_op(np.where(condition, x.data, y.data), (x, y), backward)
