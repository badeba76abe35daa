"""Layer norm and RMS norm over the last axis."""

from __future__ import annotations

from mpiscale.backend import Array
from mpiscale.kernels import norm as kernels
from mpiscale.tensor import Tensor


def layer_norm(
    x: Tensor, gain: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """y = gain (x - mean) / sqrt(variance + eps) + bias (Ba et al. 2016).

    x [..., n], gain [n], bias [n] -> y [..., n]
    Backward, with h = (x - mean) r, r = 1 / sqrt(variance + eps), g = gain dy:
        dx = r (g - mean(g) - h mean(g h)),  dgain = sum dy h,  dbias = sum dy.
    """
    data, b = x.data, None if bias is None else bias.data
    y, mean, rstd = kernels.layer_norm(data, gain.data, b, eps)
    has_bias = bias is not None

    def backward(dy: Array) -> tuple[Array, ...]:
        dx, dgain, dbias = kernels.layer_norm_backward(dy, data, gain.data, mean, rstd)
        return (dx, dgain, dbias) if has_bias else (dx, dgain)

    inputs = (x, gain) if bias is None else (x, gain, bias)
    return Tensor.from_op(y, inputs, backward)


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    """y = gain x / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019).

    x [..., n], gain [n] -> y [..., n]
    Backward, with h = x r, r = 1 / sqrt(mean(x^2) + eps), g = gain dy:
        dx = r (g - h mean(g h)),  dgain = sum dy h.
    """
    data = x.data
    y, rstd = kernels.rms_norm(data, gain.data, eps)

    def backward(dy: Array) -> tuple[Array, ...]:
        dx, dgain = kernels.rms_norm_backward(dy, data, gain.data, rstd)
        return dx, dgain

    return Tensor.from_op(y, (x, gain), backward)
