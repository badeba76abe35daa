"""What a rank's clock must be moved by to show the time of rank 0.

On one host all processes read the same clock. Between hosts rank r asks rank 0 for its
time; the answer is right to half of the round trip, so the fastest of several counts.

Source: F. Cristian, "Probabilistic clock synchronization", Distributed Computing 1989.
"""

from __future__ import annotations

import time

import numpy as np

from mpiscale.comm.communicator import Communicator

ROUNDS = 20


def clock_offset(comm: Communicator) -> float:
    """Seconds to add to this rank's `time.perf_counter`. Collective."""
    mine = 0.0
    for rank in range(1, comm.size):
        if comm.rank == 0:
            _answer(comm, rank)
        elif comm.rank == rank:
            mine = _ask(comm)
    return mine


def _answer(comm: Communicator, rank: int) -> None:
    question, now = np.empty(1), np.empty(1)
    for _ in range(ROUNDS):
        comm.Recv(question, rank)
        now[0] = time.perf_counter()
        comm.Send(now, rank)


def _ask(comm: Communicator) -> float:
    question, answer = np.zeros(1), np.empty(1)
    tries = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        comm.Send(question, 0)
        comm.Recv(answer, 0)
        end = time.perf_counter()
        tries.append((end - begin, float(answer[0]) - (begin + end) / 2))
    return min(tries)[1]
