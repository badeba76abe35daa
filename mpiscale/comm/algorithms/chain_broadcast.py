"""Pipelined chain broadcast: segments follow each other down a chain of all ranks.

The chain is root, root + 1, ..., root - 1. Each rank receives segment s while it passes
on segment s - 1, so that all links work at once:

slot     0        1        2        3        4
rank 0   send 0   send 1   send 2
rank 1   recv 0   recv 1   recv 2
                  send 0   send 1   send 2
rank 2            recv 0   recv 1   recv 2
                           send 0   send 1   send 2   ...

Time: (p - 2 + S) (alpha + beta n / S) with S segments: about beta n, whatever p, for
large n. The best S is sqrt((p - 2) beta n / alpha).

Traffic: n elements in S messages from each rank but the last of the chain.

Source: J. Pjesivac-Grbovic et al., "Performance analysis of MPI collective operations",
Cluster Computing 10, 2007, section 3.1.
"""

from __future__ import annotations

from mpiscale.backend import Array
from mpiscale.comm.algorithms.kinds import Broadcast
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.buffers import parts
from mpiscale.comm.communicator import Communicator

SEGMENT_BYTES = 256 << 10


def chain(segment_bytes: int = SEGMENT_BYTES) -> Broadcast:
    """The algorithm with segments of this size."""

    def chain_broadcast(x: Array, comm: Communicator, root: int) -> Steps:
        """Fill the flat array x with the root's."""
        p = comm.size
        place = (comm.rank - root) % p
        segments = [x[part] for part in parts(x.size, segment_bytes // x.itemsize or 1)]
        before, after = (comm.rank - 1) % p, (comm.rank + 1) % p
        for s in range(len(segments) + 1):
            requests = []
            if place > 0 and s < len(segments):
                requests.append(comm.Irecv(segments[s], before))
            if place < p - 1 and s > 0:
                requests.append(comm.Isend(segments[s - 1], after))
            yield requests

    return Broadcast(chain_broadcast)


chain_broadcast = chain()
