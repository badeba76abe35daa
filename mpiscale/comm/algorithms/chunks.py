"""A flat array cut into one chunk for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mpiscale.backend import Array, array_module


class Chunks:
    """chunks[r] is the part of rank r, chunks[a:b] those of ranks a ... b - 1 in one.

    All are views: writing to a chunk writes to the array.

    Args:
        flat: contiguous array [sum(counts)].
        counts: elements of each chunk.
        alike: whether all ranks are known to have chunks of these lengths.
    """

    def __init__(self, flat: Array, counts: Sequence[int], alike: bool = False) -> None:
        self.flat, self.counts, self.alike = flat, list(counts), alike
        self.starts = list(accumulate(self.counts, initial=0))

    def __getitem__(self, ranks: int | slice) -> Array:
        if isinstance(ranks, slice):
            first, end, _ = ranks.indices(len(self.counts))
        else:
            first, end = ranks, ranks + 1
        return self.flat[self.starts[first] : self.starts[max(first, end)]]

    def __len__(self) -> int:
        return len(self.counts)


def block(number: int, length: int) -> slice:
    """The aligned block of `length` numbers with `number` in it: 5, 4 -> 4 ... 7."""
    first = number // length * length
    return slice(first, first + length)


def is_in_place(x: Array, sums: Array) -> bool:
    """Whether a reduction of x leaves its sums in x itself: if not, they lie apart."""
    return bool(array_module(x).may_share_memory(x, sums))


def even_counts(n: int, p: int) -> list[int]:
    """Lengths of p chunks of n elements as `np.array_split` cuts: longer ones first."""
    return [n // p + (r < n % p) for r in range(p)]
