"""Double binary tree all-reduce: half of the array up and down each of two trees.

In a binary tree half of the ranks are leaves, which send but never add or pass on. So
there are two trees, and the leaves of one are the inner nodes of the other; each
carries half of the array, in segments that follow each other like cars of a train. For
even p the second tree is the first one mirrored, for odd p shifted by one (and rank 0,
a root with one child, may be an inner node again). With p = 8:

first      0              second    7
           4                        3
        2     6                  1     5
       1 3   5 7                0 2   4 6

All ranks move in time slots. A node of height h adds its children's segment s and sends
it to its parent in slot s + h; when it comes back from the root, a node of depth d
sends it to its children in slot s + (height of the tree) + d. So both ends of a message
name the same slot, and no rank waits for a later slot of another.

Traffic: in each tree, n / 2 elements to the parent and to each child, in as many
messages as there are segments: at most 2 n for a rank, 2 (p - 1) / p n on average.
Time: (number of segments) + 2 (height of the tree) - 1 slots.

Source: P. Sanders, J. Speck, J. L. Traeff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 35(12), 2009; the trees are NCCL's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpiscale.backend import Array, array_module
from mpiscale.comm.algorithms.kinds import AllReduce
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.buffers import parts
from mpiscale.comm.communicator import Communicator, Request

SEGMENT_BYTES = 1 << 20  # fastest for 1 to 16 MiB on 2 and 4 ranks of one node


def tree_parent(rank: int, p: int) -> int | None:
    """The parent of a rank in the first tree; rank 0 is the root.

    Clear the lowest set bit and set the one above it; where that leaves the tree, only
    clear it.
    """
    if rank == 0:
        return None
    lowest = rank & -rank
    parent = (rank ^ lowest) | (lowest << 1)
    return parent if parent < p else rank ^ lowest


class Tree:
    """One of the two trees, seen by one rank.

    Attributes:
        parent: None on the root.
        children: each with its height, the longest way down to a leaf.
        height, depth: of this rank: the longest way down, the way up to the root.
        levels: height of the root.
    """

    def __init__(self, rank: int, p: int, second: bool) -> None:
        parents: dict[int, int | None] = {}
        for r in range(p):
            parent = tree_parent(r, p)
            if second:
                r = _in_second(r, p)
                parent = None if parent is None else _in_second(parent, p)
            parents[r] = parent
        heights = dict.fromkeys(range(p), 0)
        for r in range(p):
            for above, node in enumerate(_way_up(r, parents)):
                heights[node] = max(heights[node], above)
        self.parent = parents[rank]
        self.children = [(r, heights[r]) for r in range(p) if parents[r] == rank]
        way_up = list(_way_up(rank, parents))
        self.height, self.depth = heights[rank], len(way_up) - 1
        self.levels = heights[way_up[-1]]


def _in_second(rank: int, p: int) -> int:
    return (rank + 1) % p if p % 2 else p - 1 - rank


def _way_up(rank: int, parents: dict[int, int | None]) -> Iterator[int]:
    node: int | None = rank
    while node is not None:
        yield node
        node = parents[node]


class Train:
    """Half of the array on its way up and down one tree, segment after segment."""

    def __init__(self, x: Array, total: Array, tree: Tree, segment: int) -> None:
        self.tree = tree
        # Of each segment: what this rank has summed so far, and where sums go.
        self.terms = [x[part] for part in parts(x.size, segment)]
        self.sums = [total[part] for part in parts(x.size, segment)]
        empty = array_module(x).empty
        self.inboxes = [empty(self.terms[0].size, x.dtype) for _ in tree.children]
        self.arrived: list[tuple[int, Array]] = []

    @property
    def slots(self) -> int:
        """How many slots it takes: the last segment reaches the deepest leaf."""
        return len(self.terms) + 2 * self.tree.levels - 1

    def start(self, slot: int, comm: Communicator) -> list[Request]:
        """The messages of one slot."""
        tree, requests = self.tree, []
        for (child, height), inbox in zip(tree.children, self.inboxes, strict=True):
            if self._exists(s := slot - height):
                arriving = inbox[: self.terms[s].size]
                requests.append(comm.Irecv(arriving, child))
                self.arrived.append((s, arriving))
            if self._exists(s := slot - tree.levels - tree.depth):
                requests.append(comm.Isend(self.sums[s], child))
        if tree.parent is not None:
            if self._exists(s := slot - tree.height):
                requests.append(comm.Isend(self.terms[s], tree.parent))
            if self._exists(s := slot - tree.levels - (tree.depth - 1)):
                requests.append(comm.Irecv(self.sums[s], tree.parent))
        return requests

    def add(self, op: np.ufunc) -> None:
        """Add what the children have sent in this slot."""
        for s, arrived in self.arrived:
            self.terms[s] = op(self.terms[s], arrived, out=self.sums[s])
        self.arrived.clear()

    def _exists(self, segment: int) -> bool:
        return 0 <= segment < len(self.terms)


def double_binary_tree(segment_bytes: int = SEGMENT_BYTES) -> AllReduce:
    """The algorithm with segments of this size."""

    def double_binary_tree_all_reduce(
        x: Array, total: Array, comm: Communicator, op: np.ufunc
    ) -> Steps:
        """Fill `total` with the sum of the flat array x; may be in place."""
        p, middle = comm.size, -(-x.size // 2)
        segment = max(1, segment_bytes // total.itemsize)
        first, second = Tree(comm.rank, p, False), Tree(comm.rank, p, True)
        trains = [
            Train(x[:middle], total[:middle], first, segment),
            Train(x[middle:], total[middle:], second, segment),
        ]
        for slot in range(max(train.slots for train in trains)):
            yield [r for train in trains for r in train.start(slot, comm)]
            for train in trains:
                train.add(op)

    return AllReduce(double_binary_tree_all_reduce)


double_binary_tree_all_reduce = double_binary_tree()
