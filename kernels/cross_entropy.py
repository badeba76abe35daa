"""Cross entropy, for a whole vocabulary and for one rank's columns of it alike.

The columns of `logits` hold the vocabulary ids first ... first + columns - 1. Ids from
`vocabulary` on are padding: they enter no sum and have gradient 0. Row statistics of
all shards joined give the loss:

    log_normalizer = maximum + log(sum_exp)         after shifting to one maximum
    loss = log_normalizer - (1 - a) target - a / vocabulary * logit_sum

with label smoothing a. A serial loss is the case of one shard.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.choose import choose, expect_shape
from mpiscale.kernels.exp import exp_of_nonpositive
from mpiscale.kernels.row_maximum import softmax_shift
from mpiscale.kernels.threads import row_kernel

Statistics = tuple[Array, Array, Array, Array]


def logits_statistics_reference(
    logits: Array, labels: Array, first: int, vocabulary: int
) -> Statistics:
    """What a shard knows of each row's loss.

    logits [n, columns], labels [n] int64 -> four arrays [n]: maximum (-inf if all
    columns are padding), sum_exp = sum of e^(logit - maximum), target = the label's
    logit, or 0 if the label is not among the columns, and logit_sum.
    """
    real = logits[:, : _real_columns(logits, first, vocabulary)]
    maximum = real.max(axis=1, initial=-np.inf)
    shift = np.where(maximum == -np.inf, 0, maximum)  # -inf - (-inf) is NaN
    sum_exp = np.exp(real - shift[:, None]).sum(axis=1)
    return maximum, sum_exp, _target(real, labels, first), real.sum(axis=1)


def cross_entropy_backward_reference(
    logits: Array,
    labels: Array,
    log_normalizer: Array,
    dloss: Array,
    label_smoothing: float,
    vocabulary: int,
    first: int,
    overwrite: bool = False,
) -> Array:
    """dlogits = dloss (softmax - (1 - a) onehot - a / vocabulary), a: smoothing.

    logits [n, columns], labels [n] int64, log_normalizer, dloss [n] -> [n, columns];
    exactly 0 in padding columns and in rows whose dloss is 0. With `overwrite` the
    result may take the place of the logits.
    """
    columns = _real_columns(logits, first, vocabulary)
    ids = first + np.arange(columns)
    softmax = np.exp(logits[:, :columns] - log_normalizer[:, None])
    onehot = labels[:, None] == ids
    dreal = softmax - (1 - label_smoothing) * onehot - label_smoothing / vocabulary
    used = dloss != 0
    dlogits = logits if overwrite else np.empty_like(logits)
    dlogits[...] = 0
    dlogits[used, :columns] = (dloss[:, None] * dreal)[used]
    return dlogits


def _real_columns(logits: Array, first: int, vocabulary: int) -> int:
    """How many of the columns are no padding; padding is at the end."""
    return min(max(vocabulary - first, 0), logits.shape[1])


def _target(real: Array, labels: Array, first: int) -> Array:
    local = (labels >= first) & (labels < first + real.shape[1])
    target = np.zeros(len(labels), real.dtype)
    target[local] = real[local, labels[local] - first]
    return target


def logits_statistics_numba(
    logits: Array, labels: Array, first: int, vocabulary: int
) -> Statistics:
    """As logits_statistics_reference, without temporaries."""
    rows = logits.shape[0]
    expect_shape("labels", labels, (rows,))
    maximum, sum_exp, target, logit_sum = np.empty((4, rows), logits.dtype)
    statistics = maximum, sum_exp, target, logit_sum
    columns = _real_columns(logits, first, vocabulary)
    logits = np.ascontiguousarray(logits)
    _statistics_rows(rows, logits, _integers(labels), first, columns, *statistics)
    return statistics


def cross_entropy_backward_numba(
    logits: Array,
    labels: Array,
    log_normalizer: Array,
    dloss: Array,
    label_smoothing: float,
    vocabulary: int,
    first: int,
    overwrite: bool = False,
) -> Array:
    """As cross_entropy_backward_reference, without temporaries."""
    rows = logits.shape[0]
    expect_shape("labels", labels, (rows,))
    expect_shape("log_normalizer", log_normalizer, (rows,))
    expect_shape("dloss", dloss, (rows,))
    in_place = overwrite and logits.flags.c_contiguous
    dlogits = logits if in_place else np.array(logits, order="C")
    _backward_rows(
        rows,
        dlogits,
        _integers(labels),
        np.ascontiguousarray(log_normalizer),
        np.ascontiguousarray(dloss),
        logits.dtype.type(label_smoothing),
        logits.dtype.type(label_smoothing / vocabulary),
        first,
        _real_columns(logits, first, vocabulary),
    )
    return dlogits


def _integers(labels: Array) -> Array:
    return np.ascontiguousarray(labels, np.int64)


@row_kernel
def _statistics_rows(
    lo: int,
    hi: int,
    logits: Array,
    labels: Array,
    first: int,
    columns: int,
    maximum: Array,
    sum_exp: Array,
    target: Array,
    logit_sum: Array,
) -> None:
    zero = logits.dtype.type(0)
    for row in range(lo, hi):
        real = logits[row, :columns]
        shift = softmax_shift(real)
        total = total_exp = zero
        for j in range(real.size):
            total += real[j]
            total_exp += exp_of_nonpositive(real[j] - shift)
        largest_is_finite = total_exp != zero
        maximum[row] = shift if largest_is_finite else logits.dtype.type(-np.inf)
        sum_exp[row], logit_sum[row] = total_exp, total
        label = labels[row] - first
        target[row] = real[label] if 0 <= label < columns else zero


@row_kernel
def _backward_rows(
    lo: int,
    hi: int,
    logits: Array,  # their gradient, afterwards
    labels: Array,
    log_normalizer: Array,
    dloss: Array,
    smoothing: float,
    smoothing_each: float,
    first: int,
    columns: int,
) -> None:
    one = logits.dtype.type(1)
    for row in range(lo, hi):
        slope, shift = dloss[row], log_normalizer[row]
        logits[row, columns:] = 0
        if slope == 0:  # an ignored row, whatever its logits are
            logits[row] = 0
            continue
        real = logits[row, :columns]
        for j in range(columns):
            softmax = exp_of_nonpositive(real[j] - shift)
            real[j] = slope * (softmax - smoothing_each)
        label = labels[row] - first
        if 0 <= label < columns:
            real[label] -= slope * (one - smoothing)


logits_statistics = choose(
    logits_statistics_reference,
    logits_statistics_numba,
    like=(None, None, None, None),
)
cross_entropy_backward = choose(
    cross_entropy_backward_reference, cross_entropy_backward_numba, like=("logits",)
)

if __name__ == "__main__":
    from mpiscale.kernels.bench import Case, main

    def labels_for(x: Array) -> Array:
        """Labels that differ from row to row."""
        return np.arange(x.shape[0]) % x.shape[1]

    main(
        Case(
            logits_statistics_reference,
            logits_statistics_numba,
            lambda x: (x, labels_for(x), 0, x.shape[1]),
        ),
        Case(
            cross_entropy_backward_reference,
            cross_entropy_backward_numba,
            lambda x: (x, labels_for(x), x[:, 0] + 8, x[:, 0], 0.1, x.shape[1], 0),
        ),
    )
