"""How messages travel: latency, bandwidth, on a node and between nodes; a large one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpiscale.comm.communicator import Communicator
from mpiscale.doctor.finding import Finding

SMALL_BYTES, LARGE_BYTES = 8, 4 << 20
LARGER_THAN_A_COUNT = 2**31 + 8
ROUND_TRIPS = 20
SLOW = {"same node": (50e-6, 0.5e9), "other node": (500e-6, 0.1e9)}  # s, bytes/s


@dataclass(frozen=True)
class Ping:
    """Between two ranks.

    where: "same node" or "other node".
    latency_s: half a round trip of 8 bytes; bytes_per_second: of 4 MiB one way.
    """

    where: str
    ranks: tuple[int, int]
    latency_s: float
    bytes_per_second: float


def pings(comm: Communicator, nodes: Sequence[str]) -> list[Ping]:
    """From rank 0 to a rank on its node, and to one on another; collective."""
    found = []
    for where, alike in (("same node", True), ("other node", False)):
        others = [r for r in range(1, comm.size) if (nodes[r] == nodes[0]) == alike]
        if others:
            found.append(_ping(comm, where, others[0]))
    return found


def _ping(comm: Communicator, where: str, other: int) -> Ping:
    latency = _half_round_trip(comm, other, SMALL_BYTES)
    large = _half_round_trip(comm, other, LARGE_BYTES)
    return Ping(where, (0, other), latency, LARGE_BYTES / max(large - latency, 1e-9))


def _half_round_trip(comm: Communicator, other: int, nbytes: int) -> float:
    """The fastest of several; on ranks that take no part too, by a broadcast."""
    buffer, best = np.zeros(nbytes, np.uint8), float("inf")
    if comm.rank in (0, other):
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            if comm.rank == 0:
                comm.Send(buffer, other)
                comm.Recv(buffer, other)
            else:
                comm.Recv(buffer, 0)
                comm.Send(buffer, 0)
            best = min(best, (time.perf_counter() - start) / 2)
    fastest: float = comm.bcast(best)
    return fastest


def large_message(comm: Communicator, free_bytes: int) -> str:
    """Send 2^31 + 8 bytes from rank 0 to rank 1; what came of it, or "" if it arrived.

    free_bytes: memory that is free on the fullest node; both ranks may be on it.
    """
    needed = 2 * LARGER_THAN_A_COUNT
    if comm.size == 1 or free_bytes < needed + (1 << 30):
        return "not tried"
    right = True
    if comm.rank == 0:
        x = np.zeros(LARGER_THAN_A_COUNT, np.uint8)
        x[-1] = 7
        comm.Send(x, 1)
    elif comm.rank == 1:
        x = np.empty(LARGER_THAN_A_COUNT, np.uint8)
        comm.Recv(x, 0)
        right = bool(x[-1] == 7)
    return "" if all(comm.allgather(right)) else "did not arrive whole"


def judge_pings(found: Sequence[Ping]) -> list[Finding]:
    """A line for each kind of pair."""
    lines = []
    for ping in found:
        text = (
            f"{1e6 * ping.latency_s:.1f} us, {ping.bytes_per_second / 1e9:.2f} GB/s "
            f"between ranks {ping.ranks[0]} and {ping.ranks[1]}"
        )
        slowest, least = SLOW[ping.where]
        if ping.latency_s > slowest or ping.bytes_per_second < least:
            advice = (
                f"expected below {1e6 * slowest:.0f} us and above {least / 1e9:.1f} "
                "GB/s: are there more ranks than CPUs, or is the fast network not used?"
            )
            lines.append(Finding("warning", ping.where, text, advice))
        else:
            lines.append(Finding("ok", ping.where, text))
    return lines


def judge_large_message(outcome: str) -> Finding:
    """Counts above 2^31 are where MPI libraries differ."""
    subject = "large message"
    if outcome == "":
        return Finding("ok", subject, "2^31 + 8 bytes arrive whole")
    if outcome == "not tried":
        reason = "not tried: it takes two ranks and 5 GiB of free memory"
        return Finding("ok", subject, reason)
    advice = "lower max_count of MpiCommunicator, or use another MPI"
    return Finding("error", subject, f"2^31 + 8 bytes: {outcome}", advice)
