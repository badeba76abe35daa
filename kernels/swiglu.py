"""SwiGLU: the gate's SiLU times the up projection, forward and backward.

Source: N. Shazeer, "GLU variants improve Transformer", 2020.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.choose import choose, expect_shape
from mpiscale.kernels.exp import sigmoid
from mpiscale.kernels.rows import as_rows
from mpiscale.kernels.threads import row_kernel


def swiglu_reference(gate_up: Array) -> Array:
    """y = gate sigmoid(gate) up.  gate_up [..., 2h], gate first -> y [..., h]"""
    gate, up = _halves(gate_up)
    return gate * _sigmoid(gate) * up


def swiglu_backward_reference(gate_up: Array, dy: Array) -> Array:
    """dgate = dy up s (1 + gate (1 - s)), dup = dy gate s, s = sigmoid(gate).

    gate_up [..., 2h], dy [..., h] -> dgate_up [..., 2h]
    """
    gate, up = _halves(gate_up)
    s = _sigmoid(gate)
    dgate = dy * up * s * (1 + gate * (1 - s))
    return np.concatenate([dgate, dy * gate * s], axis=-1)


def _sigmoid(x: Array) -> Array:
    """(1 + tanh(x / 2)) / 2 = 1 / (1 + e^-x), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def _halves(gate_up: Array) -> tuple[Array, Array]:
    hidden = _hidden(gate_up)
    return gate_up[..., :hidden], gate_up[..., hidden:]


def _hidden(gate_up: Array) -> int:
    width = gate_up.shape[-1]
    if width % 2:
        raise ValueError(
            f"gate_up has width {width}, expected an even one: gate and up must be "
            "of equal width"
        )
    return width // 2


def swiglu_numba(gate_up: Array) -> Array:
    """As swiglu_reference, without temporaries."""
    y = np.empty((*gate_up.shape[:-1], _hidden(gate_up)), gate_up.dtype)
    _swiglu_rows(*as_rows(gate_up, y))
    return y


def swiglu_backward_numba(gate_up: Array, dy: Array) -> Array:
    """As swiglu_backward_reference, without temporaries."""
    expect_shape("dy", dy, (*gate_up.shape[:-1], _hidden(gate_up)))
    dgate_up = np.empty_like(gate_up, order="C")
    _swiglu_backward_rows(*as_rows(gate_up, dy, dgate_up))
    return dgate_up


@row_kernel
def _swiglu_rows(lo: int, hi: int, gate_up: Array, y: Array) -> None:
    hidden = y.shape[1]
    for row in range(lo, hi):
        gate, up, y_row = gate_up[row, :hidden], gate_up[row, hidden:], y[row]
        for j in range(hidden):
            y_row[j] = gate[j] * sigmoid(gate[j]) * up[j]


@row_kernel
def _swiglu_backward_rows(
    lo: int, hi: int, gate_up: Array, dy: Array, dgate_up: Array
) -> None:
    hidden = dy.shape[1]
    one = dy.dtype.type(1)
    for row in range(lo, hi):
        gate, up, dy_row = gate_up[row, :hidden], gate_up[row, hidden:], dy[row]
        dgate, dup = dgate_up[row, :hidden], dgate_up[row, hidden:]
        for j in range(hidden):
            s = sigmoid(gate[j])
            dgate[j] = dy_row[j] * up[j] * s * (one + gate[j] * (one - s))
            dup[j] = dy_row[j] * gate[j] * s


swiglu = choose(swiglu_reference, swiglu_numba, like=("gate_up",))
swiglu_backward = choose(
    swiglu_backward_reference, swiglu_backward_numba, like=("gate_up",)
)

if __name__ == "__main__":
    from mpiscale.kernels.bench import Case, main

    main(
        Case(swiglu_reference, swiglu_numba, lambda x: (x,)),
        Case(
            swiglu_backward_reference,
            swiglu_backward_numba,
            lambda x: (x, swiglu_reference(x)),
        ),
    )
