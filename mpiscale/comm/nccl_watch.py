"""A watch on NCCL: a rank that has died ends the job, instead of hanging it.

An NCCL kernel whose peer is gone spins for ever, and so does the rank that waits for
it in CUDA, where no exception can reach it. NCCL notices in a thread of its own that
the connection is lost, but tells only those who ask. So a thread asks every second.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from mpiscale.comm.ending import abort

PERIOD_S = 1.0


class Watched(Protocol):
    """What the watch looks at."""

    failed: bool  # known to whoever will report it

    def check(self) -> None:
        """Raise RuntimeError if a rank or the network has gone."""


def end_job(text: str) -> None:
    """End all ranks at once."""
    abort(text, 1)


class NcclWatch:
    """Asks communicators for failures for as long as they live.

    Args:
        end: what to do about a failure, given its text.
        period: seconds between two looks.
    """

    def __init__(
        self, end: Callable[[str], None] = end_job, period: float = PERIOD_S
    ) -> None:
        self._end, self._period = end, period
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, comm: Watched) -> None:
        """Watch `comm`, too; the thread runs from the first one on."""
        with self._lock:
            self._watched.add(comm)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def look(self) -> None:
        """Ask every communicator once; one that raised elsewhere is left alone."""
        for comm in [comm for comm in self._watched if not comm.failed]:
            try:
                comm.check()
            except RuntimeError as error:
                self._end(str(error))

    def _run(self) -> None:
        while True:
            time.sleep(self._period)
            self.look()
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return
