"""Which ranks share a node: the groups that a two-level algorithm works in.

On each node the first L ranks are carriers, L being the smallest number of ranks on any
node. Carrier j of every node forms column j; only columns send over the network. With
nodes of 2 and 3 ranks, L = 2:

            column 0   column 1
    node 0  rank 0     rank 1
    node 1  rank 2     rank 3     rank 4 (no carrier)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from mpiscale.comm.communicator import Communicator


@dataclass(frozen=True)
class NodeGroups:
    """Ranks by node, and the communicators inside this node and across nodes.

    Attributes:
        nodes: the ranks of each node, in order; nodes in the order of their first rank.
        inside: this node's ranks, in order.
        across: this carrier's column, in the order of the nodes; None on no carriers.
        node, local: this rank's place: nodes[node][local].
    """

    nodes: list[list[int]]
    inside: Communicator
    across: Communicator | None
    node: int
    local: int

    @property
    def carriers(self) -> int:
        """L, carriers on each node."""
        return min(map(len, self.nodes))

    def column(self, node: int, j: int) -> list[int]:
        """The ranks of a node for which carrier j stands: its local j, j + L, ..."""
        return self.nodes[node][j :: self.carriers]


def node_groups(comm: Communicator, node: object = None) -> NodeGroups:
    """Find the nodes of `comm`'s ranks, and make the groups; collective.

    node: what names this rank's node. By default MPI is asked which ranks share memory;
    a launcher may not tell it (srun with Open MPI), and a test wants nodes of its own.
    """
    nodes = nodes_of(comm, node)
    mine = next(i for i, ranks in enumerate(nodes) if comm.rank in ranks)
    local = nodes[mine].index(comm.rank)
    carriers = min(map(len, nodes))
    inside = comm.Split(mine, comm.rank)
    column = comm.Split(min(local, carriers), mine)
    across = column if local < carriers else None
    return NodeGroups(nodes, inside, across, mine, local)


def nodes_of(comm: Communicator, node: object = None) -> list[list[int]]:
    """The ranks of each node, in order; nodes in that of their first rank. Collective.

    node: as for `node_groups`.
    """
    names = comm.allgather(repr(shared_memory_id(comm) if node is None else node))
    return [
        [r for r, name in enumerate(names) if name == wanted]
        for wanted in dict.fromkeys(names)
    ]


def shared_memory_id(comm: Any) -> int:
    """The lowest rank with which this one shares memory, as MPI sees it."""
    bare = getattr(comm, "mpi", comm)
    shared = bare.Split_type(MPI.COMM_TYPE_SHARED, bare.rank)
    lowest: int = shared.bcast(bare.rank)
    shared.Free()
    return lowest
