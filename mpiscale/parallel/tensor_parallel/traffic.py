"""What tensor parallelism sends: a closed formula, equal to the ledger to the byte.

All-reduced elements per training step, N = batch x length tokens, L layers, width d:

    embedding       N d        forward (g)
    each layer    4 N d        two g forward, two f backward: attention and MLP
    head            N d        backward (f)
    loss            N + 2 N    maximum; sum of exponentials and label's logit
                    (N + 3 N with label smoothing: also the sum of logits)
    replicated key/value heads: their weights' and biases' gradients, once per layer
    gradient norm   1          in float64

An all-reduce of n elements sends 2 (p - 1) / p n of them per rank: around a ring, in p
chunks. Where p does not divide n, some ranks send an element more than others.
"""

from __future__ import annotations

from mpiscale.backend import DType
from mpiscale.comm.communicator import Communicator
from mpiscale.comm.traffic import OPTIMAL, AllReduceVolume, reduce_scatter_sent
from mpiscale.nn.parameter import Parameter
from mpiscale.parallel.step_traffic import StepTraffic
from mpiscale.parallel.tied_parameters import summed_elements

NORM_BYTES = 8  # one float64


def step_traffic(
    parameters: list[Parameter],
    layers: int,
    width: int,
    tokens: int,
    label_smoothing: float,
    dtype: DType,
    comm: Communicator,
    volume: AllReduceVolume = OPTIMAL,
) -> StepTraffic:
    """Bytes sent by this rank for one step over `tokens` = batch x length tokens."""
    p = comm.size
    statistics = 3 if label_smoothing else 2
    n, size = tokens, dtype.itemsize
    sizes = [n * width] * (4 * layers + 2) + [n, statistics * n]
    sent = sum(volume.elements(k, size, comm) for k in sizes) * size
    formula = f"{volume.text} x {size} B x N ((4 L + 2) d + {1 + statistics})"
    for group, elements in summed_elements(parameters):
        sent += volume.elements(elements, size, group) * size
        formula += f" + {volume.text} x {size} B x {elements} replicated elements"
        formula += f" (p = {group.size})"
    norm = volume.elements(1, NORM_BYTES, comm) * NORM_BYTES
    formula += (
        f" + {norm} B for the gradient norm\n"
        f"with p = {p} ranks, N = {n} tokens, L = {layers} layers, d = {width}"
    )
    if any(k % p for k in sizes):
        formula += "\non average over the ranks: p does not divide all of it"
    return StepTraffic(sent + norm, formula)


def sequence_step_traffic(
    parameters: list[Parameter],
    layers: int,
    width: int,
    samples: int,
    length: int,
    label_smoothing: float,
    dtype: DType,
    comm: Communicator,
    volume: AllReduceVolume = OPTIMAL,
) -> StepTraffic:
    """The same with sequence parallelism: (10 L + 5) (p - 1) / p N d and the loss.

    A layer: 2 all-gathers and 2 reduce-scatters forward, as many backward, and 2
    all-gathers of what forward did not keep; embedding 2, head 3 (`sequence_parallel`).
    Parameters that act on own tokens add an all-reduce of their gradients.
    """
    p, size = comm.size, dtype.itemsize
    statistics = 3 if label_smoothing else 2
    n = samples * -(-length // p) * p  # with padding
    moves = 10 * layers + 5
    sent = moves * reduce_scatter_sent(n // p * width, p) * size
    sent += sum(volume.elements(k, size, comm) for k in (n, statistics * n)) * size
    formula = (
        f"(p - 1) / p x {size} B x N (10 L + 5) d"
        f" + {volume.text} x {size} B x N {1 + statistics}"
    )
    for group, elements in summed_elements(parameters):
        sent += volume.elements(elements, size, group) * size
        formula += f" + {volume.text} x {size} B x {elements} elements of whole"
        formula += f" parameters (p = {group.size})"
    norm = volume.elements(1, NORM_BYTES, comm) * NORM_BYTES
    formula += (
        f" + {norm} B for the gradient norm\n"
        f"with p = {p} ranks, N = {n} tokens, L = {layers} layers, d = {width}"
    )
    return StepTraffic(sent + norm, formula)
