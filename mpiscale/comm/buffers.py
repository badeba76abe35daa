"""What MPI can carry: checks and conversions of the caller's arrays.

MPI reads and writes plain contiguous memory of a few number types. Any other array
takes a detour, by the same two doors for every operation:

array                       to send               to receive
C-contiguous                as it is              as it is
any other strides           contiguous copy       temporary, copied back at the end
16-bit float, moved         the same memory, as 16-bit words
16-bit float, reduced       float32 copy          float32 temporary, rounded once

Refused: objects, strings, structured and byte-swapped types; receive buffers that are
read-only or in which two elements share memory. A Fortran-ordered array counts as any
other strides: mpi4py by itself would send its memory in the wrong order.

An array on a GPU takes the same doors; its copies lie on the same GPU, and the work is
queued on CuPy's current stream. `device_buffers.py` says how MPI gets at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiscale.backend import (
    FLOAT32,
    Array,
    DType,
    array_module,
    is_array,
    is_half,
    is_writeable,
)
from mpiscale.comm.streams import current_stream, freed_after

MOVED_AS_WORDS: dict[int, DType] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
}  # by size in bytes
FROM_ANOTHER_LIBRARY = 2  # value of dtype.isbuiltin for the types of ml_dtypes


def carried_dtype(dtype: DType) -> DType:
    """The type as which MPI moves `dtype`: itself, or words of the same size.

    Raises:
        TypeError: if elements of this type can't be moved.
    """
    if not dtype.isnative:
        raise TypeError(
            f"cannot move byte-swapped {dtype.str} elements: convert the array with "
            "x.astype(x.dtype.newbyteorder('='))"
        )
    if dtype == np.float16 or dtype.isbuiltin == FROM_ANOTHER_LIBRARY:
        return MOVED_AS_WORDS[dtype.itemsize]
    if dtype.kind in "biufc":
        return dtype
    raise TypeError(
        f"cannot move elements of type {dtype}: expected numbers (bool, integer, "
        "float or complex); the lower-case methods pickle Python objects"
    )


def reduced_dtype(dtype: DType) -> DType:
    """The type in which MPI sums `dtype`: itself, or float32 for 16-bit floats.

    Raises:
        TypeError: if elements of this type can't be summed.
    """
    if is_half(dtype):
        return FLOAT32
    if carried_dtype(dtype) != dtype or dtype.kind == "b":
        raise TypeError(
            f"cannot reduce elements of type {dtype}: convert the array to an integer "
            "type or to a float of at least 16 bits"
        )
    return dtype


def check_array(x: object, role: str) -> Array:
    """`x` itself if it is a NumPy array, or one of CuPy.

    Raises:
        TypeError: if it is anything else.
    """
    if not is_array(x):
        raise TypeError(
            f"{role} must be a NumPy array, got {type(x).__name__}: pass the array "
            "itself, which may be CuPy's too (a slice says how much), or use the "
            "lower-case method for objects"
        )
    return x


def check_object(x: object, method: str) -> None:
    """Refuse arrays where objects are pickled: slow, and limited in size."""
    if is_array(x):
        raise TypeError(
            f"{method} pickles small objects, got an array of {x.size} elements: "
            f"use {method.capitalize()}, which moves the memory itself"
        )


def shares_memory_with_itself(x: Array) -> bool:
    """Whether two elements of `x` may lie at the same place, as after a broadcast."""
    reach = x.itemsize  # how far the axes seen so far extend
    axes = zip(x.strides, x.shape, strict=True)
    for stride, n in sorted((abs(stride), n) for stride, n in axes if n > 1):
        if stride < reach:
            return True
        reach += (n - 1) * stride
    return False


def check_receivable(x: object, role: str) -> Array:
    """`x` itself if it is an array into which each element can be received.

    Raises:
        TypeError, ValueError: if not: no array, read-only, overlapping elements.
    """
    x = check_array(x, role)
    if not is_writeable(x):
        raise ValueError(f"{role} is read-only: receive into a copy of it")
    if not x.flags.c_contiguous and shares_memory_with_itself(x):
        raise ValueError(
            f"elements of {role} (shape {x.shape}, strides {x.strides}) share memory, "
            "so it can't hold what arrives: receive into a copy of it"
        )
    return x


def outgoing(x: object, role: str, reduced: bool = False) -> Array:
    """`x` as MPI can read it -> [x.size], contiguous, of a type that MPI knows."""
    x = check_array(x, role)
    as_contiguous = array_module(x).ascontiguousarray
    if reduced:
        return as_contiguous(x, reduced_dtype(x.dtype)).reshape(-1)
    word = carried_dtype(x.dtype)
    return as_contiguous(x).reshape(-1).view(word)


class Landing:
    """Where MPI writes what is meant for `target`: there, or in a temporary.

    `wire` [target.size] is contiguous and of a type that MPI knows. With `filled` it
    starts with the contents of `target`: for in-place operations, and for messages
    that may be shorter than the buffer.
    """

    __slots__ = ("_held", "_stream", "target", "wire")

    def __init__(
        self, target: object, role: str, reduced: bool = False, filled: bool = False
    ) -> None:
        target = check_receivable(target, role)
        dtype = reduced_dtype(target.dtype) if reduced else target.dtype
        if target.flags.c_contiguous and dtype == target.dtype:
            held = target
        elif filled:
            held = target.astype(dtype, order="C")
        else:
            held = array_module(target).empty(target.shape, dtype)
        self.target, self._held = target, held
        self._stream = None if held is target else current_stream(held)
        self.wire = held.reshape(-1).view(carried_dtype(dtype))

    def finish(self) -> None:
        """Bring what arrived to the target; call it once, when MPI is done."""
        if self._held is not self.target:
            self.target[...] = self._held
            freed_after(self._held, self._stream)


def check_apart(send: Array, recv: Array) -> None:
    """Refuse buffers that overlap: MPI may read one while it writes the other."""
    library = array_module(send)
    if library is array_module(recv) and library.may_share_memory(send, recv):
        raise ValueError(
            "sendbuf and recvbuf share memory: pass MPI.IN_PLACE as sendbuf, or a copy"
        )


class BlockSpec(NamedTuple):
    """An array cut into one block for each rank; counts and displs in elements."""

    array: Array
    counts: list[int]
    displs: list[int]

    @property
    def nbytes(self) -> int:
        """Size of all blocks in bytes."""
        return self.array.itemsize * sum(self.counts)

    def slices(self) -> list[slice]:
        """Where each rank's block lies in the flat array."""
        pairs = zip(self.displs, self.counts, strict=True)
        return [slice(start, start + count) for start, count in pairs]


