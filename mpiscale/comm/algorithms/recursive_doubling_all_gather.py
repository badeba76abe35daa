"""Recursive doubling all-gather: what a rank has doubles in every step.

In step k, partners 2^(k - 1) ranks apart exchange all that they have. With p = 4:

step     1                 2
rank 0   0 <-> 1 of 1      0 1 <-> 2 3 of 2
rank 1   1 <-> 0 of 0      0 1 <-> 2 3 of 3
rank 2   2 <-> 3 of 3      2 3 <-> 0 1 of 0
rank 3   3 <-> 2 of 2      2 3 <-> 0 1 of 1

Traffic: lg p messages, (p - 1) / p n elements. Where p is no power of two
(`folded.py`), lg p is rounded down, and a pair counts as one rank with two chunks. The
one that sits out sends its chunk to its partner, which in the end sends it all that it
lacks: n less that chunk, in two messages.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005, section 4.1.
"""

from __future__ import annotations

from mpiscale.comm.algorithms.chunks import Chunks, block
from mpiscale.comm.algorithms.folded import Folded
from mpiscale.comm.algorithms.kinds import AllGather
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@AllGather
def recursive_doubling_all_gather(chunks: Chunks, comm: Communicator) -> Steps:
    """Fill all chunks; chunk `rank` is there already."""
    rank, ranks = comm.rank, Folded(comm.size, comm.rank)
    if ranks.sits_out:
        yield (comm.Isend(chunks[rank], rank + 1),)
        partner = rank + 1
        yield (
            comm.Irecv(chunks[:rank], partner),
            comm.Irecv(chunks[rank + 1 :], partner),
        )
        return
    if ranks.in_pair:
        yield (comm.Irecv(chunks[rank - 1], rank - 1),)
    yield from double_what_is_held(ranks.merged(chunks), ranks, comm)
    if ranks.in_pair:
        yield (
            comm.Isend(chunks[: rank - 1], rank - 1),
            comm.Isend(chunks[rank:], rank - 1),
        )


def double_what_is_held(chunks: Chunks, ranks: Folded, comm: Communicator) -> Steps:
    """The algorithm itself, on a power of two of ranks with a chunk for each."""
    distance = 1
    while distance < ranks.size:
        mine = block(ranks.number, distance)
        theirs = block(ranks.number ^ distance, distance)
        partner = ranks.rank_of(ranks.number ^ distance)
        yield comm.Irecv(chunks[theirs], partner), comm.Isend(chunks[mine], partner)
        distance *= 2
