"""Activation functions, element by element; each beside its derivative."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels import gelu as gelu_kernels
from mpiscale.kernels import swiglu as swiglu_kernels
from mpiscale.tensor import Tensor


def relu(x: Tensor) -> Tensor:
    """y = max(x, 0);  dx = dy where x > 0."""
    positive = x.data > 0

    def backward(grad: Array) -> tuple[Array]:
        return (np.where(positive, grad, np.zeros((), grad.dtype)),)

    return Tensor.from_op(np.maximum(x.data, 0), (x,), backward)


def tanh(x: Tensor) -> Tensor:
    """y = tanh x;  dx = (1 - y^2) dy."""
    y = np.tanh(x.data)

    def backward(grad: Array) -> tuple[Array]:
        return (grad * (1 - y * y),)

    return Tensor.from_op(y, (x,), backward)


def sigmoid(x: Tensor) -> Tensor:
    """y = 1 / (1 + e^-x);  dx = y (1 - y) dy."""
    y = _logistic(x.data)

    def backward(grad: Array) -> tuple[Array]:
        return (grad * y * (1 - y),)

    return Tensor.from_op(y, (x,), backward)


def silu(x: Tensor) -> Tensor:
    """y = x s(x) with s the sigmoid;  dx = s (1 + x (1 - s)) dy."""
    data, s = x.data, _logistic(x.data)

    def backward(grad: Array) -> tuple[Array]:
        return (grad * s * (1 + data * (1 - s)),)

    return Tensor.from_op(data * s, (x,), backward)


def gelu(x: Tensor) -> Tensor:
    """y = x Phi(x), Phi the normal distribution function (Hendrycks & Gimpel 2016)."""
    data = x.data

    def backward(grad: Array) -> tuple[Array]:
        return (gelu_kernels.gelu_backward(data, grad),)

    return Tensor.from_op(gelu_kernels.gelu(data), (x,), backward)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with Phi approximated by a tanh, as in GPT-2."""
    data = x.data

    def backward(grad: Array) -> tuple[Array]:
        return (gelu_kernels.gelu_tanh_backward(data, grad),)

    return Tensor.from_op(gelu_kernels.gelu_tanh(data), (x,), backward)


def swiglu(gate_up: Tensor) -> Tensor:
    """y = silu(gate) up (Shazeer 2020).  gate_up [..., 2 h] -> y [..., h]"""
    data = gate_up.data

    def backward(grad: Array) -> tuple[Array]:
        return (swiglu_kernels.swiglu_backward(data, grad),)

    return Tensor.from_op(swiglu_kernels.swiglu(data), (gate_up,), backward)


def _logistic(x: Array) -> Array:
    """1 / (1 + e^-x) without overflow: only e^-|x| is ever taken."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)
