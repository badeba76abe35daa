"""Cross entropy and sampling from logits that are never gathered."""

from __future__ import annotations

from functools import partial

import numpy as np
from mpi4py import MPI

from mpiscale.backend import Array
from mpiscale.comm.communicator import Communicator
from mpiscale.nn.language_model import CrossEntropyLoss, Sampler, gumbel_scores
from mpiscale.nn.module import Module
from mpiscale.ops.cross_entropy import sharded_cross_entropy
from mpiscale.parallel.differentiable_collectives import all_reduce
from mpiscale.tensor import Tensor


class VocabParallelCrossEntropy(Module):
    """`ops.cross_entropy` for logits of which rank r holds the r-th block of columns.

    With the global maximum m:
        ln sum_k e^z_k = m + ln(sum over ranks of sum_j e^(z_j - m)).
    Per token, one number is all-reduced by maximum, then two by sum (three with label
    smoothing): sum of exponentials, the label's logit, and the sum of all logits.
    """

    def __init__(
        self, whole: CrossEntropyLoss, comm: Communicator, vocabulary: int
    ) -> None:
        self.comm, self.vocabulary = comm, vocabulary
        self.label_smoothing = whole.label_smoothing

    def forward(
        self,
        logits: Tensor,
        labels: Array,
        valid: int | None,
        overwrite: bool = False,
    ) -> Tensor:
        """logits [..., V / p], labels [...] global ids -> scalar, alike on all ranks"""
        smoothing = self.label_smoothing if self.training else 0.0
        return sharded_cross_entropy(
            logits,
            labels,
            valid,
            smoothing,
            overwrite,
            first=self.comm.rank * logits.shape[-1],
            vocabulary=self.vocabulary,
            join=partial(self._global_statistics, smoothed=smoothing > 0),
        )

    def _global_statistics(
        self,
        maximum: Array,
        sum_exp: Array,
        target: Array,
        logit_sum: Array,
        smoothed: bool,
    ) -> tuple[Array, Array, Array]:
        """(log normalizer, target logit, sum of logits) of the whole vocabulary."""
        top = np.empty_like(maximum)
        self.comm.Allreduce(maximum, top, op=MPI.MAX)
        terms = [sum_exp * np.exp(maximum - top), target]
        if smoothed:
            terms.append(logit_sum)
        total = all_reduce(np.stack(terms), self.comm)
        return top + np.log(total[0]), total[1], total[-1]


class VocabParallelSampler(Module):
    """Gumbel-max over all ranks: each finds the best entry it holds, the best wins."""

    def __init__(self, whole: Sampler, comm: Communicator, vocabulary: int) -> None:
        self.comm, self.vocabulary = comm, vocabulary

    def forward(self, logits: Array, temperature: float, key: int) -> int:
        """logits [V / p], temperature, random key -> global id, alike on all ranks"""
        first = self.comm.rank * len(logits)
        real = max(0, min(len(logits), self.vocabulary - first))  # the rest is padding
        best = np.array([-np.inf, first], np.float64)
        if real:
            scores = gumbel_scores(logits[:real], temperature, key, first)
            best[:] = scores.max(), first + scores.argmax()
        everyone = np.empty((self.comm.size, 2))
        self.comm.Allgather(best, everyone)
        return int(everyone[everyone[:, 0].argmax(), 1])  # the first of equals
