"""Linear layer cut by columns: each rank computes its own output features."""

from __future__ import annotations

from mpiscale.comm.communicator import Communicator
from mpiscale.nn.layers import Linear
from mpiscale.nn.module import Module
from mpiscale.parallel.sharding import AxisShard, section_shard
from mpiscale.parallel.tensor_parallel.boundary import Boundary, Replicated
from mpiscale.tensor import Tensor


class ColumnParallelLinear(Module):
    """y = x W + b, W cut by columns: rank r holds the r-th block of W and of b.

    x [..., n], the same on all ranks -> y [..., m / p], rank r's block. Where W
    computes several outputs side by side (`Linear.sections`), each of them is cut.
    """

    def __init__(
        self, whole: Linear, comm: Communicator, shard: AxisShard | None = None
    ) -> None:
        if shard is None:
            shard = section_shard(
                1, whole.sections, comm.rank, comm.size, "the output features"
            )
        self.boundary: Boundary = Replicated(comm)
        self.weight, self.bias = whole.weight, whole.bias
        self.weight.shard = shard
        if self.bias is not None:
            self.bias.shard = AxisShard(0, shard.ranges)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> [..., m / p]; backward sums dx over the ranks"""
        return self.boundary.column_linear(x, self.weight, self.bias)
