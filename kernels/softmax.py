"""Softmax and its logarithm over the last axis, forward and backward."""

from __future__ import annotations

import math

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.choose import choose, expect_shape
from mpiscale.kernels.exp import exp, exp_of_nonpositive
from mpiscale.kernels.row_maximum import softmax_shift
from mpiscale.kernels.rows import as_rows
from mpiscale.kernels.threads import row_kernel


def softmax_reference(x: Array) -> Array:
    """s_i = e^(x_i) / sum_j e^(x_j).  x [..., n] -> s [..., n]

    A row that is -inf throughout gives 0 throughout.
    """
    e = np.exp(x - _shift(x))
    total = e.sum(axis=-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total != 0)


def softmax_backward_reference(s: Array, ds: Array) -> Array:
    """dx = s * (ds - sum_j s_j ds_j), since ds_i/dx_j = s_i (1[i = j] - s_j)."""
    return s * (ds - (s * ds).sum(axis=-1, keepdims=True))


def log_softmax_reference(x: Array) -> Array:
    """y_i = x_i - log sum_j e^(x_j).  x [..., n] -> y [..., n]

    A row that is -inf throughout stays so.
    """
    shifted = x - _shift(x)
    total = np.exp(shifted).sum(axis=-1, keepdims=True)
    return shifted - np.log(np.where(total == 0, 1, total))


def log_softmax_backward_reference(y: Array, dy: Array) -> Array:
    """dx = dy - e^y * sum_j dy_j."""
    return dy - np.exp(y) * dy.sum(axis=-1, keepdims=True)


def _shift(x: Array) -> Array:
    """The row's maximum: no overflow; 0 where it is -inf: -inf - (-inf) is NaN."""
    largest = x.max(axis=-1, keepdims=True, initial=-np.inf)
    return np.where(largest == -np.inf, 0, largest)


def softmax_numba(x: Array) -> Array:
    """As softmax_reference; each row stays in the cache between its three passes."""
    s = np.empty_like(x, order="C")
    _softmax_rows(*as_rows(x, s))
    return s


def softmax_backward_numba(s: Array, ds: Array) -> Array:
    """As softmax_backward_reference, without temporaries."""
    expect_shape("ds", ds, s.shape)
    dx = np.empty_like(s, order="C")
    _softmax_backward_rows(*as_rows(s, ds, dx))
    return dx


def log_softmax_numba(x: Array) -> Array:
    """As log_softmax_reference, without temporaries."""
    y = np.empty_like(x, order="C")
    _log_softmax_rows(*as_rows(x, y))
    return y


def log_softmax_backward_numba(y: Array, dy: Array) -> Array:
    """As log_softmax_backward_reference, without temporaries."""
    expect_shape("dy", dy, y.shape)
    dx = np.empty_like(y, order="C")
    _log_softmax_backward_rows(*as_rows(y, dy, dx))
    return dx


@row_kernel
def _softmax_rows(lo: int, hi: int, x: Array, s: Array) -> None:
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for row in range(lo, hi):
        x_row, s_row = x[row], s[row]
        shift = softmax_shift(x_row)
        total = zero
        for j in range(x_row.size):
            e = exp_of_nonpositive(x_row[j] - shift)
            s_row[j] = e
            total += e
        scale = one / total if total != zero else zero
        for j in range(s_row.size):
            s_row[j] *= scale


@row_kernel
def _softmax_backward_rows(lo: int, hi: int, s: Array, ds: Array, dx: Array) -> None:
    for row in range(lo, hi):
        s_row, ds_row, dx_row = s[row], ds[row], dx[row]
        dot = s.dtype.type(0)
        for j in range(s_row.size):
            dot += s_row[j] * ds_row[j]
        for j in range(s_row.size):
            dx_row[j] = s_row[j] * (ds_row[j] - dot)


@row_kernel
def _log_softmax_rows(lo: int, hi: int, x: Array, y: Array) -> None:
    zero = x.dtype.type(0)
    for row in range(lo, hi):
        x_row, y_row = x[row], y[row]
        shift = softmax_shift(x_row)
        total = zero
        for j in range(x_row.size):
            total += exp_of_nonpositive(x_row[j] - shift)
        log_total = math.log(total) if total != zero else zero
        for j in range(x_row.size):
            y_row[j] = x_row[j] - shift - log_total


@row_kernel
def _log_softmax_backward_rows(
    lo: int, hi: int, y: Array, dy: Array, dx: Array
) -> None:
    for row in range(lo, hi):
        y_row, dy_row, dx_row = y[row], dy[row], dx[row]
        total = y.dtype.type(0)
        for j in range(y_row.size):
            total += dy_row[j]
        for j in range(y_row.size):
            dx_row[j] = dy_row[j] - exp(y_row[j]) * total


softmax = choose(softmax_reference, softmax_numba, like=("x",))
softmax_backward = choose(
    softmax_backward_reference, softmax_backward_numba, like=("s",)
)
log_softmax = choose(log_softmax_reference, log_softmax_numba, like=("x",))
log_softmax_backward = choose(
    log_softmax_backward_reference, log_softmax_backward_numba, like=("y",)
)

if __name__ == "__main__":
    from mpiscale.kernels.bench import Case, main

    main(
        Case(softmax_reference, softmax_numba, lambda x: (x,)),
        Case(softmax_backward_reference, softmax_backward_numba, lambda x: (x, x)),
        Case(log_softmax_reference, log_softmax_numba, lambda x: (x,)),
        Case(
            log_softmax_backward_reference,
            log_softmax_backward_numba,
            lambda x: (x, x),
        ),
    )
