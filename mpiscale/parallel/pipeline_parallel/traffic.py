"""What a pipeline sends in a step, to the byte.

activations and their gradients     b T d each, for every send of this rank's schedule
losses                              M numbers, all-reduced: every rank has them
tied parameters                     their gradients, all-reduced over the ranks that
                                    hold them, once a step
gradient norm                       1 number, all-reduced

b samples a micro-batch, T tokens a sample, d features. A boundary between two ranks is
passed by 2 M messages a step, one each way for every micro-batch. Not counted: the
header of 80 bytes ahead of the first activation of a shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.traffic import OPTIMAL, AllReduceVolume
from mpiscale.nn.parameter import Parameter
from mpiscale.parallel.pipeline_parallel.actions import SENDS, Schedule
from mpiscale.parallel.step_traffic import StepTraffic
from mpiscale.parallel.tied_parameters import summed_elements

FLOAT64_BYTES = 8


def step_traffic(
    schedule: Schedule,
    samples: Sequence[int],
    activation: int,
    itemsize: int,
    parameters: list[Parameter],
    grad_itemsize: int,
    comm: Communicator,
    volume: AllReduceVolume = OPTIMAL,
) -> StepTraffic:
    """Bytes sent by this rank.

    Args:
        schedule: with its messages.
        samples: of each micro-batch.
        activation: elements of one sample's activation, T d.
        itemsize: bytes of an activation's element.
        parameters: of this rank, with their ties declared.
        grad_itemsize: bytes of a gradient's element.
        comm: the pipeline's ranks.
        volume: of the all-reduce that is used.
    """
    sends = [a for a in schedule.actions[comm.rank] if a.kind in SENDS]
    messages = sum(samples[a.micro_batch] for a in sends) * activation * itemsize
    formula = f"{len(sends)} messages of b T d x {itemsize} B"
    tied = 0
    for group, elements in summed_elements(parameters):
        tied += volume.elements(elements, grad_itemsize, group) * grad_itemsize
        formula += f" + {volume.text} x {grad_itemsize} B x {elements} tied elements"
        formula += f" (p = {group.size})"
    numbers = sum(
        volume.elements(n, FLOAT64_BYTES, comm) for n in (schedule.micro_batches, 1)
    )
    formula += (
        f" + {numbers * FLOAT64_BYTES} B for losses and gradient norm\n"
        f"with b = {_range(samples)} samples a micro-batch, T d = {activation:,}"
    )
    return StepTraffic(messages + tied + numbers * FLOAT64_BYTES, formula)


def _range(samples: Sequence[int]) -> str:
    least, most = min(samples), max(samples)
    return str(least) if least == most else f"{least} or {most}"
