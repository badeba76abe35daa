"""Starts collectives while backward runs, in one order on all ranks.

Gradients become complete roughly in the reverse order of the layers, but not in the
same order on every rank: a layer may be unused on some. Collectives must be called in
one order everywhere, or sums of different buckets meet (horovod/horovod #403). So
bucket i is started only when it *and all before it* are complete:

    order          b0    b1    b2    b3
    complete       yes   no    yes   no        b0 is in flight, b2 waits for b1
    at the end     b1, b2, b3 are started, with zeros where a gradient is missing

While anything is in flight `mover.py` moves it on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from mpiscale.comm.communicator import Request
from mpiscale.nn.parameter import Parameter
from mpiscale.parallel.mover import Mover
from mpiscale.tensor import Tensor


class StartWhenReady:
    """Calls `start(i)` for bucket i = 0, 1, ... when its gradients are complete.

    Args:
        buckets: the parameters of each, in the order agreed by all ranks.
        start: starts the collective of a bucket; a parameter without a gradient counts
            as zero.
        active: whether the backward pass that runs now is one to reduce; by default
            all are.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[Parameter]],
        start: Callable[[int], Request],
        active: Callable[[], bool] = lambda: True,
    ) -> None:
        self._buckets, self._start, self._active = buckets, start, active
        self._bucket_of = {
            id(parameter): i for i, bucket in enumerate(buckets) for parameter in bucket
        }
        self._begin()
        for bucket in buckets:
            for parameter in bucket:
                parameter.on_grad_ready = self._ready

    def _begin(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._seen: set[int] = set()
        self._requests: list[Request] = []
        self._mover: Mover | None = None

    def _ready(self, leaf: Tensor) -> None:
        """A gradient is complete: start what may start."""
        if not self._active():
            return
        parameter = cast(Parameter, leaf)
        if id(parameter) in self._seen:
            raise RuntimeError(
                f"a second backward() reached {parameter.name!r}, whose gradient may "
                "be on its way already: run all but the last backward of a step inside "
                "no_sync(), and call finish() after the last"
            )
        self._seen.add(id(parameter))
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._start_next()
        if self._mover is not None:
            self._mover.move()

    @property
    def _next(self) -> int:
        return len(self._requests)

    def _start_next(self) -> None:
        if self._mover is None:
            self._mover = Mover()
        with self._mover.lock:
            self._requests.append(self._start(self._next))
            self._mover.in_flight.append(self._requests[-1])

    def finish(self) -> None:
        """Start the buckets that are left, and wait until all are done."""
        while self._next < len(self._buckets):
            self._start_next()
        if self._mover is not None:
            self._mover.stop()
        for request in self._requests:
            request.Wait()
        self._begin()
