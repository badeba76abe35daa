"""Batches as a function of (seed, step) alone: the same on every layout, no state.

A split of n tokens is cut into W = floor((n - 1) / length) windows of `length` inputs
and the token after them; what is left behind the last window is not used. Epoch e
visits every window once, in an order drawn from (seed, e). Sample k of the run, counted
over the global batches (k = step * batch + i), is window order_{k // W}[k % W]:

    k        0  1  2  3 | 4  5  6  7 | 8  9 10 11      batch = 4, W = 6
    epoch    0  0  0  0   0  0  1  1   1  1  1  1      a batch may hold two epochs

So the position in the data is the step. Counting micro-batches instead, or keeping a
position to save and restore, has repeated or skipped samples after a change of layout
(EleutherAI/gpt-neox PR #308, huggingface/transformers PR #40691).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mpiscale.backend import Array
from mpiscale.data.token_file import Split, TokenFile
from mpiscale.errors import InputError
from mpiscale.rng import permutation

IGNORE = -100  # a label that is no token: PyTorch's ignore_index
IN_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of one step: the whole global batch, or a rank's part of it.

    tokens      [b, t] int64
    labels      [b, t] int64, the next token; IGNORE where it begins another document
    samples     [b] int64, index of each sample in the global batch
    positions   [t] int64, index of each token in its window
    documents   [b, t] int64, the document that each token belongs to
    valid       number of labels that are not IGNORE in the *global* batch
    """

    tokens: Array
    labels: Array
    samples: Array
    positions: Array
    documents: Array
    valid: int
    step: int

    def part(self, rank: int, ranks: int) -> Batch:
        """Rank `rank`'s samples; cut as np.array_split does, so evenly or nearly so.

        `valid` stays that of the global batch, by which the loss is divided.
        """
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be in 0 ... {ranks - 1}, got {rank}")
        rows = np.array_split(np.arange(len(self.samples)), ranks)[rank]
        mine = slice(rows[0], rows[-1] + 1) if rows.size else slice(0)
        return replace(
            self,
            tokens=self.tokens[mine],
            labels=self.labels[mine],
            samples=self.samples[mine],
            documents=self.documents[mine],
        )

    def with_valid(self, valid: int) -> Batch:
        """The same, with another number by which the loss is divided."""
        return replace(self, valid=valid)


class Batches:
    """`batches(step)` gives the global batch of that step.

    Args:
        token_file: must stay open while batches are asked for.
        split: which of its two splits.
        batch: samples in the global batch.
        length: tokens in a sample.
        seed: of the order of the samples.
        in_memory_bytes: a split below this size is read whole, on the first batch;
            of a larger one only the windows that are asked for.

    Raises:
        InputError: if batch or length is below 1, or the split has not one window.
    """

    def __init__(
        self,
        token_file: TokenFile,
        split: Split,
        batch: int,
        length: int,
        seed: int,
        in_memory_bytes: int = IN_MEMORY_BYTES,
    ) -> None:
        self.split, self.batch, self.length, self.seed = split, batch, length, seed
        self._file, self._in_memory_bytes = token_file, in_memory_bytes
        for name, value in (("batch", batch), ("length", length)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        tokens = token_file.length(split)
        self.windows = (tokens - 1) // length
        if self.windows < 1:
            shorter = f"a length of at most {tokens - 1}, or " if tokens > 1 else ""
            raise InputError(
                f"the {split} split has {tokens} tokens, expected at least "
                f"{length + 1}: one sample of length {length} and the token after it. "
                f"Use {shorter}more text."
            )
        self._orders: dict[int, Array] = {}

    def __call__(self, step: int) -> Batch:
        """The global batch of `step`, 0 being the first."""
        return self._batch(self.window_indices(step), step)

    def window_indices(self, step: int) -> Array:
        """Which windows the batch of `step` is made of, [batch] int64."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        first = step * self.batch
        places = [divmod(first + i, self.windows) for i in range(self.batch)]
        return np.array([self._order(epoch)[place] for epoch, place in places])

    def evaluation_batches(self, count: int) -> Iterator[Batch]:
        """The first `count` batches of the split in its own order.

        Ends with the split: the last batch may be smaller, and there may be fewer.
        """
        for step in range(count):
            first = step * self.batch
            last = min(first + self.batch, self.windows)
            if first >= last:
                return
            yield self._batch(np.arange(first, last), step)

    def _order(self, epoch: int) -> Array:
        """The windows in the order of `epoch`, [windows] int64."""
        if epoch not in self._orders:
            # The one before is kept: the next batch may have samples of both.
            before = {e: order for e, order in self._orders.items() if e == epoch - 1}
            order = permutation(self.windows, self.seed, "epoch", epoch)
            self._orders = before | {epoch: order}
        return self._orders[epoch]

    def _batch(self, windows: Array, step: int) -> Batch:
        begins = windows * self.length
        positions = np.arange(self.length + 1)
        ids = np.stack([self._read(b, b + self.length + 1) for b in begins.tolist()])
        ids = ids.astype(np.int64)
        documents = self._documents(begins[:, None] + positions)
        crosses = documents[:, 1:] != documents[:, :-1]
        labels = np.where(crosses, IGNORE, ids[:, 1:])
        return Batch(
            tokens=ids[:, :-1],
            labels=labels,
            samples=np.arange(len(windows)),
            positions=positions[:-1],
            documents=documents[:, :-1],
            valid=labels.size - int(crosses.sum()),
            step=step,
        )

    def _documents(self, places: Array) -> Array:
        """The document of each token at places [...] of the split, [...] int64."""
        starts = self._file.starts(self.split)
        return np.searchsorted(starts, places, side="right") - 1

    def _read(self, begin: int, end: int) -> Array:
        if self._whole is not None:
            return self._whole[begin:end]
        return self._file.read(self.split, begin, end)

    @cached_property
    def _whole(self) -> Array | None:
        """All tokens of the split, if they are few enough."""
        if self._file.nbytes(self.split) >= self._in_memory_bytes:
            return None
        return self._file.read(self.split, 0, self._file.length(self.split))
