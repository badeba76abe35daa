"""Matrix products: batched, and the linear layer's with its deferrable gradients."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import FLOAT32, Array, is_half
from mpiscale.kernels.gemm.product import product_into
from mpiscale.ops.broadcasting import as_tensor, sum_to_shape
from mpiscale.tensor import LazyGradient, Tensor


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """y = a b.  a [..., m, k], b [..., k, n] -> y [..., m, n]; leading axes broadcast.

    Backward:  da = dy b^T,  db = a^T dy, summed over the axes that were repeated.
    """
    b = as_tensor(b, a)
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"cannot multiply shapes {a.shape} and {b.shape}: expected "
            "[..., m, k] and [..., k, n]"
        )
    x, y = a.data, b.data

    def backward(grad: Array) -> tuple[Array, Array]:
        da = batched_product(grad, np.swapaxes(y, -1, -2))
        db = batched_product(np.swapaxes(x, -1, -2), grad)
        return sum_to_shape(da, x.shape), sum_to_shape(db, y.shape)

    return Tensor.from_op(batched_product(x, y), (a, b), backward)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W + b.  x [..., n], W [n, m], b [m] -> y [..., m]

    Backward:  dx = dy W^T,  dW = x^T dy,  db = sum of dy over the rows.
    """
    _check_operands(x, weight, "weight", axis=0)
    n, m = weight.shape
    if bias is not None and (bias.shape, bias.dtype) != ((m,), x.dtype):
        raise ValueError(
            f"bias of shape {bias.shape} and {bias.dtype} does not fit weight "
            f"{weight.shape}: expected ({m},) and {x.dtype}"
        )
    rows = x.data.reshape(-1, n)
    y = np.empty((rows.shape[0], m), x.dtype)
    product_into(rows, weight.data, y, bias=None if bias is None else bias.data)
    x_shape, wants_dx = x.shape, x.requires_grad

    def backward(grad: Array) -> tuple[Array | LazyGradient | None, ...]:
        dy = grad.reshape(-1, m)
        dx = None
        if wants_dx:  # the weight may have been released and fetched since
            dx = matrix_product(dy, weight.data.T).reshape(x_shape)
        dw = lazy_product(rows.T, dy)
        return (dx, dw) if bias is None else (dx, dw, dy.sum(axis=0))

    inputs = (x, weight) if bias is None else (x, weight, bias)
    return Tensor.from_op(y.reshape(*x.shape[:-1], m), inputs, backward)


def vocabulary_logits(x: Tensor, table: Tensor) -> Tensor:
    """Score of every vocabulary entry.  x [..., d], table [V, d] -> x table^T [..., V]

    The table is an embedding's (tied) or the head's own.
    Backward:  dx = dlogits table,  dtable = dlogits^T x.
    """
    _check_operands(x, table, "table", axis=1)
    v, d = table.shape
    rows = x.data.reshape(-1, d)
    x_shape = x.shape

    def backward(grad: Array) -> tuple[Array, LazyGradient]:
        dlogits = grad.reshape(-1, v)
        dx = matrix_product(dlogits, table.data).reshape(x_shape)
        return dx, lazy_product(dlogits.T, rows)

    logits = matrix_product(rows, table.data.T).reshape(*x.shape[:-1], v)
    return Tensor.from_op(logits, (x, table), backward)


def batched_product(a: Array, b: Array) -> Array:
    """a b; 16-bit operands are multiplied in float32 and rounded once."""
    if is_half(a.dtype):
        return np.matmul(a.astype(FLOAT32), b.astype(FLOAT32)).astype(a.dtype)
    return np.matmul(a, b)


def matrix_product(a: Array, b: Array) -> Array:
    """a [m, k] b [k, n] -> [m, n], by the library's own kernel"""
    out: Array = np.empty((a.shape[0], b.shape[1]), a.dtype)
    product_into(a, b, out)
    return out


def lazy_product(a: Array, b: Array) -> LazyGradient:
    """The product a b, to be written or added where it belongs."""

    def write(out: Array, accumulate: bool) -> None:
        product_into(a, b, out, accumulate)

    return LazyGradient(write, (a.shape[0], b.shape[1]), a.dtype)


def _check_operands(x: Tensor, matrix: Tensor, name: str, axis: int) -> None:
    """Refuse an x whose last axis is not as long as `axis` of the matrix."""
    if matrix.ndim != 2:
        raise ValueError(f"{name} must be a matrix, got shape {matrix.shape}")
    if x.dtype != matrix.dtype:
        raise TypeError(f"x is of {x.dtype} and {name} of {matrix.dtype}: cast one")
    if x.shape[-1:] != (matrix.shape[axis],):
        raise ValueError(
            f"x of shape {x.shape} does not fit {name} {matrix.shape}: its last axis "
            f"must have length {matrix.shape[axis]}"
        )
