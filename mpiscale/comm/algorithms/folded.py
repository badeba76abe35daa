"""Ranks folded to a power of two, for algorithms that double or halve.

With p = 2^k + r ranks, rank 2 i joins rank 2 i + 1 for i < r: it gives its data away
before the algorithm, and gets the result afterwards. The others take part under new
numbers 0 ... 2^k - 1. With p = 6:

rank          0  1  2  3  4  5
new number    -  0  -  1  2  3

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005, section 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from mpiscale.comm.algorithms.chunks import Chunks


@dataclass(frozen=True)
class Folded:
    """p ranks, of which the largest power of two takes part."""

    p: int
    rank: int

    @property
    def size(self) -> int:
        """How many take part: the largest power of two that is not above p."""
        return 1 << (self.p.bit_length() - 1)

    @property
    def pairs(self) -> int:
        """How many ranks do not: as many pairs there are."""
        return self.p - self.size

    @property
    def in_pair(self) -> bool:
        """Whether this rank has a partner: the rank beside it."""
        return self.rank < 2 * self.pairs

    @property
    def sits_out(self) -> bool:
        """Whether this rank gives its data to its partner, rank + 1."""
        return self.in_pair and self.rank % 2 == 0

    @property
    def number(self) -> int:
        """This rank's new number, if it takes part."""
        return self.rank // 2 if self.in_pair else self.rank - self.pairs

    def rank_of(self, number: int) -> int:
        """The rank with this new number."""
        return 2 * number + 1 if number < self.pairs else number + self.pairs

    def merged(self, chunks: Chunks) -> Chunks:
        """One chunk for each number: those of a pair, which are neighbours, in one."""
        starts = [n + min(n, self.pairs) for n in range(self.size + 1)]
        counts = [sum(chunks.counts[a:b]) for a, b in pairwise(starts)]
        return Chunks(chunks.flat, counts)
