"""Layer normalisation and RMS normalisation over the last axis.

The references sum in float64. The compiled kernels sum in the type of x, which halves
the time, and still get a float32 row right whose mean is large next to its spread: the
row's sum gives a first mean, off by rounding only, and the distances d from it

    mean = first + sum(d) / n,  variance = sum(d^2) / n - (sum(d) / n)^2,

the corrected two-pass algorithm of Chan et al. Here the difference cancels little, for
sum(d) is a rounding error; E[x^2] - E[x]^2 would (microsoft/onnxruntime #28463). The
mean is kept in float64. Squares of float32 elements beyond about 1e18 overflow.

Sources: J. Ba et al., "Layer normalization", 2016; B. Zhang, R. Sennrich, "Root mean
square layer normalization", NeurIPS 2019; T. Chan, G. Golub, R. LeVeque, "Algorithms
for computing the sample variance", The American Statistician 37(3), 1983, eq. 1.7.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpiscale.backend import FLOAT64, Array
from mpiscale.kernels.choose import choose, expect_shape
from mpiscale.kernels.rows import as_rows
from mpiscale.kernels.threads import compiled, row_kernel

# The gradients of gain and bias are sums over all rows. Each block of rows has its own
# partial sums, so that blocks run in parallel and the thread count changes no result.
ROWS_PER_BLOCK = 64


def layer_norm_reference(
    x: Array, gain: Array, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """y = gain (x - mean) rstd + bias, rstd = 1 / sqrt(variance + eps).

    x [..., n], gain [n], bias [n] or None (0) -> y [..., n], mean [...], rstd [...]
    """
    mean = x.mean(axis=-1, dtype=FLOAT64)
    centred = x - mean[..., None]
    rstd = 1 / np.sqrt((centred * centred).mean(axis=-1) + eps)
    y = gain * (centred * rstd[..., None])
    return (y if bias is None else y + bias).astype(x.dtype), mean, rstd


def layer_norm_backward_reference(
    dy: Array, x: Array, gain: Array, mean: Array, rstd: Array
) -> tuple[Array, Array, Array]:
    """dx = rstd (g - mean(g) - z mean(g z)), g = gain dy, z = (x - mean) rstd.

    dgain = sum over rows of dy z; dbias = sum over rows of dy.
    dy, x [..., n], gain [n], mean, rstd [...] -> dx [..., n], dgain [n], dbias [n]
    """
    z = (x - mean[..., None]) * rstd[..., None]
    g = gain * dy
    mean_g = g.mean(axis=-1, keepdims=True, dtype=FLOAT64)
    mean_gz = (g * z).mean(axis=-1, keepdims=True, dtype=FLOAT64)
    dx = rstd[..., None] * (g - mean_g - z * mean_gz)
    dbias = _sum_over_rows(dy).astype(gain.dtype)
    return dx.astype(x.dtype), _sum_over_rows(dy * z).astype(gain.dtype), dbias


def rms_norm_reference(x: Array, gain: Array, eps: float) -> tuple[Array, Array]:
    """y = gain x rstd, rstd = 1 / sqrt(mean(x^2) + eps).

    x [..., n], gain [n] -> y [..., n], rstd [...]
    """
    wide = x.astype(FLOAT64)
    rstd = 1 / np.sqrt((wide * wide).mean(axis=-1) + eps)
    return (gain * (wide * rstd[..., None])).astype(x.dtype), rstd


def rms_norm_backward_reference(
    dy: Array, x: Array, gain: Array, rstd: Array
) -> tuple[Array, Array]:
    """dx = rstd (g - z mean(g z)), g = gain dy, z = x rstd; dgain = sum of dy z.

    dy, x [..., n], gain [n], rstd [...] -> dx [..., n], dgain [n]
    """
    z = x * rstd[..., None]
    g = gain * dy
    mean_gz = (g * z).mean(axis=-1, keepdims=True, dtype=FLOAT64)
    dx = rstd[..., None] * (g - z * mean_gz)
    return dx.astype(x.dtype), _sum_over_rows(dy * z).astype(gain.dtype)


def _sum_over_rows(x: Array) -> Array:
    return x.sum(axis=tuple(range(x.ndim - 1)), dtype=FLOAT64)


def layer_norm_numba(
    x: Array, gain: Array, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """As layer_norm_reference; each row stays in the cache between its three passes."""
    n = x.shape[-1]
    bias = np.zeros_like(gain) if bias is None else bias
    expect_shape("gain", gain, (n,))
    expect_shape("bias", bias, (n,))
    y = np.empty_like(x, order="C")
    mean, rstd = np.empty((2, *x.shape[:-1]))
    rows, x, y_rows = as_rows(x, y)
    _layer_norm_rows(
        rows, x, gain, bias, float(eps), y_rows, mean.reshape(-1), rstd.reshape(-1)
    )
    return y, mean, rstd


def layer_norm_backward_numba(
    dy: Array, x: Array, gain: Array, mean: Array, rstd: Array
) -> tuple[Array, Array, Array]:
    """As layer_norm_backward_reference; sums over rows block by block."""
    _expect_backward_shapes(dy, x, gain, mean, rstd)
    dx = np.empty_like(x, order="C")
    rows, dy, x, dx_rows = as_rows(dy, x, dx)
    blocks = -(-rows // ROWS_PER_BLOCK)
    dgain, dbias = np.zeros((2, blocks, gain.size), gain.dtype)
    statistics = _flat(mean), _flat(rstd)
    _layer_norm_backward_blocks(blocks, dy, x, gain, *statistics, dx_rows, dgain, dbias)
    return dx, dgain.sum(axis=0), dbias.sum(axis=0)


def rms_norm_numba(x: Array, gain: Array, eps: float) -> tuple[Array, Array]:
    """As rms_norm_reference; each row stays in the cache between its two passes."""
    expect_shape("gain", gain, x.shape[-1:])
    y = np.empty_like(x, order="C")
    rstd = np.empty(x.shape[:-1])
    rows, x, y_rows = as_rows(x, y)
    _rms_norm_rows(rows, x, gain, float(eps), y_rows, rstd.reshape(-1))
    return y, rstd


def rms_norm_backward_numba(
    dy: Array, x: Array, gain: Array, rstd: Array
) -> tuple[Array, Array]:
    """As rms_norm_backward_reference; sums over rows block by block."""
    _expect_backward_shapes(dy, x, gain, rstd)
    dx = np.empty_like(x, order="C")
    rows, dy, x, dx_rows = as_rows(dy, x, dx)
    blocks = -(-rows // ROWS_PER_BLOCK)
    dgain = np.zeros((blocks, gain.size), gain.dtype)
    _rms_norm_backward_blocks(blocks, dy, x, gain, _flat(rstd), dx_rows, dgain)
    return dx, dgain.sum(axis=0)


def _expect_backward_shapes(
    dy: Array, x: Array, gain: Array, *statistics: Array
) -> None:
    expect_shape("dy", dy, x.shape)
    expect_shape("gain", gain, x.shape[-1:])
    for statistic in statistics:
        expect_shape("mean or rstd", statistic, x.shape[:-1])


def _flat(statistic: Array) -> Array:
    return np.ascontiguousarray(statistic, FLOAT64).reshape(-1)


@compiled
def _in_two_parts(mean: float, rstd: float, x: Array) -> tuple[Any, Any, Any]:
    """(x - mean) rstd as (x - centre) scale + shift, these three in the type of x.

    centre is the mean, rounded; the shift makes up for what rounding took away. Two
    subtractions instead would be free to become one, of the rounded sum.
    """
    centre, scale = x.dtype.type(mean), x.dtype.type(rstd)
    return centre, scale, x.dtype.type((centre - mean) * rstd)


@row_kernel
def _layer_norm_rows(
    lo: int,
    hi: int,
    x: Array,
    gain: Array,
    bias: Array,
    eps: float,
    y: Array,
    mean: Array,
    rstd: Array,
) -> None:
    zero = x.dtype.type(0)
    n = x.shape[1]
    for row in range(lo, hi):
        x_row, y_row = x[row], y[row]
        total = zero
        for j in range(n):
            total += x_row[j]
        first = x.dtype.type(total / n)
        distances = squares = zero
        for j in range(n):
            d = x_row[j] - first
            distances += d
            squares += d * d
        correction = distances / n
        mean[row] = first + correction
        variance = squares / n - correction * correction
        rstd[row] = 1.0 / math.sqrt(max(variance, 0.0) + eps)
        centre, scale, shift = _in_two_parts(mean[row], rstd[row], x)
        for j in range(n):
            z = (x_row[j] - centre) * scale + shift
            y_row[j] = z * gain[j] + bias[j]


@row_kernel
def _layer_norm_backward_blocks(
    lo: int,
    hi: int,
    dy: Array,
    x: Array,
    gain: Array,
    mean: Array,
    rstd: Array,
    dx: Array,
    dgain: Array,
    dbias: Array,
) -> None:
    zero = x.dtype.type(0)
    rows, n = x.shape
    for block in range(lo, hi):
        dgain_row, dbias_row = dgain[block], dbias[block]
        first = block * ROWS_PER_BLOCK
        for row in range(first, min(first + ROWS_PER_BLOCK, rows)):
            x_row, dy_row, dx_row = x[row], dy[row], dx[row]
            centre, scale, shift = _in_two_parts(mean[row], rstd[row], x)
            sum_g = sum_gz = zero
            for j in range(n):
                g = dy_row[j] * gain[j]
                sum_g += g
                sum_gz += g * ((x_row[j] - centre) * scale + shift)
            # / n gives float64: a division in the type of x would move into the loop.
            mean_g = x.dtype.type(sum_g / n)
            mean_gz = x.dtype.type(sum_gz / n)
            for j in range(n):
                z = (x_row[j] - centre) * scale + shift
                dx_row[j] = scale * (dy_row[j] * gain[j] - mean_g - z * mean_gz)
            for j in range(n):
                z = (x_row[j] - centre) * scale + shift
                dgain_row[j] += dy_row[j] * z
                dbias_row[j] += dy_row[j]


@row_kernel
def _rms_norm_rows(
    lo: int, hi: int, x: Array, gain: Array, eps: float, y: Array, rstd: Array
) -> None:
    zero, n = x.dtype.type(0), x.shape[1]
    for row in range(lo, hi):
        x_row, y_row = x[row], y[row]
        squares = zero
        for j in range(n):
            squares += x_row[j] * x_row[j]
        rstd[row] = 1.0 / math.sqrt(squares / n + eps)
        scale = x.dtype.type(rstd[row])
        for j in range(n):
            y_row[j] = x_row[j] * scale * gain[j]


@row_kernel
def _rms_norm_backward_blocks(
    lo: int,
    hi: int,
    dy: Array,
    x: Array,
    gain: Array,
    rstd: Array,
    dx: Array,
    dgain: Array,
) -> None:
    zero = x.dtype.type(0)
    rows, n = x.shape
    for block in range(lo, hi):
        dgain_row = dgain[block]
        first = block * ROWS_PER_BLOCK
        for row in range(first, min(first + ROWS_PER_BLOCK, rows)):
            x_row, dy_row, dx_row = x[row], dy[row], dx[row]
            scale = x.dtype.type(rstd[row])
            sum_gz = zero
            for j in range(n):
                sum_gz += dy_row[j] * gain[j] * (x_row[j] * scale)
            mean_gz = x.dtype.type(sum_gz / n)
            for j in range(n):
                z = x_row[j] * scale
                dx_row[j] = scale * (dy_row[j] * gain[j] - z * mean_gz)
            for j in range(n):
                dgain_row[j] += dy_row[j] * (x_row[j] * scale)


layer_norm = choose(layer_norm_reference, layer_norm_numba, like=("x", None, None))
layer_norm_backward = choose(
    layer_norm_backward_reference,
    layer_norm_backward_numba,
    like=("x", "gain", "gain"),
    statistics=("mean", "rstd"),
)
rms_norm = choose(rms_norm_reference, rms_norm_numba, like=("x", None))
rms_norm_backward = choose(
    rms_norm_backward_reference,
    rms_norm_backward_numba,
    like=("x", "gain"),
    statistics=("rstd",),
)

if __name__ == "__main__":
    from mpiscale.kernels.bench import Case, main

    def forward(x: Array) -> tuple[Array, Array, Array, float]:
        """Arguments of layer_norm."""
        return x, x[0], x[0], 1e-5

    main(
        Case(layer_norm_reference, layer_norm_numba, forward),
        Case(
            layer_norm_backward_reference,
            layer_norm_backward_numba,
            lambda x: (x, x, x[0], *layer_norm_reference(*forward(x))[1:]),
        ),
        Case(rms_norm_reference, rms_norm_numba, lambda x: (x, x[0], 1e-5)),
        Case(
            rms_norm_backward_reference,
            rms_norm_backward_numba,
            lambda x: (x, x, x[0], rms_norm_reference(x, x[0], 1e-5)[1]),
        ),
    )
