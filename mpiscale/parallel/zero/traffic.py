"""What ZeRO sends in a step, to the byte.

N ranks share Psi parameters (with the padding of every unit); A micro-batches:

stage   gradients                 parameters                sum for A = 1
1         (N - 1) / N Psi           (N - 1) / N Psi         2 (N - 1) / N Psi
2       A (N - 1) / N Psi           (N - 1) / N Psi         2 (N - 1) / N Psi
3       A (N - 1) / N Psi       2 A (N - 1) / N Psi         3 (N - 1) / N Psi

Besides: the loss and the gradient's norm, a float64 each; with R groups of replicas
2 (R - 1) / R of this rank's chunks; in stage 3 one int64 to every other rank for each
gather and for the end of each backward, by which ranks agree on what they gather.

Source: S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models", SC 2020, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.traffic import OPTIMAL, AllReduceVolume
from mpiscale.parallel.step_traffic import StepTraffic

INT64_BYTES = FLOAT64_BYTES = 8


def step_traffic(
    stage: int,
    chunks: Sequence[int],
    itemsize: int,
    grad_itemsize: int,
    accumulate: int,
    comm: Communicator,
    replicas: Communicator | None = None,
    volume: AllReduceVolume = OPTIMAL,
) -> StepTraffic:
    """Bytes sent by this rank in a step.

    Args:
        stage: 1, 2 or 3.
        chunks: elements of a rank's chunk of each unit, padding included.
        itemsize, grad_itemsize: bytes of a parameter's and of a gradient's element.
        accumulate: micro-batches, A.
        comm, replicas: as for `Sharded`.
        volume: of the all-reduce that they use.
    """
    n, passes = comm.size, accumulate if stage >= 2 else 1
    gathers = 2 * accumulate if stage == 3 else 1
    chunk = sum(chunks)
    sent = (n - 1) * chunk * (passes * grad_itemsize + gathers * itemsize)
    formula = (
        f"(N - 1) / N x ({passes} x {grad_itemsize} B for gradients + {gathers} x "
        f"{itemsize} B for parameters) x Psi"
    )
    scalar = volume.elements(1, FLOAT64_BYTES, comm) * FLOAT64_BYTES
    scalars = 2 * scalar
    if stage == 3:
        agreements = gathers * len(chunks) + accumulate
        sent += agreements * (n - 1) * INT64_BYTES
        formula += f"\n+ {agreements} (N - 1) x {INT64_BYTES} B to agree on gathers"
    if replicas is not None:
        r, itemsize = replicas.size, grad_itemsize
        sent += itemsize * sum(volume.elements(k, itemsize, replicas) for k in chunks)
        scalars += volume.elements(1, FLOAT64_BYTES, replicas) * FLOAT64_BYTES
        formula += f"\n+ {volume.text} x {grad_itemsize} B x Psi / N, p = {r} replicas"
    formula += (
        f"\n+ {scalars} B for loss and norm\n"
        f"with N = {n} ranks, Psi = {n * chunk:,} parameters, padding included"
    )
    return StepTraffic(sent + scalars, formula)
