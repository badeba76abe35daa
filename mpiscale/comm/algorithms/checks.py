"""What the kinds of collectives check of their arguments before a message is sent."""

from __future__ import annotations

from collections.abc import Sequence

from mpiscale.backend import Array, array_module
from mpiscale.comm.algorithms.chunks import Chunks, even_counts

Counts = Sequence[int] | None


def array_of(x: Array, n: int, out: Array | None) -> Array:
    """`out` if it has n elements of x's type; a new flat array if it is None."""
    if out is None:
        return array_module(x).empty(n, x.dtype)
    if out.dtype != x.dtype:
        raise TypeError(f"out must be of x's type {x.dtype}, got {out.dtype}")
    check_length("out", out.size, n)
    return out


def is_chunk_of(whole: Array, counts: Sequence[int], rank: int, part: Array) -> bool:
    """Whether `part` is the memory of chunk `rank` of `whole`.

    Raises:
        ValueError: if they share memory otherwise.
    """
    if not array_module(whole).may_share_memory(whole, part):
        return False
    if whole.flags.c_contiguous and part.flags.c_contiguous:
        chunk = Chunks(whole.reshape(-1), counts)[rank]
        if address(chunk) == address(part) and chunk.nbytes == part.nbytes:
            return True
    raise ValueError(
        f"x and out share memory, but the smaller is not chunk {rank} of the other, "
        f"chunks of {list(counts)} elements: pass that chunk, or a copy"
    )


def address(x: Array) -> int:
    """Where the first element of x lies."""
    interface = getattr(x, "__cuda_array_interface__", None) or x.__array_interface__
    return int(interface["data"][0])


def checked_counts(counts: Counts, n: int, p: int) -> list[int]:
    """`counts` if there are p of them, which make n; an even cut if None."""
    if counts is None:
        return even_counts(n, p)
    if len(counts) != p or min(counts) < 0 or sum(counts) != n:
        raise ValueError(
            f"expected {p} counts >= 0, one for each rank, that sum to {n} elements; "
            f"got {list(counts)}"
        )
    return list(counts)


def check_length(role: str, got: int, expected: int) -> None:
    """Refuse an array of another length."""
    if got != expected:
        raise ValueError(f"{role} must have {expected} elements, got {got}")


def check_root(root: int, p: int) -> None:
    """Refuse a root that is no rank."""
    if not 0 <= root < p:
        raise ValueError(f"root must be a rank, 0 ... {p - 1}, got {root}")
