"""Embedding and vocabulary head cut by vocabulary entries."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.communicator import Communicator
from mpiscale.nn.language_model import VocabularyHead
from mpiscale.nn.layers import Embedding
from mpiscale.nn.module import Module
from mpiscale.ops.indexing import check_ids, lazy_scatter
from mpiscale.parallel.sharding import padded_shard
from mpiscale.parallel.tensor_parallel.boundary import Boundary, Replicated
from mpiscale.tensor import LazyGradient, Tensor


class VocabParallelEmbedding(Module):
    """Row `id` of a table of which rank r holds the r-th block of rows.

    ids [...] -> y [..., d], the same on all ranks: each rank looks up the ids it holds,
    takes zero for the others, and the results are summed. V is padded to a multiple of
    p; the padding is zero and stays so.
    """

    def __init__(self, whole: Embedding, comm: Communicator) -> None:
        self.comm, self.weight = comm, whole.weight
        self.boundary: Boundary = Replicated(comm)
        self.vocabulary = self.weight.full_shape[0]
        self.weight.shard = padded_shard(0, self.vocabulary, comm.rank, comm.size)

    def forward(self, ids: Array) -> Tensor:
        """ids [...] in 0 ... V - 1 -> [..., d]"""
        check_ids(ids, self.vocabulary, "token id")  # by everybody: an alien id has
        first = self.comm.rank * self.weight.shape[0]  # no owner who would notice
        return self.boundary.leave(
            _local_embedding(self.weight, ids.astype(np.int64) - first)
        )


def _local_embedding(table: Tensor, local_ids: Array) -> Tensor:
    """Rows of the ids in 0 ... n - 1, zeros for all others."""
    n, d = table.shape
    mine = (local_ids >= 0) & (local_ids < n)
    y = table.data[local_ids * mine] * mine[..., None].astype(table.dtype)

    def backward(grad: Array) -> tuple[LazyGradient]:
        return (lazy_scatter(grad[mine].reshape(-1, d), local_ids[mine], n),)

    return Tensor.from_op(y, (table,), backward)


class VocabParallelHead(Module):
    """x [..., width], the same on all ranks -> logits of this rank's entries."""

    def __init__(self, whole: VocabularyHead, comm: Communicator) -> None:
        self.boundary: Boundary = Replicated(comm)
        self.weight = whole.weight
        self.weight.shard = padded_shard(
            0, self.weight.full_shape[0], comm.rank, comm.size
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., V / p]; backward sums dx over the ranks"""
        return self.boundary.column_logits(x, self.weight)
