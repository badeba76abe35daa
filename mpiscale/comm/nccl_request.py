# ruff: noqa: N802  (the names are mpi4py's)
"""A call of NCCL in flight: an event on the stream on which it runs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal


class NcclRequest:
    """A call that was queued on a stream, or is collected to be queued with others.

    Waiting is done by streams, not by the program: after `Wait`, what is queued on the
    current stream runs when the call is done. To read the result on the host, wait for
    the stream, as cupy.asnumpy does.

    Args:
        cupy: for the stream that is current, now and later.
        launch: queues what is collected; called before anybody waits.
        check: raises if NCCL has failed.
        finish: brings what arrived to its place, by work on the current stream.
    """

    def __init__(
        self,
        cupy: ModuleType,
        launch: Callable[[], None],
        check: Callable[[], None],
        finish: Callable[[], None],
    ) -> None:
        self._cupy, self._launch, self._check = cupy, launch, check
        self._finish = finish
        self.stream: Any = cupy.cuda.get_current_stream()
        self._event: Any = None
        self._done = False

    def launched(self) -> None:
        """Mark the place on the stream at which the call is done."""
        self._event = self.stream.record(self._cupy.cuda.Event(disable_timing=True))

    def Wait(self) -> Literal[True]:
        """Make the current stream wait until the call is done."""
        if not self._done:
            self._launch()
            self._end()
        return True

    def Test(self) -> bool:
        """Whether the call is done on the GPU; does not wait."""
        if not self._done:
            self._launch()
            self._check()
            if self._event.done:
                self._end()
        return self._done

    def _end(self) -> None:
        self._done = True
        self._cupy.cuda.get_current_stream().wait_event(self._event)
        self._finish()
