"""Double binary tree all-reduce: half of the array up and down each of two trees.

In a binary tree half of the ranks are leaves, which send but never add or pass on. So
there are two trees, and the leaves of one are the inner nodes of the other; each
carries half of the array, in segments that follow each other like cars of a train. With
p = 8 (for even p the second tree is the first one mirrored, for odd p shifted by one):

first      0              second    7
           4                        3
        2     6                  1     5
       1 3   5 7                0 2   4 6

All ranks move in time slots. A node of height h adds its children's segment s and sends
it to its parent in slot s + h; when it comes back from the root, a node of depth d
sends it to its children in slot s + (height of the tree) + d. So both ends of a message
name the same slot, and no rank waits for a later slot of another.

Traffic: about 2 n elements for each rank, in (number of segments) + 2 (height of the
tree) - 1 slots.

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

SEGMENT_BYTES = 128 << 10


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

    def __init__(self, half: Array, tree: Tree, segment: int) -> None:
        self.tree = tree
        self.segments = [half[part] for part in parts(half.size, segment)]
        longest = max(segment.size for segment in self.segments)
        empty = array_module(half).empty
        self.inboxes = [empty(longest, half.dtype) for _ in tree.children]
        self.arrived: list[tuple[Array, Array]] = []

    @property
    def slots(self) -> int:
        """How many slots it takes: the last segment reaches the deepest leaf."""
        return len(self.segments) + 2 * self.tree.levels - 1

    def start(self, slot: int, comm: Communicator) -> list[Request]:
        """The messages of one slot."""
        tree, requests = self.tree, []
        for (child, height), inbox in zip(tree.children, self.inboxes, strict=True):
            for mine in self._in_slot(slot - height):
                requests.append(comm.Irecv(inbox[: mine.size], child))
                self.arrived.append((mine, inbox[: mine.size]))
            for mine in self._in_slot(slot - tree.levels - tree.depth):
                requests.append(comm.Isend(mine, child))
        if tree.parent is not None:
            for mine in self._in_slot(slot - tree.height):
                requests.append(comm.Isend(mine, tree.parent))
            for mine in self._in_slot(slot - tree.levels - (tree.depth - 1)):
                requests.append(comm.Irecv(mine, tree.parent))
        return requests

    def add(self, op: np.ufunc) -> None:
        """Add what the children have sent in this slot."""
        for mine, inbox in self.arrived:
            op(mine, inbox, out=mine)
        self.arrived.clear()

    def _in_slot(self, index: int) -> list[Array]:
        return self.segments[index : index + 1] if index >= 0 else []


def double_binary_tree(segment_bytes: int = SEGMENT_BYTES) -> AllReduce:
    """The algorithm with segments of this size."""

    def double_binary_tree_all_reduce(
        total: Array, comm: Communicator, op: np.ufunc
    ) -> Steps:
        """Replace the flat array `total` by its sum over the ranks."""
        p, middle = comm.size, -(-total.size // 2)
        if p == 1:
            return
        segment = max(1, segment_bytes // total.itemsize)
        trains = [
            Train(total[:middle], Tree(comm.rank, p, second=False), segment),
            Train(total[middle:], Tree(comm.rank, p, second=True), segment),
        ]
        for slot in range(max(train.slots for train in trains)):
            yield [r for train in trains for r in train.start(slot, comm)]
            for train in trains:
                train.add(op)

    return AllReduce(double_binary_tree_all_reduce)


double_binary_tree_all_reduce = double_binary_tree()
