"""How many elements one rank sends in each collective operation.

MPI does not show what happens inside its collectives, so the ledger books the volume
of the bandwidth-optimal algorithm: the ring for all-reduce, reduce-scatter and
all-gather, the chain for broadcast and reduce, the direct exchange for all-to-all.

operation          this rank sends              on average over the ranks
all-reduce         all but two chunks, twice    2 (p - 1) / p n
reduce-scatter     all blocks but its own       (p - 1) / p n
all-gather         all blocks but one           (p - 1) / p n
all-to-all         all blocks but its own       (p - 1) / p n
broadcast, reduce  n, the chain's end nothing   (p - 1) / p n
barrier            nothing                      0

n is the number of elements of the whole array, p the number of ranks. With p = 1
nothing is sent.

Source: S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models", SC 2020, section 7 (communication analysis).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpiscale.comm.communicator import Communicator


def chunk_length(n: int, p: int, index: int) -> int:
    """Elements of chunk `index` (taken modulo p) of `np.array_split` of n into p."""
    return n // p + (index % p < n % p)


def all_reduce_sent(n: int, p: int, rank: int) -> int:
    """Elements sent in an all-reduce of n elements, as in `ring_all_reduce.py`.

    The reduce-scatter sends all chunks but its own, the all-gather all but rank + 1.
    """
    return 2 * n - chunk_length(n, p, rank) - chunk_length(n, p, rank + 1)


def reduce_scatter_sent(block: int, p: int) -> int:
    """Elements sent in a reduce-scatter that leaves a block on each rank."""
    return (p - 1) * block


def all_gather_sent(blocks: Sequence[int], rank: int) -> int:
    """Elements sent in an all-gather of `blocks[r]` elements from each rank r.

    Around the ring a rank passes on every block but the one its right neighbour owns.
    """
    return sum(blocks) - blocks[(rank + 1) % len(blocks)]


def all_to_all_sent(blocks: Sequence[int], rank: int) -> int:
    """Elements sent in an all-to-all with `blocks[r]` elements for each rank r."""
    return sum(blocks) - blocks[rank]


def broadcast_sent(n: int, p: int, rank: int, root: int) -> int:
    """Elements sent in a broadcast along the chain root, root + 1, ..., root - 1."""
    return 0 if (rank + 1 - root) % p == 0 else n


def reduce_sent(n: int, rank: int, root: int) -> int:
    """Elements sent in a reduction along the chain root + 1, root + 2, ..., root."""
    return 0 if rank == root else n


class AllReduceVolume(NamedTuple):
    """What an all-reduce sends: for formulas of strategies that are given one.

    elements: (n, bytes of an element, communicator) -> elements sent by this rank.
    text: the same in words, for each element, p being the number of ranks.
    """

    elements: Callable[[int, int, Communicator], int]
    text: str


OPTIMAL = AllReduceVolume(
    lambda n, itemsize, comm: all_reduce_sent(n, comm.size, comm.rank), "2 (p - 1) / p"
)
