"""What data parallelism sends in a step, to the byte.

gradients       2 (N - 1) / N Psi elements    one all-reduce, or one for each bucket
loss            2 (N - 1) / N                 one float64

Psi parameters, N replicas. How many micro-batches a step has does not matter. DiLoCo
sends the gradients' volume once in H steps, and no loss. Where N
does not divide the length of an all-reduce, some ranks send an element more than
others; the numbers here are this rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.traffic import all_reduce_sent
from mpiscale.parallel.step_traffic import StepTraffic

FLOAT64_BYTES = 8


def step_traffic(
    all_reduced: Sequence[int], itemsize: int, comm: Communicator
) -> StepTraffic:
    """Bytes sent by this rank in a step.

    Args:
        all_reduced: elements of each all-reduce of gradients.
        itemsize: bytes of a gradient's element.
        comm: the replicas.
    """
    n, rank = comm.size, comm.rank
    sent = sum(all_reduce_sent(k, n, rank) for k in all_reduced) * itemsize
    loss = all_reduce_sent(1, n, rank) * FLOAT64_BYTES
    formula = (
        f"2 (N - 1) / N x {itemsize} B x Psi + {loss} B for the loss\n"
        f"with N = {n} ranks, Psi = {sum(all_reduced):,} parameters"
    )
    return StepTraffic(sent + loss, formula)


def diloco_traffic(
    parameters: int, itemsize: int, every: int, comm: Communicator
) -> StepTraffic:
    """Bytes sent by this rank in a step of DiLoCo, on average over `every` steps."""
    outer = all_reduce_sent(parameters, comm.size, comm.rank) * itemsize
    formula = (
        f"2 (N - 1) / N x {itemsize} B x Psi / H, on average: {outer:,} B every H steps"
        f"\nwith N = {comm.size} ranks, Psi = {parameters:,} parameters, H = {every}"
    )
    return StepTraffic(round(outer / every), formula)
