"""Data parallelism that sends gradients while backward still runs.

The flat gradient is cut into buckets, contiguous and in the order in which backward
completes them: from the last layer to the first. A bucket's all-reduce is started when
its last gradient is there, and runs while backward goes on with earlier layers:

    backward     layer 3 | layer 2 | layer 1 | embedding
    all-reduce            [ b0: 3 ] [ b1: 2 ]  [ b2 ... ]

Same bytes as `all_reduce_after_backward.py`, its oracle: 2 (N - 1) / N Psi elements.
Small buckets start early, large ones waste less on latency; what is still in flight
when backward ends is at least the last bucket.

Source: S. Li et al., "PyTorch distributed: experiences on accelerating data parallel
training", VLDB 2020, section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mpi4py import MPI

from mpiscale.comm.communicator import Communicator, Request
from mpiscale.nn.flat import FlatParameters, fill_missing_grad
from mpiscale.nn.parameter import Parameter
from mpiscale.parallel.data_parallel.all_reduce_after_backward import (
    AllReduceAfterBackward,
)
from mpiscale.parallel.data_parallel.gathered_lookups import GatheredLookups
from mpiscale.parallel.data_parallel.start_when_ready import StartWhenReady

BUCKET_BYTES = 16 << 20


@dataclass
class Bucket:
    """Neighbours in the flat arrays: their parameters, and where they lie."""

    place: slice
    parameters: list[Parameter] = field(default_factory=list)


class BucketedOverlap(AllReduceAfterBackward):
    """Replicas whose gradients are summed bucket by bucket, during backward.

    Args:
        flat: the materialised model's flat arrays, whole on every rank.
        comm, gradients: as for `AllReduceAfterBackward`.
        bucket_bytes: a bucket is closed when its gradients have at least this size.
        lookups: has taken over the model's embedding; None: its gradient is one like
            the others, and the last to be complete.
    """

    def __init__(
        self,
        flat: FlatParameters,
        comm: Communicator,
        gradients: Communicator | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        lookups: GatheredLookups | None = None,
    ) -> None:
        super().__init__(flat, comm, gradients)
        self.lookups = lookups
        table = None if lookups is None else lookups.table
        self.buckets = cut_into_buckets(flat, bucket_bytes, apart=table)
        if lookups is not None and lookups.table_has_other_uses:
            # A head's gradient is the first to be complete.
            self.buckets.insert(0, Bucket(flat.place(lookups.table), [lookups.table]))
        parameters = [bucket.parameters for bucket in self.buckets]
        self._reduction = StartWhenReady(
            parameters, self._start, lambda: self._synchronising
        )

    def _start(self, i: int) -> Request:
        """Start the all-reduce of bucket i, in place."""
        for parameter in self.buckets[i].parameters:
            fill_missing_grad(parameter)
        grad = self.flat.grad[self.buckets[i].place]
        return self.gradients.Iallreduce(MPI.IN_PLACE, grad)

    def finish(self) -> None:
        """Start what no gradient has started; wait for all buckets."""
        self._reduction.finish()
        if self.lookups is not None:
            fill_missing_grad(self.lookups.table)
            self.lookups.add_to_grad()

    def zero_grad(self) -> None:
        """Forget all gradients, at the beginning of a step."""
        super().zero_grad()
        if self.lookups is not None:
            self.lookups.zero_grad()


def cut_into_buckets(
    flat: FlatParameters, bucket_bytes: int, apart: Parameter | None = None
) -> list[Bucket]:
    """Contiguous parts of the flat arrays, in the order in which backward ends them.

    Matrices come from the last layer to the first. Gains and biases, which lie behind
    them and are few, come last: some of them belong to the first layer.

    Args:
        bucket_bytes: a bucket is closed when its gradients have at least this size.
        apart: a parameter that shall be in none.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    itemsize = flat.grad_dtype.itemsize
    buckets: list[Bucket] = []
    for decays in (True, False):
        is_full = True
        pairs = list(zip(flat.parameters, flat.places, strict=True))
        for parameter, place in reversed(pairs):
            if parameter.decays != decays:
                continue
            if parameter is apart:
                is_full = True
                continue
            if is_full:
                buckets.append(Bucket(slice(place.stop, place.stop)))
            bucket = buckets[-1]
            bucket.place = slice(place.start, bucket.place.stop)
            bucket.parameters.append(parameter)
            elements = bucket.place.stop - bucket.place.start
            is_full = elements * itemsize >= bucket_bytes
    return buckets
