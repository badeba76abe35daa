"""Async tensor parallelism: products on the tokens that are here, while others travel.

Sequence parallelism waits for an all-gather before each product with a column-parallel
matrix, and for a reduce-scatter after each with a row-parallel one. Both go round a
ring, one rank's tokens at a time; and a product of many tokens is as many products of a
few. So the two are woven together, with p = 4 on rank 0:

    all-gather, then product          product, then reduce-scatter
    tokens of   0   3   2   1         tokens of   3   2   1   0
    computes    |   |   |   |         computes    |   |   |   |
    receives    3   2   1             receives    -   3's sum, 2's, 1's ... adds its own

Same bytes as `SequenceBoundary`, its oracle; sums are added up in another order.

Source: S. Wang et al., "Overlap communication with dependent computation via
decomposition in large deep learning models", ASPLOS 2023; "Async tensor parallelism" in
torchtitan, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.communicator import Communicator, Waitall
from mpiscale.ops.matmul import lazy_product, matrix_product
from mpiscale.parallel.sequence_parallel import SequenceBoundary
from mpiscale.tensor import LazyGradient, Tensor


class AsyncSequenceBoundary(SequenceBoundary):
    """`SequenceBoundary` whose messages travel while products are computed."""

    def row_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [b, t, n / p] -> [b, t / p, m]"""
        comm, p = self.comm, self.comm.size
        b, t, n = x.shape
        m, own = weight.shape[1], t // p
        rows = x.data

        def term(rank: int) -> Array:
            block = rows[:, rank * own : (rank + 1) * own].reshape(-1, n)
            return matrix_product(block, weight.data)

        y = reduce_scatter_around_the_ring(term, comm).reshape(b, own, m)

        def backward(grad: Array) -> tuple[Array | LazyGradient, ...]:
            dy, dx = np.empty((b, t, m), grad.dtype), np.empty((b, t, n), grad.dtype)
            for rank, block in around_the_ring(grad, comm):
                place = slice(rank * own, (rank + 1) * own)
                dy[:, place] = block
                product = matrix_product(block.reshape(-1, m), weight.data.T)
                dx[:, place] = product.reshape(b, own, n)
            dw = lazy_product(rows.reshape(-1, n).T, dy.reshape(-1, m))
            return dx, dw

        return Tensor.from_op(y, (x, weight), backward)

    def _product(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None, transposed: bool
    ) -> Tensor:
        comm, p, own = self.comm, self.comm.size, x.data
        b, t, n = own.shape

        def weight() -> Array:
            return matrix.data.T if transposed else matrix.data

        m = weight().shape[1]
        y = np.empty((b, p * t, m), own.dtype)
        for rank, block in around_the_ring(own, comm):
            part = matrix_product(block.reshape(-1, n), weight())
            if bias is not None:
                part += bias.data
            y[:, rank * t : (rank + 1) * t] = part.reshape(b, t, m)

        def backward(grad: Array) -> tuple[Array | LazyGradient, ...]:
            everyones = np.empty((p, b, t, n), own.dtype)
            again = comm.Iallgather(np.ascontiguousarray(own), everyones)

            def term(rank: int) -> Array:
                block = grad[:, rank * t : (rank + 1) * t].reshape(-1, m)
                return matrix_product(block, weight().T)

            dx = reduce_scatter_around_the_ring(term, comm).reshape(b, t, n)
            again.Wait()
            rows, dy = np.moveaxis(everyones, 0, 1).reshape(-1, n), grad.reshape(-1, m)
            dw = lazy_product(dy.T, rows) if transposed else lazy_product(rows.T, dy)
            return (dx, dw) if bias is None else (dx, dw, dy.sum(axis=0))

        inputs = (x, matrix) if bias is None else (x, matrix, bias)
        return Tensor.from_op(y, inputs, backward)


def around_the_ring(own: Array, comm: Communicator) -> Iterator[tuple[int, Array]]:
    """Every rank's array, the own one first; the next comes while one is worked on.

    All ranks have arrays of the same shape, and take all of them.
    """
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    here = np.ascontiguousarray(own)
    for step in range(p - 1):
        arriving = np.empty_like(here)
        requests = [comm.Irecv(arriving, left), comm.Isend(here, right)]
        yield (rank - step) % p, here
        Waitall(requests)
        here = arriving
    yield (rank + 1) % p, here


def reduce_scatter_around_the_ring(
    term: Callable[[int], Array], comm: Communicator
) -> Array:
    """The sum over the ranks of `term(rank)`, each computed while a sum travels."""
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    total = term(left)
    for step in range(p - 1):
        arriving = np.empty_like(total)
        requests = [comm.Irecv(arriving, left), comm.Isend(total, right)]
        mine = term((rank - 2 - step) % p)
        Waitall(requests)
        mine += arriving
        total = mine
    return total
