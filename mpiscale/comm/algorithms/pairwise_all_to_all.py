"""Pairwise all-to-all: in step k each rank sends to rank + k, receives from rank - k.

Every chunk goes straight to its destination, and in no step do two ranks send to the
same one. With p = 4, to whom each rank sends:

step     1   2   3
rank 0   1   2   3
rank 1   2   3   0
rank 2   3   0   1
rank 3   0   1   2

Traffic: p - 1 messages, every chunk but the own once; empty chunks are not sent.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005, section 4.3.
"""

from __future__ import annotations

from mpiscale.comm.algorithms.chunks import Chunks
from mpiscale.comm.algorithms.kinds import AllToAll
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@AllToAll
def pairwise_all_to_all(send: Chunks, recv: Chunks, comm: Communicator) -> Steps:
    """send[s] goes to rank s, recv[r] comes from rank r."""
    p, rank = comm.size, comm.rank
    recv[rank][...] = send[rank]
    for step in range(1, p):
        dest, source = (rank + step) % p, (rank - step) % p
        requests = []
        if recv.counts[source]:  # as long as send.counts[rank] there: both know it
            requests.append(comm.Irecv(recv[source], source))
        if send.counts[dest]:
            requests.append(comm.Isend(send[dest], dest))
        yield requests
