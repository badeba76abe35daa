"""The matrix products of the attention kernels, on blocks that lie in the cache.

With `shift`, row i of a block of scores counts up to column i + shift: a causal mask
leaves less than the whole of those blocks that its diagonal crosses. float32 runs on
the micro-kernel and computes strips of rows only as far as the last of them counts;
float64, in which results are compared, has plain loops over the whole block.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import overload

from mpiscale.backend import Array
from mpiscale.kernels.gemm.micro_kernel import multiply_tile
from mpiscale.kernels.gemm.packing import pack_transposed, padded, panel_width
from mpiscale.kernels.gemm.register_tile import TILE_ROWS
from mpiscale.kernels.gemm.views import block
from mpiscale.kernels.threads import compiled

UNROLL = 8  # rows of b taken at once; their number is written out below


@compiled
def add_product(a: Array, b: Array, c: Array) -> None:
    """c += a b.  a [m, k] of any strides, b [k, n], c [m, n], both C-contiguous.

    The innermost loop runs over contiguous columns. Eight rows of b at once make it one
    load and one store of c for eight multiply-adds: 60-70 GFLOP/s in float32 on a core
    whose peak is 112. More rows would need more checks that c overlaps none of them
    than LLVM is willing to make, and the loop would not be vectorised.
    """
    m, k = a.shape
    whole = k - k % UNROLL
    for s in range(0, whole, UNROLL):
        b0, b1, b2, b3 = b[s], b[s + 1], b[s + 2], b[s + 3]
        b4, b5, b6, b7 = b[s + 4], b[s + 5], b[s + 6], b[s + 7]
        for i in range(m):
            c_row = c[i]
            a0, a1, a2, a3 = a[i, s], a[i, s + 1], a[i, s + 2], a[i, s + 3]
            a4, a5, a6, a7 = a[i, s + 4], a[i, s + 5], a[i, s + 6], a[i, s + 7]
            for j in range(c_row.size):
                low = a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j]
                high = a4 * b4[j] + a5 * b5[j] + a6 * b6[j] + a7 * b7[j]
                c_row[j] += low + high
    for s in range(whole, k):
        b_row = b[s]
        for i in range(m):
            c_row, a_element = c[i], a[i, s]
            for j in range(c_row.size):
                c_row[j] += a_element * b_row[j]


def write_scores(queries: Array, keys_t: Array, scores: Array, shift: int) -> None:
    """scores [m, n] = queries [m, >= d] keys_t [d, n], as far as they count."""
    scores[:] = 0
    add_product(queries[:, : keys_t.shape[0]], keys_t, scores)


def _write_scores_float32(queries: Any, keys_t: Any, scores: Any, shift: Any) -> None:
    m, n = scores.shape
    for i in range(0, m, TILE_ROWS):
        seen = min(n, padded(max(0, i + TILE_ROWS + shift)))
        rows = min(TILE_ROWS, m - i)
        strip = block(queries, i, rows, 0, keys_t.shape[0])
        multiply_strip(strip, keys_t, block(scores, i, rows, 0, seen), False)


def add_weighted(p: Array, values: Array, out: Array, shift: int) -> None:
    """out [m, e] += p [m, n] values [n, e]; p is 0 where it does not count."""
    add_product(p, values, out)


def _add_weighted_float32(p: Any, values: Any, out: Any, shift: Any) -> None:
    m, n = p.shape
    for i in range(0, m, TILE_ROWS):
        seen = min(n, max(0, i + TILE_ROWS + shift))
        rows = min(TILE_ROWS, m - i)
        strip = block(p, i, rows, 0, seen)
        multiply_strip(strip, values, block(out, i, rows, 0, out.shape[1]), True)


def add_transposed(p: Array, x: Array, out: Array, shift: int) -> None:
    """out [n, e] += p [m, n]^T x [m, e]; p is 0 where it does not count."""
    add_product(p.T, x, out)


def _add_transposed_float32(p: Any, x: Any, out: Any, shift: Any) -> None:
    m, n = p.shape
    for j in range(0, n, TILE_ROWS):
        first = max(0, j - shift)  # the first row that sees column j
        if first < m:
            columns = min(TILE_ROWS, n - j)
            strip = block(p, first, m - first, j, columns).T
            rows = block(x, first, m - first, 0, x.shape[1])
            multiply_strip(strip, rows, block(out, j, columns, 0, out.shape[1]), True)


def write_transposed(x: Array, out: Array) -> None:
    """out [d, m] = x [n, d]^T, n <= m, and zeros; rows of x have unit stride."""
    out[:] = 0
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            out[c, i] = x[i, c]


def _write_transposed_float32(x: Any, out: Any) -> None:
    pack_transposed(x, out)


@compiled
def multiply_strip(a: Array, b: Array, c: Array, accumulate: bool) -> None:
    """c = a b, or c += a b.  a [r, k], b [>= k, n], c [r, n], r <= TILE_ROWS.

    The rows of b and c have unit stride, and b can be read up to whole vectors.
    """
    (rows, k), n = a.shape, c.shape[1]
    column = 0
    while column < n:
        width = panel_width(n - column)
        multiply_tile(
            a,
            block(b, 0, k, column, width),
            block(c, 0, rows, column, min(width, n - column)),
            accumulate,
        )
        column += width


@overload(write_scores, strict=False)
def _choose_write_scores(queries: Any, keys_t: Any, scores: Any, shift: Any) -> Any:
    return _write_scores_float32 if scores.dtype == types.float32 else write_scores


@overload(add_weighted, strict=False)
def _choose_add_weighted(p: Any, values: Any, out: Any, shift: Any) -> Any:
    return _add_weighted_float32 if out.dtype == types.float32 else add_weighted


@overload(add_transposed, strict=False)
def _choose_add_transposed(p: Any, x: Any, out: Any, shift: Any) -> Any:
    return _add_transposed_float32 if out.dtype == types.float32 else add_transposed


@overload(write_transposed, strict=False)
def _choose_write_transposed(x: Any, out: Any) -> Any:
    return _write_transposed_float32 if x.dtype == types.float32 else write_transposed
