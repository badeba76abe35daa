"""Linear layer cut by rows: each rank multiplies its own input features."""

from __future__ import annotations

from mpiscale.comm.communicator import Communicator
from mpiscale.nn.layers import Linear
from mpiscale.nn.module import Module
from mpiscale.ops.matmul import linear
from mpiscale.parallel.differentiable_collectives import leave_tensor_parallel
from mpiscale.parallel.sharding import section_shard
from mpiscale.tensor import Tensor


class RowParallelLinear(Module):
    """y = x W + b, W cut by rows: rank r multiplies its block of x by its block of W.

    x [..., n / p], rank r's block -> y [..., m], the same on all ranks
    """

    def __init__(self, whole: Linear, comm: Communicator) -> None:
        self.comm = comm
        self.weight, self.bias = whole.weight, whole.bias
        n = self.weight.full_shape[0]
        self.weight.shard = section_shard(
            0, (n,), comm.rank, comm.size, "the input features"
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n / p] -> [..., m], summed over the ranks"""
        y = leave_tensor_parallel(linear(x, self.weight), self.comm)
        # After the sum: b is added once, not p times, and its gradient is whole.
        return y if self.bias is None else y + self.bias
