"""A float32 matrix product of our own; the package's docstring has the picture."""

from __future__ import annotations

import threading

import numba
import numpy as np
from numba import types

from mpiscale.backend import FLOAT32, Array
from mpiscale.kernels.gemm.micro_kernel import multiply_tile
from mpiscale.kernels.gemm.packing import (
    pack_panels,
    pack_strips,
    panel_at,
    panel_width,
)
from mpiscale.kernels.gemm.register_tile import LANES, TILE_COLUMNS, TILE_ROWS
from mpiscale.kernels.gemm.views import block, unit_stride_row
from mpiscale.kernels.threads import compiled, row_kernel

# A strip of A [TILE_ROWS, DEPTH] is read once for each panel of B and is to stay in L1:
# 12 of 32 KB. A block of B [DEPTH, WIDTH] is read once for each strip of A: half of L2
# (1 MB where there is AVX-512, else 256 KB), whose other half is for what passes
# through. DEPTH multiply-adds pay for a load and a store of C. Packed strips of A^T
# [HEIGHT, DEPTH] are read once for each block of B, from L3: 1.2 MB.
DEPTH = 384
WIDTH = (336 if LANES == 16 else 80) // TILE_COLUMNS * TILE_COLUMNS
HEIGHT = 768 // TILE_ROWS * TILE_ROWS

MULTIPLY_ADDS_PER_THREAD = 2**21  # 40 us: fewer cost less than waking a thread
ALIGNMENT = 64  # bytes: a vector that lies across two cache lines takes two loads


def gemm(
    a: Array,
    b: Array,
    out: Array,
    accumulate: bool = False,
    bias: Array | None = None,
) -> None:
    """out = a b, out = a b + bias, or out += a b, in float32.

    a [m, k], b [k, n], out [m, n], bias [n]
    Each of a and b has unit stride on one of its axes, out on its last one. An element
    of out is summed up in the order of k, in runs of DEPTH; so it does not depend on
    the number of threads, on the strides, or on the other rows and columns.

    Raises:
        TypeError: if an array is not of float32.
        ValueError: if shapes or strides do not fit.
    """
    _check(a, b, out)
    m, n = out.shape
    first_row = _NO_BIAS if bias is None else np.ascontiguousarray(bias)
    if first_row.shape not in ((n,), (0,)) or (accumulate and bias is not None):
        raise ValueError(
            f"bias has shape {first_row.shape}, expected ({n},), and none if the "
            "product is added to out"
        )
    if not out.size:
        return
    parts = _parts(m * n * a.shape[1])
    a_transposed, b_transposed = not has_unit_rows(a), not has_unit_rows(b)
    _multiply_parts.run(
        parts,
        parts,
        parts,
        a,
        a_transposed,
        b,
        b_transposed,
        out,
        accumulate,
        first_row,
        _scratch.of(parts),
    )


_NO_BIAS = np.empty(0, FLOAT32)


class _Scratch(threading.local):
    """Memory for packed blocks, kept between calls: new pages would cost more.

    Each Python thread has its own, with a part for each thread that works for it. What
    is in it has no meaning from one call to the next.
    """

    PART = HEIGHT * DEPTH + DEPTH * WIDTH  # floats

    def __init__(self) -> None:
        self._floats = np.empty((0, self.PART), FLOAT32)

    def of(self, parts: int) -> Array:
        """[at least `parts`, PART], aligned."""
        if len(self._floats) < parts:
            spare = ALIGNMENT // FLOAT32.itemsize
            floats = np.empty(parts * self.PART + spare, FLOAT32)
            first = -floats.ctypes.data % ALIGNMENT // FLOAT32.itemsize
            floats = floats[first : first + parts * self.PART]
            self._floats = floats.reshape(parts, self.PART)
        return self._floats


_scratch = _Scratch()


def _parts(multiply_adds: int) -> int:
    wanted = multiply_adds // MULTIPLY_ADDS_PER_THREAD
    return min(wanted, numba.get_num_threads()) if wanted > 1 else 1


# Arrays of any strides: one variant for all layouts.
_INPUT = types.Array(types.float32, 2, "A", readonly=True)
_OUTPUT = types.Array(types.float32, 2, "A")
_SCRATCH = types.Array(types.float32, 2, "C")
_FLAG = types.boolean
_BIAS = types.Array(types.float32, 1, "C", readonly=True)
_SIGNATURE = (
    *(types.intp, _INPUT, _FLAG, _INPUT, _FLAG, _OUTPUT, _FLAG),
    *(_BIAS, _SCRATCH),
)


