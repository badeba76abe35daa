"""Softmax and its logarithm over the last axis."""

from __future__ import annotations

from mpiscale.backend import Array
from mpiscale.kernels import softmax as kernels
from mpiscale.tensor import Tensor


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis.  x [..., n] -> s [..., n]

    Backward:  dx = s * (ds - sum(s * ds)), since ds_i/dx_j = s_i (1[i = j] - s_j).
    """
    s = kernels.softmax(x.data)

    def backward(ds: Array) -> tuple[Array]:
        return (kernels.softmax_backward(s, ds),)

    return Tensor.from_op(s, (x,), backward)


def log_softmax(x: Tensor) -> Tensor:
    """Logarithm of the softmax over the last axis.  x [..., n] -> y [..., n]

    Backward:  dx = dy - e^y * sum(dy).
    """
    y = kernels.log_softmax(x.data)

    def backward(dy: Array) -> tuple[Array]:
        return (kernels.log_softmax_backward(y, dy),)

    return Tensor.from_op(y, (x,), backward)
