"""Recursive halving reduce-scatter: the part that a rank sums halves in every step.

In the first step, partners p / 2 ranks apart each give half of their array away and
add the half that they get; then p / 4 apart, a quarter, and so on. With p = 4, the
chunks that a rank still sums:

step     start     1       2
rank 0   0 1 2 3   0 1     0
rank 1   0 1 2 3   0 1     1
rank 2   0 1 2 3   2 3     2
rank 3   0 1 2 3   2 3     3

Traffic: lg p messages, n less the rank's own chunk, (p - 1) / p n elements. Where p is
no power of two (`folded.py`), lg p is rounded down, and a pair counts as one rank with
two chunks. The one that sits out first sends its n elements to its partner, and in the
end gets its chunk in one message more.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005, section 4.4.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import array_module
from mpiscale.comm.algorithms.chunks import Chunks, block, is_in_place
from mpiscale.comm.algorithms.folded import Folded
from mpiscale.comm.algorithms.kinds import ReduceScatter
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@ReduceScatter
def recursive_halving_reduce_scatter(
    x: Chunks, sums: Chunks, comm: Communicator, op: np.ufunc
) -> Steps:
    """Leave in sums[rank] the sum of x[rank] over the ranks; may be in place."""
    rank, ranks = comm.rank, Folded(comm.size, comm.rank)
    if ranks.sits_out:
        yield (comm.Isend(x.flat, rank + 1),)
        yield (comm.Irecv(sums[rank], rank + 1),)
        return
    if ranks.in_pair:
        inbox = array_module(x.flat).empty_like(x.flat)
        yield (comm.Irecv(inbox, rank - 1),)
        op(x.flat, inbox, out=sums.flat)
        x = sums
    yield from halve_what_is_summed(
        ranks.merged(x), ranks.merged(sums), ranks, comm, op
    )
    if ranks.in_pair:
        yield (comm.Isend(sums[rank - 1], rank - 1),)


def halve_what_is_summed(
    x: Chunks, sums: Chunks, ranks: Folded, comm: Communicator, op: np.ufunc
) -> Steps:
    """The algorithm itself, on a power of two of ranks with a chunk for each."""
    number, distance = ranks.number, ranks.size // 2
    in_place = is_in_place(x.flat, sums.flat)
    spare = sums.flat[:0] if in_place else sums[block(number, distance)]
    while distance:
        keep, give = block(number, distance), block(number ^ distance, distance)
        partner = ranks.rank_of(number ^ distance)
        inbox = spare[: x[keep].size]
        if inbox.size < x[keep].size:  # at first if in place; chunks of other lengths
            inbox = array_module(x.flat).empty_like(x[keep])
        yield comm.Irecv(inbox, partner), comm.Isend(x[give], partner)
        op(x[keep], inbox, out=sums[keep])
        x, spare = sums, sums[give]  # what is given away is room for what comes next
        distance //= 2
