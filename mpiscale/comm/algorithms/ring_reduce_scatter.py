"""Ring reduce-scatter: each chunk travels round the ring and is summed on its way.

Each rank's array is cut into p chunks, and rank r sends to r + 1 only. With p = 4, the
chunk that each rank sends in each step; after the last one rank r holds the sum of
chunk r:

step     1  2  3
rank 0   3  2  1
rank 1   0  3  2
rank 2   1  0  3
rank 3   2  1  0

Traffic: p - 1 messages, each rank sends every chunk but its own, (p - 1) / p n.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69(2), 2009.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import array_module
from mpiscale.comm.algorithms.chunks import Chunks, is_in_place
from mpiscale.comm.algorithms.kinds import ReduceScatter
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@ReduceScatter
def ring_reduce_scatter(
    x: Chunks, sums: Chunks, comm: Communicator, op: np.ufunc
) -> Steps:
    """Leave in sums[rank] the sum of x[rank] over the ranks; may be in place."""
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    in_place = is_in_place(x.flat, sums.flat)
    inbox = array_module(x.flat).empty(max(x.counts) * in_place, x.flat.dtype)
    outgoing = x[left]
    for step in range(p - 1):
        received = (rank - 2 - step) % p
        arrived = inbox[: x.counts[received]] if in_place else sums[received]
        yield comm.Irecv(arrived, left), comm.Isend(outgoing, right)
        outgoing = op(x[received], arrived, out=sums[received])
