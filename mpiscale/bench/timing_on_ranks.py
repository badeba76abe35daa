"""Timing of calls that all ranks make together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from mpiscale.comm.communicator import Communicator


def medians(
    comm: Communicator, calls: Sequence[Callable[[], object]], repeats: int
) -> list[float]:
    """Median time of each call in seconds, taken in turn: A B C, A B C, ...

    A call takes from the moment when all ranks are ready to that when the last one is
    done. The first round is not counted.
    """
    rounds = [[_slowest(comm, call) for call in calls] for _ in range(repeats + 1)]
    columns = zip(*rounds[1:], strict=True)
    return [statistics.median(column) for column in columns]


def _slowest(comm: Communicator, call: Callable[[], object]) -> float:
    comm.Barrier()
    start = time.perf_counter()
    call()
    return max(comm.allgather(time.perf_counter() - start))
