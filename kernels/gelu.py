"""GELU, exact and in its tanh form, forward and backward, elementwise.

Source: D. Hendrycks, K. Gimpel, "Gaussian error linear units (GELUs)", 2016.
"""

from __future__ import annotations

import math

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.choose import choose, expect_shape
from mpiscale.kernels.exp import normal_cdf_and_density, sigmoid
from mpiscale.kernels.rows import as_elements
from mpiscale.kernels.threads import row_kernel

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715
_erfc = np.vectorize(math.erfc, otypes=[float])  # NumPy has none


def gelu_reference(x: Array) -> Array:
    """y = x Phi(x), Phi the normal distribution.  x [...] -> y [...]"""
    return x * _normal_cdf(x)


def gelu_backward_reference(x: Array, dy: Array) -> Array:
    """dx = dy (Phi(x) + x phi(x)), phi the normal density."""
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return dy * (_normal_cdf(x) + x * density)


def gelu_tanh_reference(x: Array) -> Array:
    """y = x (1 + tanh(u)) / 2, u = sqrt(2/pi) (x + 0.044715 x^3).  x -> y [...]"""
    return 0.5 * x * (1 + np.tanh(SQRT_2_OVER_PI * (x + CUBIC * x**3)))


def gelu_tanh_backward_reference(x: Array, dy: Array) -> Array:
    """dx = dy ((1 + t) / 2 + x (1 - t^2) u' / 2), t = tanh(u)."""
    t = np.tanh(SQRT_2_OVER_PI * (x + CUBIC * x**3))
    du = SQRT_2_OVER_PI * (1 + 3 * CUBIC * x * x)
    return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du)


def _normal_cdf(x: Array) -> Array:
    """erfc(-x / sqrt(2)) / 2: no cancellation for x < 0, as in (1 + erf) / 2."""
    return (0.5 * _erfc(-x * math.sqrt(0.5))).astype(x.dtype)


def gelu_numba(x: Array) -> Array:
    """As gelu_reference, without temporaries."""
    y = np.empty_like(x, order="C")
    _gelu_elements(*as_elements(x, y))
    return y


def gelu_backward_numba(x: Array, dy: Array) -> Array:
    """As gelu_backward_reference, with one exponential for Phi and phi."""
    expect_shape("dy", dy, x.shape)
    dx = np.empty_like(x, order="C")
    _gelu_backward_elements(*as_elements(x, dy, dx))
    return dx


def gelu_tanh_numba(x: Array) -> Array:
    """As gelu_tanh_reference, with (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    y = np.empty_like(x, order="C")
    _gelu_tanh_elements(*as_elements(x, y))
    return y


def gelu_tanh_backward_numba(x: Array, dy: Array) -> Array:
    """As gelu_tanh_backward_reference, with (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    expect_shape("dy", dy, x.shape)
    dx = np.empty_like(x, order="C")
    _gelu_tanh_backward_elements(*as_elements(x, dy, dx))
    return dx


@row_kernel
def _gelu_elements(lo: int, hi: int, x: Array, y: Array) -> None:
    x, y = x[lo:hi], y[lo:hi]  # loops from 0 vectorise: no index is negative
    for i in range(x.size):
        cdf, _ = normal_cdf_and_density(x[i])
        y[i] = x[i] * cdf


@row_kernel
def _gelu_backward_elements(lo: int, hi: int, x: Array, dy: Array, dx: Array) -> None:
    x, dy, dx = x[lo:hi], dy[lo:hi], dx[lo:hi]
    for i in range(x.size):
        cdf, density = normal_cdf_and_density(x[i])
        dx[i] = dy[i] * (cdf + x[i] * density)


@row_kernel
def _gelu_tanh_elements(lo: int, hi: int, x: Array, y: Array) -> None:
    x, y = x[lo:hi], y[lo:hi]
    linear = x.dtype.type(2 * SQRT_2_OVER_PI)
    cubic = x.dtype.type(2 * SQRT_2_OVER_PI * CUBIC)
    for i in range(x.size):
        y[i] = x[i] * sigmoid(x[i] * (linear + cubic * x[i] * x[i]))


@row_kernel
def _gelu_tanh_backward_elements(
    lo: int, hi: int, x: Array, dy: Array, dx: Array
) -> None:
    x, dy, dx = x[lo:hi], dy[lo:hi], dx[lo:hi]
    one, three = x.dtype.type(1), x.dtype.type(3)
    linear = x.dtype.type(2 * SQRT_2_OVER_PI)
    cubic = x.dtype.type(2 * SQRT_2_OVER_PI * CUBIC)
    for i in range(x.size):
        square = x[i] * x[i]
        s = sigmoid(x[i] * (linear + cubic * square))
        slope = x[i] * (linear + three * cubic * square)
        dx[i] = dy[i] * s * (one + (one - s) * slope)


gelu = choose(gelu_reference, gelu_numba, like=("x",))
gelu_backward = choose(gelu_backward_reference, gelu_backward_numba, like=("x",))
gelu_tanh = choose(gelu_tanh_reference, gelu_tanh_numba, like=("x",))
gelu_tanh_backward = choose(
    gelu_tanh_backward_reference, gelu_tanh_backward_numba, like=("x",)
)

if __name__ == "__main__":
    from mpiscale.kernels.bench import Case, main

    main(
        Case(gelu_reference, gelu_numba, lambda x: (x,)),
        Case(gelu_backward_reference, gelu_backward_numba, lambda x: (x, x)),
        Case(gelu_tanh_reference, gelu_tanh_numba, lambda x: (x,)),
        Case(gelu_tanh_backward_reference, gelu_tanh_backward_numba, lambda x: (x, x)),
    )
