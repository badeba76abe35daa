"""Index, gather, embedding: reading repeats entries, so backward adds into them.

An entry that was read several times gets the sum of its readers' gradients; an
assignment `dx[index] += dy` would keep only one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiscale.backend import Array, accumulation_dtype
from mpiscale.tensor import LazyGradient, Tensor


def index(x: Tensor, key: Any) -> Tensor:
    """y = x[key] for slices, integers, index arrays and boolean masks."""
    shape, dtype = x.shape, x.dtype

    def backward(grad: Array) -> tuple[Array]:
        dx = np.zeros(shape, dtype)
        if _is_basic(key):
            dx[key] = grad  # no entry is read twice
        else:
            np.add.at(dx, key, grad)
        return (dx,)

    return Tensor.from_op(x.data[key], (x,), backward)


def gather(x: Tensor, indices: Array, axis: int = -1) -> Tensor:
    """y[..., j, ...] = x[..., indices[..., j, ...], ...] along `axis`.

    indices has as many axes as x; a negative index counts from the end.
    """
    shape, dtype = x.shape, x.dtype
    indices = np.asarray(indices)
    expected = list(shape)
    expected[axis] = indices.shape[axis] if indices.ndim == x.ndim else -1
    if indices.shape != tuple(expected):
        raise ValueError(
            f"indices of shape {indices.shape} do not fit x {shape}: they must be "
            f"alike but for axis {axis}"
        )

    def backward(grad: Array) -> tuple[Array]:
        dx = np.zeros(shape, dtype)
        grid: list[Array] = list(np.indices(indices.shape, sparse=True))
        grid[axis] = indices
        np.add.at(dx, tuple(grid), grad)
        return (dx,)

    return Tensor.from_op(np.take_along_axis(x.data, indices, axis), (x,), backward)


def embedding(table: Tensor, ids: Array) -> Tensor:
    """Rows of a table.  table [V, d], ids [...] -> y [..., d]

    Backward:  dtable = onehot(ids)^T dy.

    Raises:
        ValueError: if an id is not in 0 ... V - 1; names it and where it stands.
    """
    vocabulary, d = table.shape
    check_ids(ids, vocabulary, "token id")
    flat_ids = ids.reshape(-1)

    def backward(grad: Array) -> tuple[LazyGradient]:
        rows = grad.reshape(-1, d)
        return (lazy_scatter(rows, flat_ids, vocabulary),)

    return Tensor.from_op(table.data[ids], (table,), backward)


def lazy_scatter(rows: Array, ids: Array, n: int) -> LazyGradient:
    """onehot(ids)^T rows.  rows [m, d], ids [m] in 0 ... n - 1 -> [n, d]"""

    def write(out: Array, accumulate: bool) -> None:
        if not accumulate:
            out[...] = 0
        scatter_add(out, ids, rows)

    return LazyGradient(write, (n, rows.shape[1]), rows.dtype)


def scatter_add(out: Array, ids: Array, rows: Array) -> None:
    """out[ids[i]] += rows[i] for every i, repeated ids included.

    Rows of equal id are brought together and summed in one pass, in float32 or better.
    """
    if ids.size == 0:
        return
    order = np.argsort(ids, kind="stable")
    sorted_ids = ids[order]
    starts = np.flatnonzero(np.diff(sorted_ids, prepend=sorted_ids[0] - 1))
    wide = rows[order].astype(accumulation_dtype(rows.dtype), copy=False)
    sums = np.add.reduceat(wide, starts, axis=0)
    out[sorted_ids[starts]] += sums.astype(out.dtype, copy=False)


def check_ids(ids: Array, n: int, what: str, ignore: int | None = None) -> None:
    """Refuse ids outside 0 ... n - 1 (but for `ignore`); name the first and its place.

    Raises:
        TypeError: if the ids are not integers.
        ValueError: if one is out of range.
    """
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"{what}s must be integers, got {ids.dtype}")
    wrong = (ids < 0) | (ids >= n)
    if ignore is not None:
        wrong &= ids != ignore
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        unless = "" if ignore is None else f" (or {ignore}, which is ignored)"
        raise ValueError(
            f"{what} {int(ids[place])} at index {place} is out of range: expected "
            f"0 ... {n - 1}{unless}"
        )


def _is_basic(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return all(p is None or p is Ellipsis or isinstance(p, (int, slice)) for p in parts)
