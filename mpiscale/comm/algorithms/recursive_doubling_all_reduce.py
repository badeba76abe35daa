"""Recursive doubling all-reduce: the whole array to partners 1, 2, 4, ... ranks away.

After step k the ranks of each block of 2^k hold the sum over their block. With p = 4:

step     1        2
rank 0   with 1   with 2
rank 1   with 0   with 3
rank 2   with 3   with 0
rank 3   with 2   with 1

Traffic: lg p messages of n elements each: best for small n. Where p is no power of two
(`folded.py`), lg p is rounded down; a rank that sits out sends one message, its partner
one more than the others.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005, section 4.5.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array, array_module
from mpiscale.comm.algorithms.folded import Folded
from mpiscale.comm.algorithms.kinds import AllReduce
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@AllReduce
def recursive_doubling_all_reduce(
    x: Array, total: Array, comm: Communicator, op: np.ufunc
) -> Steps:
    """Fill `total` with the sum of the flat array x over the ranks; may be in place."""
    ranks = Folded(comm.size, comm.rank)
    if ranks.sits_out:
        yield (comm.Isend(x, comm.rank + 1),)
        yield (comm.Irecv(total, comm.rank + 1),)
        return
    inbox = array_module(total).empty_like(total)
    if ranks.in_pair:
        yield (comm.Irecv(inbox, comm.rank - 1),)
        x = op(x, inbox, out=total)
    distance = 1
    while distance < ranks.size:
        partner = ranks.rank_of(ranks.number ^ distance)
        yield comm.Irecv(inbox, partner), comm.Isend(x, partner)
        x = op(x, inbox, out=total)
        distance *= 2
    if ranks.in_pair:
        yield (comm.Isend(total, comm.rank - 1),)
