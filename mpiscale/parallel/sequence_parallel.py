"""Sequence parallelism (Megatron-LM): what tensor parallelism leaves whole is cut, too.

Between the cut layers of a tensor-parallel group every rank holds the activations of
all tokens: norms, dropout and residuals are computed p times over. Here rank r holds
tokens r t / p ... (r + 1) t / p of each sequence, and the all-reduce is taken apart:

        x_r        own tokens, all features
        |  all-gather of tokens; backward: reduce-scatter     in place of f
      [ A_r ]      all tokens, own features
        |  gelu, or attention on the rank's own heads
      [ B_r ]
        |  reduce-scatter of tokens; backward: all-gather     in place of g
        y_r        own tokens, all features

The gathered x is not kept: backward gathers it again for dA = x^T dy. So all
activations of a layer are 1 / p of the serial ones,

    s b h (34 + 5 a s / h) / t     bytes, in the letters of the paper (eq. 4).

Norms, row biases and position embeddings see a part of the tokens only: their gradients
are terms of a sum over the group, and declared so (`tied_parameters.py`).

Elements sent by a rank, N tokens, L layers, width d, each (p - 1) / p N d:

                     forward                      backward
    each layer       2 all-gathers, 2 reduce-s.   the same, and 2 all-gathers again
    embedding        1 reduce-scatter             1 all-gather
    head             1 all-gather                 1 reduce-scatter, 1 all-gather again

Forward that is 4 N d a layer before the factor, as published. Sequences are padded to a
multiple of p; padding stands at the end, where no query sees it, and has no label.

Source: V. Korthikanti et al., "Reducing activation recomputation in large transformer
models", MLSys 2023 (arXiv:2205.05198), sections 4.2 and 4.3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.communicator import Communicator
from mpiscale.nn.language_model import Arranged, LanguageModel
from mpiscale.nn.placement import Placement
from mpiscale.ops.cross_entropy import IGNORE
from mpiscale.ops.matmul import lazy_product, linear, matrix_product
from mpiscale.parallel.tensor_parallel.boundary import Boundary
from mpiscale.parallel.tied_parameters import Tie
from mpiscale.tensor import LazyGradient, Tensor


class SequenceBoundary(Boundary):
    """Between cut layers every rank holds its own tokens, [b, t / p, n]."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def column_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [b, t / p, n] -> [b, t, m / p]"""
        return self._product(x, weight, bias, transposed=False)

    def column_logits(self, x: Tensor, table: Tensor) -> Tensor:
        """x [b, t / p, d], table [V / p, d] -> [b, t, V / p]"""
        return self._product(x, table, None, transposed=True)

    def row_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [b, t, n / p] -> [b, t / p, m]"""
        return self.leave(linear(x, weight))

    def leave(self, partial: Tensor) -> Tensor:
        """Sum the ranks' terms [b, t, n]; keep the own tokens [b, t / p, n]."""
        comm = self.comm

        def backward(grad: Array) -> tuple[Array]:
            return (gather_tokens(grad, comm),)

        y = scatter_sum_of_tokens(partial.data, comm)
        return Tensor.from_op(y, (partial,), backward)

    def _product(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None, transposed: bool
    ) -> Tensor:
        """All tokens times `matrix` [n, m], or [m, n] if transposed."""
        comm, own = self.comm, x.data
        b, _, n = own.shape

        def weight() -> Array:  # as [n, m]; ZeRO may have fetched it anew
            return matrix.data.T if transposed else matrix.data

        m = weight().shape[1]
        rows = gather_tokens(own, comm).reshape(-1, n)
        y = matrix_product(rows, weight())
        del rows  # not kept for backward
        if bias is not None:
            y += bias.data

        def backward(grad: Array) -> tuple[Array | LazyGradient, ...]:
            dy = grad.reshape(-1, m)
            again = gather_tokens(own, comm).reshape(-1, n)
            dx = matrix_product(dy, weight().T).reshape(b, -1, n)
            dx = scatter_sum_of_tokens(dx, comm)
            dw = lazy_product(dy.T, again) if transposed else lazy_product(again.T, dy)
            return (dx, dw) if bias is None else (dx, dw, dy.sum(axis=0))

        inputs = (x, matrix) if bias is None else (x, matrix, bias)
        return Tensor.from_op(y.reshape(b, -1, m), inputs, backward)


def gather_tokens(own: Array, comm: Communicator) -> Array:
    """All ranks' tokens in order.  [b, t / p, n] -> [b, t, n]"""
    p, (b, t, n) = comm.size, own.shape
    everyones = np.empty((p, b, t, n), own.dtype)
    comm.Allgather(np.ascontiguousarray(own), everyones)
    return np.moveaxis(everyones, 0, 1).reshape(b, p * t, n)


def scatter_sum_of_tokens(partial: Array, comm: Communicator) -> Array:
    """The sum over the ranks, own tokens only.  [b, t, n] -> [b, t / p, n]"""
    p, (b, t, n) = comm.size, partial.shape
    blocks = np.moveaxis(partial.reshape(b, p, t // p, n), 1, 0)
    own = np.empty((b, t // p, n), partial.dtype)
    comm.Reduce_scatter_block(np.ascontiguousarray(blocks), own)
    return own


def sequence_parallelize(
    model: LanguageModel, comm: Communicator, boundary: Boundary | None = None
) -> None:
    """Cut what `tensor_parallelize` has left whole, in place.

    Args:
        model: tensor-parallel over `comm`, not materialised.
        comm: the tensor-parallel group.
        boundary: how tokens travel; default: `SequenceBoundary`.

    Raises:
        ValueError: if the model is not tensor-parallel.
    """
    boundary = SequenceBoundary(comm) if boundary is None else boundary
    cut = [m for _, m in model.named_modules() if hasattr(m, "boundary")]
    if not cut:
        raise ValueError(
            "sequence parallelism works inside a tensor-parallel group, but no layer "
            "of this model is cut: call tensor_parallelize(model, comm) first"
        )
    for module in cut:
        module.boundary = boundary
    for parameter in model.parameters():
        if parameter.shard is None:
            parameter.ties = [t for t in parameter.ties if t.comm is not comm]
            parameter.ties.append(Tie(comm, "sum"))
    model.arrange = partial(pad_and_cut, rank=comm.rank, ranks=comm.size)


def pad_and_cut(
    tokens: Array,
    placement: Placement,
    labels: Array | None,
    rank: int,
    ranks: int,
) -> Arranged:
    """A batch whose length is a multiple of `ranks`, and which tokens are this rank's.

    Padding: token 0 at the last position, label IGNORE.
    """
    t = len(placement.positions)
    block = -(-t // ranks)
    more = block * ranks - t
    mine = slice(rank * block, (rank + 1) * block)
    return Arranged(
        np.pad(tokens, ((0, 0), (0, more))),
        replace(
            placement,
            positions=np.pad(placement.positions, (0, more), mode="edge"),
            resident=mine,
        ),
        None
        if labels is None
        else np.pad(labels, ((0, 0), (0, more)), constant_values=IGNORE),
    )
