"""Binomial trees: broadcast, reduce, gather and scatter in lg p steps.

Ranks are counted from the root. Node r of the tree has the children r + 1, r + 2,
r + 4, ... below its own lowest set bit; its subtree are the nodes r ... r + 2^k - 1.
With p = 8:

          0
     4    2   1
   6   5  3
   7

Broadcast and scatter go down, the largest subtree first; reduce and gather go up, the
smallest first.

operation    a node sends                                in all
broadcast    n to each child                             (p - 1) n
reduce       n to its parent, the root nothing           (p - 1) n
gather       the chunks of its subtree to its parent     each chunk depth times
scatter      to each child the chunks of its subtree     each chunk depth times

Time: lg p messages; n lg p elements for broadcast and reduce, (p - 1) / p n for gather
and scatter, where n is the whole.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpiscale.backend import Array, array_module
from mpiscale.comm.algorithms.chunks import Chunks
from mpiscale.comm.algorithms.kinds import Broadcast, Gather, Reduce, Scatter
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator


@dataclass(frozen=True)
class Node:
    """This rank's place in the tree: `number` is its rank counted from the root."""

    rank: int
    p: int
    root: int

    @property
    def number(self) -> int:
        """0 at the root."""
        return (self.rank - self.root) % self.p

    @property
    def end(self) -> int:
        """The subtree are the numbers from `number` up to, not including, `end`."""
        lowest = self.number & -self.number or self.p
        return min(self.number + lowest, self.p)

    @property
    def parent(self) -> int | None:
        """A rank; None at the root."""
        number = self.number
        return self.rank_of(number & (number - 1)) if number else None

    @property
    def children(self) -> list[int]:
        """Numbers, the smallest subtree first."""
        distances = [1 << k for k in range(self.p.bit_length())]
        lowest = self.number & -self.number or self.p
        return [
            self.number + d
            for d in distances
            if d < lowest and self.number + d < self.p
        ]

    def rank_of(self, number: int) -> int:
        """The rank with this number."""
        return (self.root + number) % self.p

    def subtree_end(self, child: int) -> int:
        """Where the subtree of a child ends."""
        return min(child + (child & -child), self.p)

    def counts(self, chunks: Chunks) -> list[int]:
        """Lengths of the chunks in the order of the numbers."""
        return [chunks.counts[self.rank_of(number)] for number in range(self.p)]


@Broadcast
def binomial_broadcast(x: Array, comm: Communicator, root: int) -> Steps:
    """Fill the flat array x with the root's."""
    node = Node(comm.rank, comm.size, root)
    if node.parent is not None:
        yield (comm.Irecv(x, node.parent),)
    for child in reversed(node.children):
        yield (comm.Isend(x, node.rank_of(child)),)


@Reduce
def binomial_reduce(
    x: Array, total: Array, comm: Communicator, op: np.ufunc, root: int
) -> Steps:
    """Leave the sum of x in the root's `total`; the others use it as working space."""
    node = Node(comm.rank, comm.size, root)
    inbox = array_module(total).empty_like(total)
    for child in node.children:
        yield (comm.Irecv(inbox, node.rank_of(child)),)
        x = op(x, inbox, out=total)
    if node.parent is not None:
        yield (comm.Isend(x, node.parent),)


@Gather
def binomial_gather(
    mine: Array, chunks: Chunks, comm: Communicator, root: int
) -> Steps:
    """Fill the root's chunks with each rank's `mine`."""
    node = Node(comm.rank, comm.size, root)
    counts = node.counts(chunks)[node.number : node.end]
    subtree = Chunks(array_module(mine).empty(sum(counts), mine.dtype), counts)
    subtree[0][...] = mine
    for child in node.children:
        first, end = child - node.number, node.subtree_end(child) - node.number
        yield (comm.Irecv(subtree[first:end], node.rank_of(child)),)
    if node.parent is not None:
        yield (comm.Isend(subtree.flat, node.parent),)
        return
    for number in range(node.p):
        chunks[node.rank_of(number)][...] = subtree[number]


@Scatter
def binomial_scatter(
    chunks: Chunks, mine: Array, comm: Communicator, root: int
) -> Steps:
    """Fill each rank's `mine` from the root's chunks."""
    node = Node(comm.rank, comm.size, root)
    counts = node.counts(chunks)[node.number : node.end]
    subtree = Chunks(array_module(mine).empty(sum(counts), mine.dtype), counts)
    if node.parent is None:
        for number in range(node.p):
            subtree[number][...] = chunks[node.rank_of(number)]
    else:
        yield (comm.Irecv(subtree.flat, node.parent),)
    for child in reversed(node.children):
        first, end = child - node.number, node.subtree_end(child) - node.number
        yield (comm.Isend(subtree[first:end], node.rank_of(child)),)
    mine[...] = subtree[0]