def _multiply_part_range(
    lo: int,
    hi: int,
    parts: int,
    a: Array,
    a_transposed: bool,
    b: Array,
    b_transposed: bool,
    out: Array,
    accumulate: bool,
    bias: Array,
    scratch: Array,
) -> None:
    """Parts [lo, hi) of `parts`: of the rows of out or, if there are more, columns."""
    m, n = out.shape
    for part in range(lo, hi):
        room = scratch[part]
        if m >= n:
            i, j = _share(m, TILE_ROWS, part, parts)
            _multiply(
                a[i:j],
                a_transposed,
                b,
                b_transposed,
                out[i:j],
                accumulate,
                bias,
                room,
            )
        else:
            i, j = _share(n, TILE_COLUMNS, part, parts)
            _multiply(
                a,
                a_transposed,
                b[:, i:j],
                b_transposed,
                out[:, i:j],
                accumulate,
                bias[i:j],
                room,
            )


_multiply_parts = row_kernel(_multiply_part_range, _SIGNATURE)


@compiled
def _share(length: int, unit: int, part: int, parts: int) -> tuple[int, int]:
    """Where a part begins and ends, if whole units are shared out evenly."""
    units = (length + unit - 1) // unit
    first, last = units * part // parts, units * (part + 1) // parts
    return first * unit, min(last * unit, length)


@compiled
def _multiply(
    a: Array,
    a_transposed: bool,
    b: Array,
    b_transposed: bool,
    out: Array,
    accumulate: bool,
    bias: Array,
    scratch: Array,
) -> None:
    """The three outer loops: over blocks of rows, of k, and of columns."""
    m, n = out.shape
    k = a.shape[1]
    strips, panels = scratch[: HEIGHT * DEPTH], scratch[HEIGHT * DEPTH :]
    height = _block(m, HEIGHT, TILE_ROWS) if a_transposed else m
    depth, width = _block(k, DEPTH, 1), _block(n, WIDTH, LANES)
    for i in range(0, m, height):
        for p in range(0, k, depth):
            a_block = a[i : i + height, p : p + depth]
            if a_transposed:
                pack_strips(a_block, strips)
            for j in range(0, n, width):
                pack_panels(b[p : p + depth, j : j + width], b_transposed, panels)
                _multiply_block(
                    a_block,
                    a_transposed,
                    strips,
                    panels,
                    out[i : i + height, j : j + width],
                    accumulate or p > 0,
                    bias[j : j + width] if p == 0 else bias[:0],
                )
    if k == 0 and not accumulate:
        out[:] = np.float32(0)
        if bias.size:
            out[:] = bias


@compiled
def _block(length: int, most: int, unit: int) -> int:
    """Size of blocks of at most `most`, in whole units, that cut length evenly."""
    blocks = max(1, (length + most - 1) // most)
    return max(unit, (length + blocks * unit - 1) // (blocks * unit) * unit)


@compiled
def _multiply_block(
    a: Array,
    a_packed: bool,
    strips: Array,
    panels: Array,
    out: Array,
    accumulate: bool,
    bias: Array,
) -> None:
    """The two inner loops: over strips of A, and over panels of B.

    A that is not transposed is read where it is: along k its rows are contiguous. A
    bias is written to a strip's rows just before the product is added to them, in L1.
    """
    m, n = out.shape
    k = a.shape[1]
    for i in range(0, m, TILE_ROWS):
        rows = min(TILE_ROWS, m - i)
        for r in range(i, i + rows if bias.size else i):
            row = unit_stride_row(out, r)
            for column in range(bias.size):
                row[column] = bias[column]
        if a_packed:
            strip = panel_at(strips, k, i, TILE_ROWS).T
        else:
            strip = block(a, i, rows, 0, k)
        j = 0
        while j < n:
            width = panel_width(n - j)
            panel = panel_at(panels, k, j, width)
            tile = block(out, i, rows, j, min(width, n - j))
            multiply_tile(strip, panel, tile, accumulate or bias.size > 0)
            j += width


def has_unit_rows(x: Array) -> bool:
    """Whether the elements of each row lie side by side."""
    return x.size == 0 or x.shape[1] == 1 or x.strides[1] == x.itemsize


def _check(a: Array, b: Array, out: Array) -> None:
    for name, x in (("a", a), ("b", b), ("out", out)):
        if x.dtype != FLOAT32:
            raise TypeError(f"{name} is of {x.dtype}, expected float32: convert it")
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b or out.shape != (m, n):
        raise ValueError(
            f"got a {a.shape}, b {b.shape}, out {out.shape}, expected [m, k], [k, n], "
            "[m, n]: reshape or transpose them"
        )
    for name, x in (("a", a), ("b", b)):
        if not has_unit_rows(x) and not has_unit_rows(x.T):
            raise ValueError(
                f"{name} has strides {x.strides}, expected unit stride on one axis: "
                "copy it"
            )
    if not has_unit_rows(out):
        raise ValueError(
            f"out has strides {out.strides}, expected unit stride on its last axis: "
            "compute the transposed product"
        )
