"""Cross entropy of logits against labels: the loss of a language model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.cross_entropy import cross_entropy_backward, logits_statistics
from mpiscale.ops.indexing import check_ids
from mpiscale.tensor import Tensor

IGNORE = -100


def cross_entropy(
    logits: Tensor,
    labels: Array,
    valid: int | None = None,
    label_smoothing: float = 0.0,
    overwrite: bool = False,
) -> Tensor:
    """Mean loss of the valid labels:  sum over them / `valid`.

    For one token, with p = softmax(logits) and smoothing a:
        loss = -(1 - a) ln p[label] - a mean_k ln p[k]
        dlogits = p - (1 - a) onehot(label) - a / V

    Args:
        logits: [..., V].
        labels: [...] integers in 0 ... V - 1, or IGNORE (-100) for a token that does
            not count.
        valid: number of labels that count in the whole, global batch; left out: in
            `labels`. With 0 the loss and all gradients are 0.
        label_smoothing: a, in 0 ... 1.
        overwrite: backward puts the gradient in the place of the logits, which nobody
            must look at any more: they are the largest array of a step.

    Raises:
        ValueError: if a label is neither in the vocabulary nor IGNORE.
    """
    return sharded_cross_entropy(
        logits, labels, valid, label_smoothing, overwrite, 0, logits.shape[-1], _alone
    )


# (maximum, sum_exp, target, logit_sum) of a shard, as in the kernel, all [n]
# -> (log normalizer, label's logit, sum of logits) of the whole vocabulary
Join = Callable[[Array, Array, Array, Array], tuple[Array, Array, Array]]


def sharded_cross_entropy(
    logits: Tensor,
    labels: Array,
    valid: int | None,
    label_smoothing: float,
    overwrite: bool,
    first: int,
    vocabulary: int,
    join: Join,
) -> Tensor:
    """`cross_entropy` where `logits` holds the columns first, first + 1, ...

    `join` brings the statistics of all shards together; columns from `vocabulary` on
    are padding.
    """
    flat_labels, counts, valid = prepare_labels(labels, logits, vocabulary, valid)
    flat, shape = logits.data.reshape(-1, logits.shape[-1]), logits.shape
    log_normalizer, target, logit_sum = join(
        *logits_statistics(flat, flat_labels, first, vocabulary)
    )
    losses = token_losses(
        log_normalizer, target, logit_sum, vocabulary, label_smoothing
    )

    def backward(grad: Array) -> tuple[Array]:
        dlogits = cross_entropy_backward(
            flat,
            flat_labels,
            log_normalizer,
            (counts * (grad / max(valid, 1))).astype(losses.dtype),
            label_smoothing,
            vocabulary,
            first,
            overwrite,
        )
        return (dlogits.reshape(shape),)

    return Tensor.from_op(mean_of_valid(losses, counts, valid), (logits,), backward)


def _alone(
    maximum: Array, sum_exp: Array, target: Array, logit_sum: Array
) -> tuple[Array, Array, Array]:
    """The one shard is the whole vocabulary."""
    return maximum + np.log(sum_exp), target, logit_sum


def prepare_labels(
    labels: Array, logits: Tensor, vocabulary: int, valid: int | None
) -> tuple[Array, Array, int]:
    """Checked labels in one row, which of them count, and how many count in all."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels of shape {labels.shape} do not fit logits of shape {logits.shape}:"
            f" expected {logits.shape[:-1]}"
        )
    check_ids(labels, vocabulary, "label", ignore=IGNORE)
    flat = np.ascontiguousarray(labels.reshape(-1), np.int64)
    counts = flat != IGNORE
    return flat, counts, int(counts.sum()) if valid is None else valid


def token_losses(
    log_normalizer: Array, target: Array, logit_sum: Array, vocabulary: int, a: float
) -> Array:
    """-(1 - a) ln p[label] - a mean_k ln p[k] from the statistics of the logits."""
    losses = log_normalizer - (1 - a) * target
    return losses - a / vocabulary * logit_sum if a else losses


def mean_of_valid(losses: Array, counts: Array, valid: int) -> Array:
    """Sum of the losses that count, divided by their number in the global batch."""
    total = losses[counts].sum(
        dtype=np.float64
    )  # the masked ones never enter: no 0*inf
    return np.asarray(total / max(valid, 1), losses.dtype)
