"""An embedding's gradient by the rows that were looked up, gathered from all ranks.

The gradient of a table of V rows is zero but for the rows of the ids that were looked
up. Summed like any other gradient it costs 2 (N - 1) / N V d elements, and it is
complete only at the very end of backward, when nothing is left to hide its message
behind. Here ranks exchange what they looked up instead:

    forward    rows = table[ids] are leaves of the graph: backward ends at them
    after it   all-gather of ids and of the rows' gradients; every rank adds
               gradient[ids] += rows

Sent: (N - 1) / N of T (d elements + an int64), T tokens in the global batch, which is
less than the table as long as T < 2 V. A head that uses the same table (tied weights)
still has its dense gradient, which is complete early and goes with the buckets.

Source: the sparse gradients of A. Sergeev, M. Del Balso, "Horovod: fast and easy
distributed deep learning in TensorFlow", 2018 (all-gather of IndexedSlices).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.communicator import Communicator
from mpiscale.nn.layers import Embedding
from mpiscale.ops.indexing import check_ids, scatter_add
from mpiscale.tensor import Tensor


class GatheredLookups:
    """Takes over an embedding's forward pass and its gradient.

    Args:
        embedding: of a materialised model.
        comm: the ranks with different samples.
        table_has_other_uses: whether a head uses the same table (tied weights).
    """

    def __init__(
        self, embedding: Embedding, comm: Communicator, table_has_other_uses: bool
    ) -> None:
        self.embedding, self.table, self.comm = embedding, embedding.weight, comm
        self.table_has_other_uses = table_has_other_uses
        self._taken: list[tuple[Array, Tensor]] = []
        embedding.forward = self._forward  # type: ignore[method-assign]

    def _forward(self, ids: Array) -> Tensor:
        """ids [...] -> rows [..., d], a leaf while training"""
        check_ids(ids, self.table.shape[0], "token id")
        rows = Tensor(self.table.data[ids], requires_grad=self.embedding.training)
        if self.embedding.training:
            self._taken.append((ids.reshape(-1), rows))
        return rows

    def zero_grad(self) -> None:
        """Forget what was looked up."""
        self._taken.clear()

    def add_to_grad(self) -> None:
        """Add all ranks' rows to the table's gradient [V, d]; collective."""
        grad = self.table.grad
        assert grad is not None, "fill_missing_grad() comes first"
        d = grad.shape[-1]
        used = [(ids, rows.grad) for ids, rows in self._taken if rows.grad is not None]
        ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in used)])
        parts = [rows.reshape(-1, d).astype(grad.dtype) for _, rows in used]
        rows = np.concatenate([np.empty((0, d), grad.dtype), *parts])
        counts = np.empty(self.comm.size, np.int64)
        self.comm.Allgather(np.array([ids.size]), counts)
        all_ids = np.empty(counts.sum(), np.int64)
        all_rows = np.empty((counts.sum(), d), grad.dtype)
        self._gather(ids, all_ids, counts.tolist())
        self._gather(rows, all_rows, (d * counts).tolist())
        scatter_add(grad, all_ids, all_rows)
        self._taken.clear()

    def _gather(self, mine: Array, everyone: Array, counts: Any) -> None:
        self.comm.Allgatherv(mine.reshape(-1), (everyone.reshape(-1), counts))
