"""Flat arrays that are used again: fresh memory costs a page fault for every 4 KiB."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array, DType


class BufferPool:
    """Arrays of one type, handed out by length and taken back.

    A buffer is given back only when nothing reads or writes it any more: in
    particular, when the collective that used it is done.
    """

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self._idle: dict[int, list[Array]] = {}

    def take(self, n: int) -> Array:
        """[n] with any contents."""
        idle = self._idle.get(n)
        return idle.pop() if idle else np.empty(n, self.dtype)

    def give_back(self, buffer: Array) -> None:
        """Let `buffer` be handed out again."""
        self._idle.setdefault(buffer.size, []).append(buffer)

    def drop(self) -> None:
        """Free what is idle."""
        self._idle.clear()

    @property
    def nbytes(self) -> int:
        """Memory of the idle buffers."""
        return sum(b.nbytes for idle in self._idle.values() for b in idle)
