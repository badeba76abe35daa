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
from mpiscale.comm.traffic import OPTIMAL, AllReduceVolume, all_gather_sent
from mpiscale.parallel.step_traffic import StepTraffic

FLOAT64_BYTES = INT64_BYTES = 8


def step_traffic(
    all_reduced: Sequence[int],
    itemsize: int,
    comm: Communicator,
    volume: AllReduceVolume = OPTIMAL,
) -> StepTraffic:
    """Bytes sent by this rank in a step.

    Args:
        all_reduced: elements of each all-reduce of gradients.
        itemsize: bytes of a gradient's element.
        comm: the replicas.
        volume: of the all-reduce that they use.
    """
    sent = sum(volume.elements(k, itemsize, comm) for k in all_reduced) * itemsize
    loss = volume.elements(1, FLOAT64_BYTES, comm) * FLOAT64_BYTES
    formula = (
        f"{volume.text} x {itemsize} B x Psi + {loss} B for the loss\n"
        f"with p = {comm.size} ranks, Psi = {sum(all_reduced):,} parameters"
    )
    return StepTraffic(sent + loss, formula)


def lookups_traffic(
    tokens: Sequence[int], width: int, itemsize: int, comm: Communicator
) -> StepTraffic:
    """Bytes that gathered lookups add to a step.

    Args:
        tokens: that each rank looks up.
        width: elements of an embedding's row.
        itemsize: bytes of a gradient's element.
        comm: the replicas.
    """
    n, rank = comm.size, comm.rank
    rows = all_gather_sent([width * t for t in tokens], rank) * itemsize
    ids = (all_gather_sent(tokens, rank) + all_gather_sent([1] * n, rank)) * INT64_BYTES
    sent = rows + ids if n > 1 else 0
    return StepTraffic(
        sent,
        f"(p - 1) / p x ({itemsize} B x d + {INT64_BYTES} B) x T for lookups,"
        f" T = {sum(tokens):,}, d = {width}",
    )


def diloco_traffic(
    parameters: int,
    itemsize: int,
    every: int,
    comm: Communicator,
    volume: AllReduceVolume = OPTIMAL,
) -> StepTraffic:
    """Bytes sent by this rank in a step of DiLoCo, on average over `every` steps."""
    outer = volume.elements(parameters, itemsize, comm) * itemsize
    formula = (
        f"{volume.text} x {itemsize} B x Psi / H, on average: {outer:,} B every H steps"
        f"\nwith p = {comm.size} ranks, Psi = {parameters:,} parameters, H = {every}"
    )
    return StepTraffic(round(outer / every), formula)
