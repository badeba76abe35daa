"""Ring all-reduce: a reduce-scatter, then an all-gather, both around the same ring.

Each rank's array is cut into p chunks. After the reduce-scatter rank r holds the sum of
chunk r; the all-gather takes it to all others.

Traffic: each rank sends 2 (p - 1) messages of about n / p elements, which is the least
an all-reduce can do with; exactly, `traffic.all_reduce_sent`.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69(2), 2009.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.algorithms.chunks import Chunks, even_counts
from mpiscale.comm.algorithms.kinds import AllReduce
from mpiscale.comm.algorithms.ring_all_gather import ring_all_gather
from mpiscale.comm.algorithms.ring_reduce_scatter import ring_reduce_scatter
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@AllReduce
def ring_all_reduce(x: Array, total: Array, comm: Communicator, op: np.ufunc) -> Steps:
    """Fill `total` with the sum of the flat array x over the ranks; may be in place."""
    counts = even_counts(x.size, comm.size)
    sums = Chunks(total, counts)
    yield from ring_reduce_scatter.steps(Chunks(x, counts), sums, comm, op)
    yield from ring_all_gather.steps(sums, comm)
