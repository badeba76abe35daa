"""Matrix products: batched, and the linear layer's with its deferrable gradients."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import FLOAT32, Array, is_half
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
        da = product(grad, np.swapaxes(y, -1, -2))
        db = product(np.swapaxes(x, -1, -2), grad)
        return sum_to_shape(da, x.shape), sum_to_shape(db, y.shape)

    return Tensor.from_op(product(x, y), (a, b), backward)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W + b.  x [..., n], W [n, m], b [m] -> y [..., m]

    Backward:  dx = dy W^T,  dW = x^T dy,  db = sum of dy over the rows.
    """
    n, m = weight.shape
    _check_width(x, n, "weight", weight.shape)
    rows, w = x.data.reshape(-1, n), weight.data
    y = product(rows, w)
    if bias is not None:
        y += bias.data
    x_shape, wants_dx = x.shape, x.requires_grad

    def backward(grad: Array) -> tuple[Array | LazyGradient | None, ...]:
        dy = grad.reshape(-1, m)
        dx = product(dy, w.T).reshape(x_shape) if wants_dx else None
        dw = lazy_product(rows.T, dy)
        return (dx, dw) if bias is None else (dx, dw, dy.sum(axis=0))

    inputs = (x, weight) if bias is None else (x, weight, bias)
    return Tensor.from_op(y.reshape(*x.shape[:-1], m), inputs, backward)


def vocabulary_logits(x: Tensor, table: Tensor) -> Tensor:
    """Score of every vocabulary entry.  x [..., d], table [V, d] -> x table^T [..., V]

    The table is an embedding's (tied) or the head's own.
    Backward:  dx = dlogits table,  dtable = dlogits^T x.
    """
    v, d = table.shape
    _check_width(x, d, "table", table.shape)
    rows, e = x.data.reshape(-1, d), table.data
    x_shape = x.shape

    def backward(grad: Array) -> tuple[Array, LazyGradient]:
        dlogits = grad.reshape(-1, v)
        return product(dlogits, e).reshape(x_shape), lazy_product(dlogits.T, rows)

    logits = product(rows, e.T).reshape(*x.shape[:-1], v)
    return Tensor.from_op(logits, (x, table), backward)


def product(a: Array, b: Array) -> Array:
    """a b; 16-bit operands are multiplied in float32 and rounded once."""
    if is_half(a.dtype):
        return np.matmul(a.astype(FLOAT32), b.astype(FLOAT32)).astype(a.dtype)
    return np.matmul(a, b)


def lazy_product(a: Array, b: Array) -> LazyGradient:
    """The product a b, to be written or added where it belongs."""

    def write(out: Array, accumulate: bool) -> None:
        if accumulate:
            out += product(a, b)
        elif out.dtype == a.dtype and not is_half(a.dtype):
            np.matmul(a, b, out=out)
        else:
            out[...] = product(a, b)

    return LazyGradient(write, (a.shape[0], b.shape[1]), a.dtype)


def _check_width(x: Tensor, n: int, name: str, shape: tuple[int, ...]) -> None:
    if x.shape[-1:] != (n,):
        raise ValueError(
            f"x of shape {x.shape} does not fit {name} {shape}: its last axis must "
            f"have length {n}"
        )