def block_spec(spec: Any, ranks: int, role: str) -> BlockSpec:
    """Read array, (array, counts) or (array, (counts, displs)).

    Without counts the array is cut as by `np.array_split`, which is mpi4py's rule too.

    Raises:
        TypeError, ValueError: if it is none of these, or a block lies outside.
    """
    array, *rest = spec if isinstance(spec, (tuple, list)) else (spec,)
    array = check_array(array, role)
    paired = len(rest) == 1 and isinstance(rest[0], tuple) and len(rest[0]) == 2
    numbers = list(rest[0]) if paired and not _is_integers(rest[0]) else rest
    if len(rest) > 1 or not all(map(_is_integers, numbers)):
        raise TypeError(
            f"{role} must be array, (array, counts) or (array, (counts, displs)) with "
            f"integers, got after the array: {rest!r}"
        )
    counts = list(map(int, numbers[0])) if numbers else _even_counts(array.size, ranks)
    displs = list(map(int, numbers[1])) if len(numbers) == 2 else _packed(counts)
    for name, given in (("counts", counts), ("displs", displs)):
        if len(given) != ranks or min(given) < 0:
            raise ValueError(
                f"{role} needs {ranks} {name} >= 0, one for each rank, got {given}"
            )
    end = max(start + n for start, n in zip(displs, counts, strict=True))
    if end > array.size:
        raise ValueError(
            f"the blocks of {role} end at element {end}, but its array has "
            f"{array.size}: counts {counts}, displs {displs}"
        )
    return BlockSpec(array, counts, displs)


def _is_integers(numbers: object) -> bool:
    return isinstance(numbers, (Sequence, np.ndarray)) and all(
        isinstance(n, (int, np.integer)) for n in numbers
    )


def _even_counts(n: int, ranks: int) -> list[int]:
    return [n // ranks + (r < n % ranks) for r in range(ranks)]


def _packed(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:r]) for r in range(len(counts))]


def parts(n: int, longest: int) -> Iterator[slice]:
    """Slices of at most `longest` that cover 0 ... n - 1; one empty slice for n = 0."""
    for start in range(0, max(n, 1), longest):
        yield slice(start, min(start + longest, n))
