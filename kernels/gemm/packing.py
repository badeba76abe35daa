"""Packing: a block of a matrix is copied to where, and as, the micro-kernel reads it.

    b [k, n]                        panels, one after the other in memory
    ┌────┬────┬──┐                  ┌────┐ ┌────┐ ┌──┐
    │    │    │  │    ------->      │    │ │    │ │  │    each [k, width]: a row of one
    └────┴────┴──┘                  └────┘ └────┘ └──┘    is one to three vectors

A panel is read from its first element to its last: no cache line, no page and no
prefetch is wasted. Read in place, each row would lie on a page of its own, and rows a
power of two apart would fall into one set of the cache. The last panel is filled up
with zeros, so that the micro-kernel knows no tails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpiscale.backend import Array
from mpiscale.kernels.gemm.register_tile import LANES, TILE_ROWS, VECTORS
from mpiscale.kernels.gemm.vector_ir import (
    INT64,
    Matrix,
    load_vector,
    shuffle,
    store_vector,
)
from mpiscale.kernels.threads import compiled

ZERO = np.float32(0)


@compiled
def panel_width(columns: int) -> int:
    """Width of the first panel of those that hold `columns` columns, as even as may be.

    Four vectors are cut into 2 + 2, not into 3 + 1: one vector a row is too few
    multiply-adds for the loads that they need.
    """
    vectors = (columns + LANES - 1) // LANES
    panels = (vectors + VECTORS - 1) // VECTORS
    return (vectors + panels - 1) // panels * LANES


@compiled
def padded(columns: int) -> int:
    """Columns of whole vectors: how wide `columns` columns are in panels."""
    return (columns + LANES - 1) // LANES * LANES


@compiled
def panel_at(panels: Array, k: int, column: int, width: int) -> Array:
    """The panel [k, width] that begins at `column`, as a view."""
    return panels[k * column : k * (column + width)].reshape(k, width)


@compiled
def pack_panels(b: Array, transposed: bool, panels: Array) -> None:
    """b [k, n] -> panels [k * padded(n)]; one of b's axes has unit stride.

    If `transposed` that is the first axis, else the second.
    """
    k, n = b.shape
    column = 0
    while column < n:
        width = panel_width(n - column)
        panel = panel_at(panels, k, column, width)
        columns = b[:, column : column + width]
        if transposed:
            pack_transposed(columns.T, panel)
        else:
            pack(columns, panel)
        column += width


@compiled
def pack_strips(a: Array, strips: Array) -> None:
    """a [m, k], a transposed view -> strips of TILE_ROWS rows, each [k, TILE_ROWS]."""
    m, k = a.shape
    for row in range(0, m, TILE_ROWS):
        strip = panel_at(strips, k, row, TILE_ROWS)
        pack(a[row : row + TILE_ROWS].T, strip)


@compiled
def pack(x: Array, panel: Array) -> None:
    """panel [k, w] = x [k, n], n <= w, and zeros; rows of x have unit stride."""
    n = x.shape[1]
    if n == panel.shape[1]:
        _copy_rows(x, panel)
        return
    for p in range(panel.shape[0]):
        for j in range(panel.shape[1]):
            panel[p, j] = x[p, j] if j < n else ZERO


@compiled
def pack_transposed(x: Array, panel: Array) -> None:
    """panel [k, w] = x [n, k]^T, n <= w, and zeros; rows of x have unit stride."""
    n, k = x.shape
    whole_n, whole_k = n - n % LANES, k - k % LANES
    for j in range(0, whole_n, LANES):
        for p in range(0, whole_k, LANES):
            _transpose_block(x, j, p, panel)
    for j in range(panel.shape[1]):
        for p in range(whole_k if j < whole_n else 0, k):
            panel[p, j] = x[j, p] if j < n else ZERO


def _generate_copy_rows(typing_context: Any, x: Any, panel: Any) -> Any:
    """panel [k, w] = x [k, w], w a panel's width or TILE_ROWS.

    Numba does not know that rows of x have unit stride, nor how long they are.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = Matrix(context, builder, signature.args[0], args[0])
        target = Matrix(context, builder, signature.args[1], args[1])
        # A set: on some CPUs a strip is as wide as a panel.
        for width in {TILE_ROWS, *(LANES * (v + 1) for v in range(VECTORS))}:
            fits = builder.icmp_signed("==", target.columns, INT64(width))
            with builder.if_then(fits), cgutils.for_range(builder, target.rows) as loop:
                row = load_vector(builder, source.row(loop.index), width)
                store_vector(builder, row, target.row(loop.index))
        return context.get_dummy_value()

    return types.void(x, panel), generate


def _generate_transpose(typing_context: Any, x: Any, i: Any, p: Any, panel: Any) -> Any:
    """panel[p + s, i + r] = x[i + r, p + s] for r, s < LANES, in registers.

    A block [[A, B], [C, D]] transposed is [[A', C'], [B', D']]: swap B and C, then do
    the same within the quarters. Vectors lie in registers as rows, so that all swaps
    of one size are one round: each pair of rows that lie `half` apart exchanges lanes.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = Matrix(context, builder, signature.args[0], args[0])
        target = Matrix(context, builder, signature.args[3], args[3])
        i, p = args[1:3]
        rows = [
            load_vector(builder, source.at(builder.add(i, INT64(r)), p), LANES)
            for r in range(LANES)
        ]
        half = LANES // 2
        while half:
            for r in range(LANES):
                if not r & half:
                    pair = rows[r], rows[r + half]
                    rows[r], rows[r + half] = _exchange(builder, *pair, half)
            half //= 2
        for s, row in enumerate(rows):
            store_vector(builder, row, target.at(builder.add(p, INT64(s)), i))
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, panel), generate


def _exchange(builder: Any, x: Any, y: Any, half: int) -> tuple[Any, Any]:
    """Swap the odd groups of `half` lanes of x with the even ones of y."""
    first = [n if not n & half else LANES + n - half for n in range(LANES)]
    second = [n + half if not n & half else LANES + n for n in range(LANES)]
    return shuffle(builder, x, y, first), shuffle(builder, x, y, second)


_copy_rows: Any = intrinsic(_generate_copy_rows)
_transpose_block: Any = intrinsic(_generate_transpose)
