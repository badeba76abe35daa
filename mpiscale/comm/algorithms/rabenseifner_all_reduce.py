"""Rabenseifner's all-reduce: recursive halving, then recursive doubling.

A reduce-scatter and an all-gather, as in the ring, but each with lg p messages instead
of p - 1: the least traffic with few messages.

Traffic: 2 lg p messages, 2 (p - 1) / p n elements. Where p is no power of two
(`folded.py`), the same for the power of two below it; a rank that sits out sends n to
its partner first, which sends the n sums back at the end, in one message more.

Source: R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004,
section 4.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array, array_module
from mpiscale.comm.algorithms.chunks import Chunks, even_counts
from mpiscale.comm.algorithms.folded import Folded
from mpiscale.comm.algorithms.kinds import AllReduce
from mpiscale.comm.algorithms.recursive_doubling_all_gather import double_what_is_held
from mpiscale.comm.algorithms.recursive_halving_reduce_scatter import (
    halve_what_is_summed,
)
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@AllReduce
def rabenseifner_all_reduce(
    x: Array, total: Array, comm: Communicator, op: np.ufunc
) -> Steps:
    """Fill `total` with the sum of the flat array x over the ranks; may be in place."""
    ranks = Folded(comm.size, comm.rank)
    if ranks.sits_out:
        yield (comm.Isend(x, comm.rank + 1),)
        yield (comm.Irecv(total, comm.rank + 1),)
        return
    if ranks.in_pair:
        inbox = array_module(total).empty_like(total)
        yield (comm.Irecv(inbox, comm.rank - 1),)
        x = op(x, inbox, out=total)
    counts = even_counts(x.size, ranks.size)
    sums = Chunks(total, counts)
    yield from halve_what_is_summed(Chunks(x, counts), sums, ranks, comm, op)
    yield from double_what_is_held(sums, ranks, comm)
    if ranks.in_pair:
        yield (comm.Isend(total, comm.rank - 1),)
