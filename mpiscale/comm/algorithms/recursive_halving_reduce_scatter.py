"""Recursive halving reduce-scatter: the part that a rank sums halves in every step.

In the first step, partners p / 2 ranks apart each give half of their array away and
add the half that they get; then p / 4 apart, a quarter, and so on. With p = 4, the
chunks that a rank still sums:

step     start     1       2
rank 0   0 1 2 3   0 1     0
rank 1   0 1 2 3   0 1     1
rank 2   0 1 2 3   2 3     2
rank 3   0 1 2 3   2 3     3

Traffic: lg p messages, (p - 1) / p n elements. Where p is no power of two
(`folded.py`), a rank that sits out first sends its whole array to its partner, and in
the end gets its chunk from it.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005, section 4.4.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import array_module
from mpiscale.comm.algorithms.chunks import Chunks
from mpiscale.comm.algorithms.folded import Folded
from mpiscale.comm.algorithms.kinds import ReduceScatter
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@ReduceScatter
def recursive_halving_reduce_scatter(
    chunks: Chunks, comm: Communicator, op: np.ufunc
) -> Steps:
    """Leave in chunk `rank` its sum over the ranks; the others hold partial sums."""
    rank, ranks = comm.rank, Folded(comm.size, comm.rank)
    if ranks.sits_out:
        yield (comm.Isend(chunks.flat, rank + 1),)
        yield (comm.Irecv(chunks[rank], rank + 1),)
        return
    if ranks.in_pair:
        inbox = array_module(chunks.flat).empty_like(chunks.flat)
        yield (comm.Irecv(inbox, rank - 1),)
        op(chunks.flat, inbox, out=chunks.flat)
    yield from halve_what_is_summed(ranks.merged(chunks), ranks, comm, op)
    if ranks.in_pair:
        yield (comm.Isend(chunks[rank - 1], rank - 1),)


def halve_what_is_summed(
    chunks: Chunks, ranks: Folded, comm: Communicator, op: np.ufunc
) -> Steps:
    """The algorithm itself, on a power of two of ranks with a chunk for each."""
    distance = ranks.size // 2
    while distance:
        mine = ranks.number // distance * distance  # the first of `distance` chunks
        theirs = mine ^ distance
        keep = chunks[mine : mine + distance]
        inbox = array_module(keep).empty_like(keep)
        partner = ranks.rank_of(ranks.number ^ distance)
        give = chunks[theirs : theirs + distance]
        yield comm.Irecv(inbox, partner), comm.Isend(give, partner)
        op(keep, inbox, out=keep)
        distance //= 2
