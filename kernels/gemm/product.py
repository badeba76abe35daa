"""The matrix product as the rest of the library calls it: written, or added, to out."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import FLOAT32, Array
from mpiscale.kernels.choose import choose
from mpiscale.kernels.gemm.gemm import gemm, has_unit_rows


def product_into_reference(
    a: Array,
    b: Array,
    out: Array,
    accumulate: bool = False,
    bias: Array | None = None,
) -> None:
    """out = a b, out = a b + bias, or out += a b.

    a [m, k], b [k, n], out [m, n], bias [n]

    out overlaps neither a nor b.
    """
    if accumulate:
        out += np.matmul(a, b)
    else:
        np.matmul(a, b, out=out)
        if bias is not None:
            out += bias


def product_into_numba(
    a: Array,
    b: Array,
    out: Array,
    accumulate: bool = False,
    bias: Array | None = None,
) -> None:
    """As product_into_reference, without a temporary: float32 by our own gemm.

    float64, in which results are compared rather than models trained, is NumPy's, and
    so are products with a vector: each element is used once, packing is of no use.
    """
    if a.dtype != FLOAT32 or 1 in out.shape:
        product_into_reference(a, b, out, accumulate, bias)
        return
    if not has_unit_rows(out):  # out^T = b^T a^T
        if bias is not None:
            raise ValueError("a bias needs an out whose rows are contiguous: copy it")
        a, b, out = b.T, a.T, out.T
    gemm(_with_a_unit_stride(a), _with_a_unit_stride(b), out, accumulate, bias)


def _with_a_unit_stride(x: Array) -> Array:
    """x, copied only if neither its rows nor its columns are contiguous."""
    return x if has_unit_rows(x) or has_unit_rows(x.T) else np.ascontiguousarray(x)


product_into = choose(product_into_reference, product_into_numba, writes=("out",))

if __name__ == "__main__":
    from mpiscale.kernels.bench import Case, main

    def product(x: Array) -> tuple[Array, Array, Array]:
        """x [rows, width] by a matrix [width, width]."""
        width = x.shape[1]
        return x, np.resize(x, (width, width)), np.empty_like(x)

    main(Case(product_into_reference, product_into_numba, product))
