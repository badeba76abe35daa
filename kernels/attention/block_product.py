"""The one matrix product of the attention kernels: C += A B on blocks in the cache."""

from __future__ import annotations

from mpiscale.backend import Array
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
