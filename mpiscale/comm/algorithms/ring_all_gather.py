"""Ring all-gather: each rank passes on what it received last, until all have all.

Rank r starts with chunk r and sends to r + 1 only. With p = 4, the chunk that each rank
sends in each step:

step     1  2  3
rank 0   0  3  2
rank 1   1  0  3
rank 2   2  1  0
rank 3   3  2  1

Traffic: p - 1 messages, each rank sends every chunk but the one that its right
neighbour owns, (p - 1) / p n.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005, section 4.1.
"""

from __future__ import annotations

from mpiscale.comm.algorithms.chunks import Chunks
from mpiscale.comm.algorithms.kinds import AllGather
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@AllGather
def ring_all_gather(chunks: Chunks, comm: Communicator) -> Steps:
    """Fill all chunks; chunk `rank` is there already."""
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    for step in range(p - 1):
        sent, received = (rank - step) % p, (rank - 1 - step) % p
        yield comm.Irecv(chunks[received], left), comm.Isend(chunks[sent], right)
