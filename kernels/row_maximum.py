"""The maximum of a row, in a loop that vectorises and that NaN passes through."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from mpiscale.backend import Array
from mpiscale.kernels.threads import compiled


def _maximum(typing_context: Any, a: Any, b: Any) -> Any:
    """LLVM's maximum: NaN if either is NaN, as NumPy's.

    A comparison, which may lose a NaN, is only vectorised if NaN is ruled out.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = args[0].type
        kind = ir.FunctionType(number, [number, number])
        function = builder.module.declare_intrinsic("llvm.maximum", [number], kind)
        return builder.call(function, args)

    return a(a, a), generate


maximum: Any = intrinsic(_maximum)


@compiled
def row_maximum(row: Array) -> Any:
    """max(row) [n] -> scalar; -inf if n = 0, NaN if one is NaN."""
    largest = row.dtype.type(-np.inf)
    for j in range(row.size):
        largest = maximum(largest, row[j])
    return largest


@compiled
def softmax_shift(row: Array) -> Any:
    """What to subtract before exp: max(row), or 0 where no element is above -inf.

    exp(-inf - (-inf)) would be NaN, exp(-inf - 0) is 0.
    """
    largest = row_maximum(row)
    return largest if largest != -np.inf else row.dtype.type(0)
