"""Dropout whose mask is a function of (key, global index of the element)."""

from __future__ import annotations

from mpiscale.backend import Array
from mpiscale.kernels import dropout as kernels
from mpiscale.tensor import Tensor


def dropout(
    x: Tensor, p: float, key: int, row_offset: Array, column_offset: Array
) -> Tensor:
    """y = x keep / (1 - p), keep with probability 1 - p (Srivastava et al. 2014).

    Element (r, j) of the rows x columns of `x` [..., n] stands at index
    row_offset[r] + column_offset[j] of the global activation, whose random number it
    takes: a rank that holds a part gets that part of the one global mask, and a second
    run of the forward pass gets the same mask again.

    Args:
        x: [..., n]; the leading axes are the rows.
        p: probability of dropping an element, in [0, 1).
        key: 64 bits, different for each layer and step (`rng.stream_key`).
        row_offset: [rows] int64, in elements of the global activation.
        column_offset: [n] int64, likewise.
    """
    shape = x.shape

    def masked(data: Array) -> Array:
        rows = data.reshape(-1, shape[-1])
        return kernels.dropout(rows, p, key, row_offset, column_offset).reshape(shape)

    def backward(grad: Array) -> tuple[Array]:
        return (masked(grad),)  # linear in x: the mask is drawn again, not stored

    return Tensor.from_op(masked(x.data), (x,), backward)
