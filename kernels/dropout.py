"""Dropout whose mask is a function of a key and each element's global index.

Whoever computes an element, and however often, drops it alike: on every layout and in
recomputation. The mask is never stored.
"""

from __future__ import annotations

import math

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.choose import choose, expect_shape
from mpiscale.kernels.rows import as_rows
from mpiscale.kernels.threads import compiled, row_kernel
from mpiscale.rng import (
    PHILOX_KEY_STEPS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    random_bits,
)

# As uint64 throughout: Numba makes float64 of uint64 combined with a Python integer.
M0, M1 = (np.uint64(m) for m in PHILOX_MULTIPLIERS)
STEP0, STEP1 = (np.uint64(step) for step in PHILOX_KEY_STEPS)
LOW_32_BITS = np.uint64(0xFFFFFFFF)
HALF_WORD = np.uint64(32)
BLOCK_BITS = np.uint64(2)  # four elements share a block of random words
LANE = np.uint64(3)
NO_BLOCK = np.uint64(0xFFFFFFFFFFFFFFFF)  # larger than any index / 4


def dropout_reference(
    x: Array, p: float, key: int, row_offset: Array, column_offset: Array
) -> Array:
    """y = x keep / (1 - p), keep where random_bits(key, index) >= p 2^32.

    x [..., n] seen as [rows, n], row_offset [rows] int64, column_offset [n] int64 ->
    y [..., n]; element (r, j) has index row_offset[r] + column_offset[j]. Linear in x:
    the backward pass is the same call on dy.

    Raises:
        ValueError: if p is not in [0, 1).
    """
    threshold = _threshold(p)
    index = row_offset[:, None] + column_offset
    keep = (random_bits(key, index) >= threshold).reshape(x.shape)
    return np.where(keep, x * x.dtype.type(1 / (1 - p)), x.dtype.type(0))


def _threshold(p: float) -> int:
    """The least integer >= p 2^32: exact, since scaling by 2^32 does not round."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability is {p}, expected 0 <= p < 1: lower it")
    return math.ceil(p * 2**32)


def dropout_numba(
    x: Array, p: float, key: int, row_offset: Array, column_offset: Array
) -> Array:
    """As dropout_reference, without temporaries; neighbours share a Philox block."""
    y = np.empty_like(x, order="C")
    rows, x_rows, y_rows = as_rows(x, y)
    expect_shape("row_offset", row_offset, (rows,))
    expect_shape("column_offset", column_offset, x.shape[-1:])
    _dropout_rows(
        rows,
        x_rows,
        np.uint64(_threshold(p)),
        x.dtype.type(1 / (1 - p)),
        np.uint64(key),
        np.ascontiguousarray(row_offset, np.int64),
        np.ascontiguousarray(column_offset, np.int64),
        y_rows,
    )
    return y


@row_kernel
def _dropout_rows(
    lo: int,
    hi: int,
    x: Array,
    threshold: np.uint64,
    scale: float,
    key: np.uint64,
    row_offset: Array,
    column_offset: Array,
    y: Array,
) -> None:
    words = np.empty(4, np.uint64)
    for row in range(lo, hi):
        current = NO_BLOCK
        for j in range(x.shape[1]):
            index = np.uint64(row_offset[row] + column_offset[j])
            if index >> BLOCK_BITS != current:
                current = index >> BLOCK_BITS
                philox_block(key, current, words)
            keep = words[index & LANE] >= threshold
            y[row, j] = x[row, j] * scale if keep else x.dtype.type(0)


@compiled
def philox_block(key: np.uint64, counter: np.uint64, words: Array) -> None:
    """Philox-4x32-10: write the four words of `counter` to words [4], as uint64.

    Bit for bit `mpiscale.rng.philox`, which gives the source.
    """
    c0, c1 = counter & LOW_32_BITS, counter >> HALF_WORD
    c2 = c3 = np.uint64(0)
    k0, k1 = key & LOW_32_BITS, key >> HALF_WORD
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1 = (p1 >> HALF_WORD) ^ c1 ^ k0, p1 & LOW_32_BITS
        c2, c3 = (p0 >> HALF_WORD) ^ c3 ^ k1, p0 & LOW_32_BITS
        k0, k1 = (k0 + STEP0) & LOW_32_BITS, (k1 + STEP1) & LOW_32_BITS
    words[0], words[1], words[2], words[3] = c0, c1, c2, c3


dropout = choose(dropout_reference, dropout_numba, like=("x",))

if __name__ == "__main__":
    from mpiscale.kernels.bench import Case, main

    def arguments(x: Array) -> tuple[Array, float, int, Array, Array]:
        """Elements numbered in order."""
        rows, n = x.shape
        return x, 0.1, 1, np.arange(rows) * n, np.arange(n)

    main(Case(dropout_reference, dropout_numba, arguments))
