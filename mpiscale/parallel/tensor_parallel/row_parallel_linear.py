"""Linear layer cut by rows: each rank multiplies its own input features."""

from __future__ import annotations

from mpiscale.comm.communicator import Communicator
from mpiscale.nn.layers import Linear
from mpiscale.nn.module import Module
from mpiscale.parallel.sharding import section_shard
from mpiscale.parallel.tensor_parallel.boundary import Boundary, Replicated
from mpiscale.tensor import Tensor


class RowParallelLinear(Module):
    """y = x W + b, W cut by rows: rank r multiplies its block of x by its block of W.

    x [..., n / p], rank r's block -> y [..., m], the same on all ranks
    """

    def __init__(self, whole: Linear, comm: Communicator) -> None:
        self.boundary: Boundary = Replicated(comm)
        self.weight, self.bias = whole.weight, whole.bias
        n = self.weight.full_shape[0]
        self.weight.shard = section_shard(
            0, (n,), comm.rank, comm.size, "the input features"
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n / p] -> [..., m], summed over the ranks"""
        y = self.boundary.row_linear(x, self.weight)
        # After the sum: b is added once, not p times, and its gradient is whole.
        return y if self.bias is None else y + self.bias
