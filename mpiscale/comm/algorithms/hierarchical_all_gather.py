"""Hierarchical all-gather: each chunk crosses the network once for each other node.

1. a rank that is no carrier gives its chunk to the carrier of its column
   (`node_groups.py`)
2. all-gather in each column, over the network: carrier j now has column j's chunks of
   all nodes
3. all-gather inside each node: the columns come together

Then the chunks, which arrived by columns, are put in the order of the ranks.

Over the network a node receives what the other nodes' ranks have, once; in a flat ring
whose ranks are dealt out cyclically, each of its ranks receives that.

Source: J. L. Traeff, "Efficient allgather for regular SMP-clusters", EuroPVM/MPI 2006.
"""

from __future__ import annotations

from mpiscale.backend import array_module
from mpiscale.comm.algorithms.chunks import Chunks
from mpiscale.comm.algorithms.kinds import AllGather
from mpiscale.comm.algorithms.node_groups import NodeGroups
from mpiscale.comm.algorithms.ring_all_gather import ring_all_gather
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


def hierarchical_all_gather(
    groups: NodeGroups,
    across: AllGather = ring_all_gather,
    gather: AllGather = ring_all_gather,
) -> AllGather:
    """The algorithm on these groups, from an algorithm for its last two parts."""
    inside, carriers = groups.inside, groups.carriers

    def hierarchical_all_gather(chunks: Chunks, comm: Communicator) -> Steps:
        """Fill all chunks; chunk `rank` is there already."""
        # By columns: column 0 of node 0, of node 1, ..., then column 1, ...
        order = [
            [groups.column(node, j) for node in range(len(groups.nodes))]
            for j in range(carriers)
        ]
        flat = [rank for column in order for ranks in column for rank in ranks]
        work = array_module(chunks.flat).empty_like(chunks.flat)
        by_rank = Chunks(work, [chunks.counts[rank] for rank in flat])
        place = {rank: i for i, rank in enumerate(flat)}
        sizes = [
            [sum(chunks.counts[rank] for rank in ranks) for ranks in column]
            for column in order
        ]
        columns = Chunks(work, list(map(sum, sizes)))

        by_rank[place[comm.rank]][...] = chunks[comm.rank]
        yield [
            inside.Isend(chunks[comm.rank], groups.local % carriers)
            for _ in range(groups.local >= carriers)
        ] + [
            inside.Irecv(by_rank[place[rank]], groups.nodes[groups.node].index(rank))
            for rank in groups.column(groups.node, groups.local)[1:]
            if groups.across is not None
        ]
        if groups.across is not None:
            j = groups.local
            yield from across.steps(Chunks(columns[j], sizes[j]), groups.across)
        counts = columns.counts + [0] * (inside.size - carriers)
        yield from gather.steps(Chunks(work, counts), inside)
        for rank in range(comm.size):
            chunks[rank][...] = by_rank[place[rank]]

    return AllGather(hierarchical_all_gather)
