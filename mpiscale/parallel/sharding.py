"""Cut an array along an axis; put it together again.

A rank's part is a list of ranges of the full index, one after the other, and maybe
padding. That covers the plain block, the fused projection whose sections (query, key,
value; gate, up) are cut one by one, and the vocabulary that does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.communicator import Communicator
from mpiscale.errors import block_length
from mpiscale.nn.parameter import Parameter

Range = tuple[int, int]


@dataclass(frozen=True)
class AxisShard:
    """The entries [start, stop) of each range along `axis`, then `padding` zeros."""

    axis: int
    ranges: tuple[Range, ...]
    padding: int = 0

    @property
    def length(self) -> int:
        """Length of the part along `axis`, without the padding."""
        return sum(stop - start for start, stop in self.ranges)

    def shape_of(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part of an array of shape `full`."""
        shape = list(full)
        shape[self.axis] = self.length + self.padding
        return tuple(shape)

    def cut(self, full: Array) -> Array:
        """The part of `full` in memory of its own."""
        part = np.zeros(self.shape_of(full.shape), full.dtype)
        at = 0
        for start, stop in self.ranges:
            part[self._along(at, at + stop - start)] = full[self._along(start, stop)]
            at += stop - start
        return part

    def put(self, part: Array, full: Array) -> None:
        """Write `part` to its place in `full`; the padding is left out."""
        at = 0
        for start, stop in self.ranges:
            full[self._along(start, stop)] = part[self._along(at, at + stop - start)]
            at += stop - start

    def _along(self, start: int, stop: int) -> tuple[slice, ...]:
        return (slice(None),) * self.axis + (slice(start, stop),)


def section_shard(
    axis: int, sections: tuple[int, ...], rank: int, ranks: int, what: str
) -> AxisShard:
    """Rank's block of every section that stands along `axis`, each cut evenly.

    Raises:
        InputError: if a section cannot be cut into equal blocks.
    """
    ranges, start = [], 0
    for width in sections:
        n = block_length(width, ranks, what)
        ranges.append((start + rank * n, start + (rank + 1) * n))
        start += width
    return AxisShard(axis, tuple(ranges))


def padded_shard(axis: int, n: int, rank: int, ranks: int) -> AxisShard:
    """Rank's block of ceil(n / ranks) entries; what lies beyond n is padding."""
    block = -(-n // ranks)
    start, stop = min(rank * block, n), min((rank + 1) * block, n)
    return AxisShard(axis, ((start, stop),), block - (stop - start))


def gather_whole(parameter: Parameter, part: Array, comm: Communicator) -> Array:
    """The full array from every rank's `part` of it (values or gradient), on all ranks.

    For tests, reports and exports: training never needs a whole parameter.
    """
    if parameter.shard is None:
        return part.copy()
    parts = comm.allgather((parameter.shard, part.tobytes()))
    full: Array = np.zeros(parameter.full_shape, part.dtype)
    for shard, data in parts:
        shape = shard.shape_of(parameter.full_shape)
        shard.put(np.frombuffer(data, part.dtype).reshape(shape), full)
    return full
