"""Lets messages move on while the main thread computes.

MPI moves a message on only inside its calls, and over a network only as far as a socket
takes: an operation that computes for 50 ms would leave the wire idle for most of that
time. So while anything is in flight a thread tests it every millisecond; kernels run
without Python's lock, so it gets its turn.
"""

from __future__ import annotations

import threading

from mpi4py import MPI

from mpiscale.comm.communicator import Request

NAP_S = 1e-3


class Mover:
    """Lets requests in flight move on while the main thread computes.

    By a thread of its own, if MPI was started for calls from several threads at once
    (MPI_THREAD_MULTIPLE, mpi4py's default); else only when `move` is called. Who calls
    methods of the requests, or starts new ones, holds `lock`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.in_flight: list[Request] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_moving, daemon=True)
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread.start()

    def move(self) -> None:
        """Test all that is in flight."""
        with self.lock:
            self.in_flight = [r for r in self.in_flight if not r.Test()]

    def _keep_moving(self) -> None:
        while not self._stop.wait(NAP_S):
            self.move()

    def stop(self) -> None:
        """End the thread; the requests are the caller's again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
