"""Hierarchical all-reduce: inside the node, across nodes, inside again.

1. reduce-scatter inside each node, one chunk to each carrier (`node_groups.py`)
2. all-reduce of chunk j over column j: all nodes at once, over the network
3. all-gather inside each node

    node 0:  a0 b0   a1 b1      1.  A = a0 + a1   B = b0 + b1     2.  A + C   B + D
    node 1:  c0 d0   c1 d1          C = c0 + c1   D = d0 + d1         A + C   B + D

Over the network a node sends 2 (H - 1) / H n elements, H being the number of nodes. In
a flat ring it is 2 (p - 1) / p n if the ranks of a node are neighbours in the ring, and
that times the ranks of a node if they are dealt out cyclically.

Source: X. Jia et al., "Highly scalable deep learning training system with
mixed-precision: training ImageNet in four minutes", 2018, section 4.2.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.algorithms.chunks import Chunks, even_counts
from mpiscale.comm.algorithms.kinds import AllGather, AllReduce, ReduceScatter
from mpiscale.comm.algorithms.node_groups import NodeGroups
from mpiscale.comm.algorithms.ring_all_gather import ring_all_gather
from mpiscale.comm.algorithms.ring_all_reduce import ring_all_reduce
from mpiscale.comm.algorithms.ring_reduce_scatter import ring_reduce_scatter
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


def hierarchical_all_reduce(
    groups: NodeGroups,
    scatter: ReduceScatter = ring_reduce_scatter,
    across: AllReduce = ring_all_reduce,
    gather: AllGather = ring_all_gather,
) -> AllReduce:
    """The algorithm on these groups, from an algorithm for each of its three parts."""
    inside = groups.inside

    def hierarchical_all_reduce(
        x: Array, total: Array, comm: Communicator, op: np.ufunc
    ) -> Steps:
        """Fill `total` with the sum of the flat array x; may be in place."""
        counts = even_counts(x.size, groups.carriers)
        counts += [0] * (inside.size - groups.carriers)
        sums = Chunks(total, counts)
        mine = sums[inside.rank]
        if inside.size > 1:
            yield from scatter.steps(Chunks(x, counts), sums, inside, op)
        else:
            mine = x
        if groups.across is not None and groups.across.size > 1:
            yield from across.steps(mine, sums[inside.rank], groups.across, op)
        yield from gather.steps(sums, inside)

    return AllReduce(hierarchical_all_reduce)
