"""How many blocks each pipeline stage gets: evenly, by measured cost, or by hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mpiscale.comm.agreement import on_some_ranks
from mpiscale.comm.communicator import Communicator
from mpiscale.errors import InputError
from mpiscale.nn.flat import materialize
from mpiscale.nn.placement import Noise, Placement
from mpiscale.parallel.pipeline_parallel.balance_stages import balanced_split
from mpiscale.parallel.pipeline_parallel.split_into_stages import even_split
from mpiscale.tensor import Tensor
from mpiscale.train.config import TrainConfig

ROUNDS = 5


def split_blocks(
    comm: Communicator, config: TrainConfig, split: str, stages: int, samples: int
) -> list[int]:
    """Blocks of each of `stages`, the same list on all ranks. Collective.

    Args:
        split: "even", "balanced", or numbers such as "3,3,2".
        samples: of a micro-batch, for the measurement.

    Raises:
        InputError: on all ranks, if it can't be read or there are too few blocks.
    """
    if split == "even":
        return even_split(config.layers, stages)
    if split != "balanced":
        return _by_hand(split)
    costs = [[0.0] * 3]

    def measure() -> None:
        costs[0] = list(measured_costs(config, samples))

    on_some_ranks(comm, comm.rank == 0, measure)
    before, block, after = comm.bcast(costs[0])
    return balanced_split(before, [block] * config.layers, after, stages)


def _by_hand(split: str) -> list[int]:
    try:
        return [int(part) for part in split.split(",")]
    except ValueError:
        raise InputError(
            f"--split {split!r}: expected even, balanced, or layers of each stage such "
            "as 3,3,2"
        ) from None


def measured_costs(config: TrainConfig, samples: int) -> tuple[float, float, float]:
    """Seconds of forward and backward of embedding, one block, and head with loss."""
    small = replace(config, layers=1).build_model(config.vocab)
    materialize(small, config.seed, config.numpy_dtype)
    shape = (samples, config.length)
    tokens = np.zeros(shape, np.int64)
    placement = Placement.whole(*shape, Noise(config.seed, 0))
    hidden = np.ones((*shape, config.width), config.numpy_dtype)

    def embedding() -> Tensor:
        return small.embed(tokens, placement)

    def block() -> Tensor:
        y: Tensor = small.blocks[0](Tensor(hidden, requires_grad=True), placement)
        return y

    def head() -> Tensor:
        x: Tensor = small.final_norm(Tensor(hidden, requires_grad=True))
        return small.loss_of(x, tokens, None)

    return _seconds(embedding), _seconds(block), _seconds(head)


def _seconds(forward: Callable[[], Tensor]) -> float:
    """Median of a few, after one that may compile."""
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        forward().backward()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
