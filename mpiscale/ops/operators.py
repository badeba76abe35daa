"""Python's operators on tensors: `a + b`, `a @ b`, `-a`, `a[1:]`."""

from __future__ import annotations

from mpiscale.ops import arithmetic, indexing, matmul
from mpiscale.tensor import Tensor


def bind() -> None:
    """Give Tensor its operators; called once, when `mpiscale.ops` is imported."""
    operators = {
        "__add__": arithmetic.add,
        "__radd__": arithmetic.add,
        "__sub__": arithmetic.subtract,
        "__rsub__": lambda b, a: arithmetic.subtract(a, b),
        "__mul__": arithmetic.multiply,
        "__rmul__": arithmetic.multiply,
        "__truediv__": arithmetic.divide,
        "__rtruediv__": lambda b, a: arithmetic.divide(a, b),
        "__pow__": arithmetic.power,
        "__matmul__": matmul.matmul,
        "__neg__": arithmetic.negative,
        "__getitem__": indexing.index,
    }
    for name, function in operators.items():
        setattr(Tensor, name, function)
