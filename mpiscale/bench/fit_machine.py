"""Fits the cost model's numbers: alpha, beta and share of each level, and gamma.

A step of an algorithm is an exchange in which every rank sends and receives at once, so
that is what is timed, for several sizes m: neighbours on a node, or on two nodes,
exchange m bytes, first all of them together, then one pair alone. The numbers are those
for which alpha + share M, M being the bytes of all messages of a node, and alpha +
beta m have the least relative errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpiscale.bench.timing_on_ranks import medians
from mpiscale.comm.communicator import Communicator, Waitall
from mpiscale.comm.cost_model import Level, Machine
from mpiscale.comm.message_patterns import Nodes

SIZES = (8, 1 << 16, 1 << 19, 1 << 22, 1 << 24)  # bytes of a message
ADDED_BYTES = 1 << 23
IN_A_ROW = 4  # exchanges and additions: an algorithm is a row of steps, too
FLOAT32_BYTES = 4


def fit_machine(comm: Communicator, nodes: Nodes, repeats: int = 15) -> Machine:
    """Measure this machine; collective over `comm`, whose ranks lie on `nodes`."""
    inside_ring = {
        rank: (ranks[i - 1], ranks[(i + 1) % len(ranks)])
        for ranks in nodes
        if len(ranks) > 1
        for i, rank in enumerate(ranks)
    }
    inside = _fit_level(comm, inside_ring, max(map(len, nodes)), repeats)
    across = None
    if len(nodes) > 1:
        columns = [[ranks[j] for ranks in nodes] for j in range(min(map(len, nodes)))]
        across_ring = {
            rank: (column[i - 1], column[(i + 1) % len(column)])
            for column in columns
            for i, rank in enumerate(column)
        }
        across = _fit_level(comm, across_ring, len(columns), repeats)
    if inside is None:  # a rank on every node: no message stays inside
        assert across is not None, "one rank alone sends no messages"
        inside = across
    return Machine(inside, across, *_fit_gamma(comm, nodes, repeats))


def _fit_level(
    comm: Communicator, ring: dict[int, tuple[int, int]], senders: int, repeats: int
) -> Level | None:
    """ring: rank -> (from whom it receives, to whom it sends)."""
    if not ring:
        return None
    rank = comm.rank
    pair = min(ring), ring[min(ring)][1]
    alone = {pair[0]: (pair[1], pair[1]), pair[1]: (pair[0], pair[0])}
    calls = [
        _exchange(comm, links.get(rank), size)
        for links in (ring, alone)
        for size in SIZES
    ]
    times = [t / IN_A_ROW for t in medians(comm, calls, repeats)]
    together, by_itself = times[: len(SIZES)], times[len(SIZES) :]
    alpha, share = fit_line([senders * size for size in SIZES], together)
    _, beta = fit_line(SIZES, by_itself)
    return Level(alpha, min(beta, senders * share), share)


def fit_line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """(a, b), none negative, for which a + b size has the least relative errors."""
    t = np.array(times)
    terms = np.stack([1 / t, np.array(sizes) / t], axis=1)
    (a, b), *_ = np.linalg.lstsq(terms, np.ones(len(t)), rcond=None)
    if a < 0:
        a, b = 0.0, 1 / float(terms[:, 1].mean())
    return float(a), max(float(b), 0.0)


def _exchange(
    comm: Communicator, links: tuple[int, int] | None, nbytes: int
) -> Callable[[], object]:
    """A call of exchanges in which this rank sends to one, receives from another."""
    if links is None:
        return lambda: None
    source, dest = links
    mine, inbox = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)

    def call() -> None:
        for _ in range(IN_A_ROW):
            Waitall([comm.Irecv(inbox, source), comm.Isend(mine, dest)])

    return call


def _fit_gamma(
    comm: Communicator, nodes: Sequence[Sequence[int]], repeats: int
) -> tuple[float, float]:
    """Seconds per byte of an addition: alone, and as a share of its node's."""
    a = np.ones(ADDED_BYTES // FLOAT32_BYTES, np.float32)
    b, total = a.copy(), np.empty_like(a)

    def add() -> None:
        for _ in range(IN_A_ROW):
            np.add(a, b, out=total)

    alone, together = medians(
        comm, [add if comm.rank == 0 else lambda: None, add], repeats
    )
    nbytes = IN_A_ROW * ADDED_BYTES
    return alone / nbytes, max(together, alone) / (max(map(len, nodes)) * nbytes)
