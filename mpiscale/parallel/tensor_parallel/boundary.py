"""Where a cut layer meets the rest of the model: what travels, and when.

A column-parallel layer needs all features of x and yields a part of them; a
row-parallel layer turns parts into terms of a sum. Between such pairs the model is

    replicated    every rank holds every token            f and g (this file)
    sequence-parallel   every rank holds its own tokens   `sequence_parallel.py`
"""

from __future__ import annotations

from typing import Protocol

from mpiscale.comm.communicator import Communicator
from mpiscale.ops.matmul import linear, vocabulary_logits
from mpiscale.parallel.differentiable_collectives import (
    enter_tensor_parallel,
    leave_tensor_parallel,
)
from mpiscale.tensor import Tensor


class Boundary(Protocol):
    """Products with a matrix of which this rank holds a block."""

    def column_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [b, t', n] between layers -> x W + b, this rank's features, all tokens."""

    def column_logits(self, x: Tensor, table: Tensor) -> Tensor:
        """x [b, t', d] between layers -> x table^T, this rank's entries, all tokens."""

    def row_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [b, t, n / p], all tokens -> x W, summed, as it stands between layers."""

    def leave(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' terms [b, t, n], as it stands between layers."""


class Replicated(Boundary):
    """Between cut layers every rank holds all tokens: f before, g after."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def column_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """f, then the product."""
        return linear(enter_tensor_parallel(x, self.comm), weight, bias)

    def column_logits(self, x: Tensor, table: Tensor) -> Tensor:
        """f, then the product."""
        return vocabulary_logits(enter_tensor_parallel(x, self.comm), table)

    def row_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, then g."""
        return self.leave(linear(x, weight))

    def leave(self, partial: Tensor) -> Tensor:
        """g."""
        return leave_tensor_parallel(partial, self.comm)
