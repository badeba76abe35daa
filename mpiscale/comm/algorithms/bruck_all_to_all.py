"""Bruck's all-to-all: lg p messages, each with all chunks that go a way with bit k.

A chunk for the rank d places ahead travels in hops of the powers of two in d: with
d = 5 = 1 + 4 it moves one place in step 0, and four in step 2. So in step k each rank
sends 2^k places ahead, in one message, all chunks it has whose d contains 2^k:

step k   to rank    chunks with d =    (p = 8)
0        r + 1      1 3 5 7
1        r + 2      2 3 6 7
2        r + 4      4 5 6 7

Few messages, but a chunk is sent once for each set bit of d: good for small chunks.
Where chunks differ in length, a rank does not know those of chunks that only pass
through it, so a message of p / 2 numbers tells them before each step.

Traffic: ceil(lg p) messages (twice as many with lengths), about n / 2 lg p elements.

Source: J. Bruck et al., "Efficient algorithms for all-to-all communications in
multiport message-passing systems", IEEE Trans. Parallel Distrib. Syst. 8(11), 1997.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array, array_module
from mpiscale.comm.algorithms.chunks import Chunks
from mpiscale.comm.algorithms.kinds import AllToAll
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@AllToAll
def bruck_all_to_all(send: Chunks, recv: Chunks, comm: Communicator) -> Steps:
    """send[s] goes to rank s, recv[r] comes from rank r."""
    p, rank = comm.size, comm.rank
    xp = array_module(send.flat)
    held: list[Array] = [send[(rank + d) % p] for d in range(p)]  # by d
    hop = 1
    while hop < p:
        moving = [d for d in range(p) if d & hop]
        ahead, behind = (rank + hop) % p, (rank - hop) % p
        lengths = np.array([held[d].size for d in moving])
        if not send.alike:
            arriving = np.empty_like(lengths)
            yield comm.Irecv(arriving, behind), comm.Isend(lengths, ahead)
            lengths = arriving
        packed = xp.concatenate([held[d] for d in moving])
        inbox = Chunks(xp.empty(int(lengths.sum()), packed.dtype), lengths.tolist())
        yield comm.Irecv(inbox.flat, behind), comm.Isend(packed, ahead)
        for i, d in enumerate(moving):
            held[d] = inbox[i]
        hop *= 2
    for d in range(p):  # what is at d now has come d places: from rank - d
        recv[(rank - d) % p][...] = held[d]
