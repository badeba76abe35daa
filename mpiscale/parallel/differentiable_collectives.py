"""Collectives as ops: the backward of each is the other's forward.

operator                  forward       backward      in Shoeybi et al. (2019)
enter_tensor_parallel     identity      all-reduce    f
leave_tensor_parallel     all-reduce    identity      g

Both assume one loss that all ranks of the group compute alike: its gradient with
respect to a replicated tensor is the same on all ranks, and that with respect to a
partial result is the gradient of the sum.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.communicator import Communicator
from mpiscale.tensor import Tensor


def enter_tensor_parallel(x: Tensor, comm: Communicator) -> Tensor:
    """Hand the same `x` to every rank; its gradient is the sum of theirs."""

    def backward(grad: Array) -> tuple[Array]:
        return (all_reduce(grad, comm),)

    return Tensor.from_op(x.data, (x,), backward)


def leave_tensor_parallel(partial: Tensor, comm: Communicator) -> Tensor:
    """Sum the ranks' partial results; each term gets the whole gradient."""

    def backward(grad: Array) -> tuple[Array]:
        return (grad,)

    return Tensor.from_op(all_reduce(partial.data, comm), (partial,), backward)


def all_reduce(x: Array, comm: Communicator) -> Array:
    """The sum of every rank's `x`, in memory of its own."""
    total = np.empty_like(x)
    comm.Allreduce(x, total)
    return total
