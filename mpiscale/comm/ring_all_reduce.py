"""Ring all-reduce: reduce-scatter, then all-gather, both around the same ring.

Each rank's array is cut into p chunks, and rank r sends to r + 1 only. With p = 4, the
chunk that each rank sends in each step:

step              reduce-scatter: 1  2  3     all-gather: 1  2  3
rank 0                            0  3  2                 1  0  3
rank 1                            1  0  3                 2  1  0
rank 2                            2  1  0                 3  2  1
rank 3                            3  2  1                 0  3  2

Traffic: each rank sends 2 (p - 1) messages of about n / p elements, which is the least
an all-reduce can do with; exactly, `traffic.all_reduce_sent`.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from mpiscale.backend import FLOAT32, Array, is_half
from mpiscale.comm.communicator import Communicator


class Step(NamedTuple):
    """What one rank has just done: chunk `sent` left, chunk `received` came in."""

    phase: Literal["reduce-scatter", "all-gather"]
    number: int  # 1, ..., p - 1 in each phase
    sent: int
    received: int


def ring_all_reduce(x: Array, comm: Communicator, op: np.ufunc = np.add) -> Array:
    """Return the sum of every rank's `x`; 2 (p - 1) messages of about x.size / p.

    `op` may be any associative and commutative ufunc of two arrays, as np.maximum.
    16-bit floats are summed in float32, and rounded once; `x` stays as it is.
    """
    total = np.array(x, dtype=FLOAT32 if is_half(x.dtype) else x.dtype, order="C")
    for _ in ring_all_reduce_steps(total.reshape(-1), comm, op):
        pass
    return total.astype(x.dtype, copy=False)


def ring_all_reduce_steps(
    total: Array, comm: Communicator, op: np.ufunc = np.add
) -> Iterator[Step]:
    """All-reduce the flat array `total` in place, one message for each `next`."""
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    chunks = np.array_split(total, p)  # views: writing to a chunk writes to `total`
    inbox = np.empty_like(chunks[0])  # chunk 0 is never shorter than the others

    # Reduce-scatter: each chunk travels p - 1 hops and picks up one term per hop.
    for step in range(p - 1):
        sent, received = (rank - step) % p, (rank - step - 1) % p
        mine = chunks[received]
        arrived = inbox[: mine.size]
        comm.Sendrecv(chunks[sent], dest=right, recvbuf=arrived, source=left)
        op(mine, arrived, out=mine)
        yield Step("reduce-scatter", step + 1, sent, received)

    # All-gather: this rank now holds the finished chunk rank + 1 and passes it on.
    for step in range(p - 1):
        sent, received = (rank + 1 - step) % p, (rank - step) % p
        comm.Sendrecv(chunks[sent], dest=right, recvbuf=chunks[received], source=left)
        yield Step("all-gather", step + 1, sent, received)
