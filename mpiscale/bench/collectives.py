"""Times every algorithm of a collective, and MPI's own, over sizes of messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpiscale.backend import Array
from mpiscale.bench.timing_on_ranks import medians
from mpiscale.comm.algorithms.chunks import even_counts
from mpiscale.comm.communicator import Communicator
from mpiscale.comm.cost_model import Machine
from mpiscale.comm.message_patterns import Nodes
from mpiscale.comm.select import NAMED, Kind, seconds

ITEMSIZE = 4  # float32
MPI_OWN = "mpi"


@dataclass(frozen=True)
class Point:
    """One algorithm at one size.

    nbytes: as nccl-tests count it: of the array that is reduced, or gathered, or sent
        by one rank in an all-to-all.
    model_seconds: by the cost model; None for MPI's own, whose algorithm is not known.
    """

    kind: str
    algorithm: str
    nbytes: int
    seconds: float
    model_seconds: float | None
    ranks: int

    @property
    def algbw(self) -> float:
        """Bytes per second: size over time."""
        return self.nbytes / self.seconds

    @property
    def busbw(self) -> float:
        """algbw times the bytes that a rank must at least send for each byte of size.

        2 (p - 1) / p for an all-reduce, (p - 1) / p for the others: it can be compared
        with a link's bandwidth, whatever p. (NVIDIA nccl-tests, doc/PERFORMANCE.md.)
        """
        factor = (self.ranks - 1) / self.ranks
        return self.algbw * factor * (2 if self.kind == "all-reduce" else 1)


def sweep(
    comm: Communicator,
    nodes: Nodes,
    machine: Machine,
    kinds: Sequence[str],
    sizes: Sequence[int],
    repeats: Callable[[int], int],
) -> list[Point]:
    """Time all algorithms of these kinds; collective.

    Args:
        nodes: the ranks of each node.
        machine: for the model's time.
        sizes: in bytes.
        repeats: (size) -> how often each is timed.
    """
    points = []
    for kind in kinds:
        algorithms = {name: entry.make(comm) for name, entry in NAMED[kind].items()}
        for nbytes in sizes:
            n = elements(kind, nbytes, comm.size)
            calls = {MPI_OWN: _mpi_call(kind, comm, n)}
            for name, algorithm in algorithms.items():
                calls[name] = _call(kind, algorithm, comm, n)
            times = medians(comm, list(calls.values()), repeats(nbytes))
            for name, measured in zip(calls, times, strict=True):
                model = None
                if name != MPI_OWN:
                    model = seconds(kind, name, nodes, n, ITEMSIZE, machine)
                size = n * ITEMSIZE
                points.append(Point(kind, name, size, measured, model, comm.size))
    return points


def elements(kind: str, nbytes: int, ranks: int) -> int:
    """How many float32 make about `nbytes`; a multiple of `ranks` but to reduce all."""
    n = max(1, nbytes // ITEMSIZE)
    return n if kind == "all-reduce" else -(-n // ranks) * ranks


def _call(
    kind: str, algorithm: Kind, comm: Communicator, n: int
) -> Callable[[], object]:
    """One call of an algorithm, into memory that is there already."""
    x, out = np.ones(n, np.float32), _output(kind, comm, n)
    if kind == "all-gather":
        x = x[: n // comm.size]
    run: Callable[..., Array] = algorithm  # the kinds' calls differ in what may follow
    return lambda: run(x, comm, out=out)


def _mpi_call(kind: str, comm: Communicator, n: int) -> Callable[[], object]:
    x, out = np.ones(n, np.float32), _output(kind, comm, n)
    mine = x[: n // comm.size]
    return {
        "all-reduce": lambda: comm.Allreduce(x, out),
        "reduce-scatter": lambda: comm.Reduce_scatter_block(x, out),
        "all-gather": lambda: comm.Allgather(mine, out),
        "all-to-all": lambda: comm.Alltoall(x, out),
    }[kind]


def _output(kind: str, comm: Communicator, n: int) -> Array:
    if kind == "reduce-scatter":
        n = even_counts(n, comm.size)[comm.rank]
    return np.empty(n, np.float32)
