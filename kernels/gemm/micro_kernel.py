"""The micro-kernel: a tile of C stays in registers while k runs.

                 b [k, w]
                ┌─────────┐
              p │ ─────── │ one row: `vectors` registers
                │         │
                └─────────┘            for p in range(k):
    a [r, k]     c [r, w]                  for i in range(r):
    ┌────────┐  ┌─────────┐                    c[i, :] += a[i, p] * b[p, :]
    │  ┊     │  │ r x vectors
    │  ┊     │  │  accumu-│
    │  ┊     │  │  lators │
    └────────┘  └─────────┘
       p

No compiler can be relied on to keep 24 vectors in registers throughout a loop, so this
one is not left to Numba: an intrinsic writes its LLVM IR, for any `Tile`. LLVM still
allocates the registers and orders the instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpiscale.backend import Array
from mpiscale.kernels.gemm.register_tile import (
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    VECTORS,
    Tile,
)
from mpiscale.kernels.gemm.vector_ir import (
    INT64,
    Matrix,
    broadcast_load,
    load_vector,
    minimum,
    multiply_add,
    prefetch_for_write,
    store_vector,
    vector_type,
)
from mpiscale.kernels.threads import compiled


@compiled
def multiply_tile(a: Array, b: Array, c: Array, accumulate: bool) -> None:
    """c = a b, or c += a b.  a [r, k], b [k, w], c [r, n], r <= TILE_ROWS, n <= w

    w is 1 to VECTORS times LANES; b and c have unit stride along their rows.
    Where c is not a whole tile, the tile is computed apart, and what c needs is copied.
    """
    rows, columns = c.shape
    if rows == TILE_ROWS and columns == b.shape[1]:
        _micro_kernel(a, b, c, accumulate)
    else:
        _multiply_edge(a, b, c, accumulate)


@compiled
def _multiply_edge(a: Array, b: Array, c: Array, accumulate: bool) -> None:
    tile = np.empty((TILE_ROWS, TILE_COLUMNS), c.dtype)
    _micro_kernel(a, b, tile, False)
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            c[i, j] = c[i, j] + tile[i, j] if accumulate else tile[i, j]


def _generate_micro_kernel(
    typing_context: Any, a: Any, b: Any, c: Any, accumulate: Any
) -> Any:
    """As multiply_tile, but for c [TILE_ROWS, w].

    If r < TILE_ROWS, the last row of a is read again in place of the missing ones, and
    what is computed from it has no meaning.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, c = (
            Matrix(context, builder, kind, value)
            for kind, value in zip(signature.args[:3], args[:3], strict=True)
        )
        for vectors in range(1, VECTORS + 1):
            tile = Tile(TILE_ROWS, vectors, LANES)
            fits = builder.icmp_signed("==", b.columns, INT64(tile.columns))
            with builder.if_then(fits):
                _emit_prefetches(builder, tile, c)
                slots = _emit_products(builder, tile, a, b)
                _emit_stores(builder, slots, c, args[3])
        return context.get_dummy_value()

    return types.void(a, b, c, types.boolean), generate


_micro_kernel: Any = intrinsic(_generate_micro_kernel)


def _emit_prefetches(builder: Any, tile: Tile, c: Matrix) -> None:
    """Ask for c's cache lines now: they arrive while the k loop runs."""
    for i in range(tile.rows):
        for j in range(tile.vectors):
            first = INT64(tile.lanes * j)
            prefetch_for_write(builder, c.at(INT64(i), first))


def _emit_products(builder: Any, tile: Tile, a: Matrix, b: Matrix) -> list[list[Any]]:
    """The k loop -> the slots of the accumulators [rows][vectors].

    A slot is memory on the stack. LLVM turns slots that are loaded and stored only into
    registers, which spares us the bookkeeping of values that change in a loop.
    """
    zero = vector_type(tile.lanes)([0.0] * tile.lanes)
    slots = [
        [cgutils.alloca_once_value(builder, zero) for _ in range(tile.vectors)]
        for _ in range(tile.rows)
    ]
    last = builder.sub(a.rows, INT64(1))
    a_rows = [a.row(minimum(builder, INT64(i), last)) for i in range(tile.rows)]
    with cgutils.for_range(builder, a.columns) as loop:
        b_row = b.row(loop.index)
        b_vectors = [
            load_vector(builder, b_row, tile.lanes, j) for j in range(tile.vectors)
        ]
        offset = builder.mul(loop.index, a.column_stride)
        for a_row, slot_row in zip(a_rows, slots, strict=True):
            element = builder.gep(a_row, [offset], inbounds=True)
            scale = broadcast_load(builder, element, tile.lanes)
            for slot, b_vector in zip(slot_row, b_vectors, strict=True):
                total = multiply_add(builder, scale, b_vector, builder.load(slot))
                builder.store(total, slot)
    return slots


def _emit_stores(
    builder: Any, slots: list[list[Any]], c: Matrix, accumulate: Any
) -> None:
    """Write the accumulators to c, or add them to it."""
    with builder.if_else(accumulate) as (add, overwrite):
        for branch, adds in ((add, True), (overwrite, False)):
            with branch:
                for i, slot_row in enumerate(slots):
                    c_row = c.row(INT64(i))
                    for j, slot in enumerate(slot_row):
                        total = builder.load(slot)
                        if adds:
                            old = load_vector(builder, c_row, total.type.count, j)
                            total = builder.fadd(total, old)
                        store_vector(builder, total, c_row, j)
