"""The ledger: who sent how many bytes to whom, from which line, and how long it took.

Every call of a communicator is booked when it starts and closed when it is done, so a
non-blocking call in flight is already counted; its seconds run until the Wait or Test
that saw it done. One entry costs 2 to 4 us: cheap enough to stay on.

`sent` is what this rank sends: exact for messages between two ranks (to itself: 0),
the closed formulas of `traffic.py` for collectives. `payload` is the size of the
caller's own array; the two differ in type where 16-bit floats are summed in float32.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

COMM_FOLDER = os.path.dirname(__file__) + os.sep
RECENT_ENTRIES = 10_000


@dataclass(slots=True)
class Entry:
    """One call of a communicator; sizes in bytes, times of `time.perf_counter`."""

    operation: str
    payload: int
    sent: int
    group: str
    group_size: int
    peer: int | None  # the rank a message goes to or, if only received, comes from
    transport: str
    phase: str
    where: str  # file:line of the first frame outside this package
    start: float
    total: Total  # of all calls like this one
    end: float = math.nan  # not a number while the call is in flight


class Span(NamedTuple):
    """A block of code that was run as a phase; times of `time.perf_counter`."""

    phase: str
    label: str  # which of many alike: "stage 2, micro-batch 5"
    start: float
    end: float


class Key(NamedTuple):
    """What running totals are kept by."""

    phase: str
    operation: str
    group: str
    where: str


@dataclass(slots=True)
class Total:
    """Sums over all calls with the same key; sizes in bytes."""

    calls: int = 0
    payload: int = 0
    sent: int = 0
    seconds: float = 0.0


class Ledger:
    """Books every call: the latest one by one, all of them as totals by line.

    Use:  with ledger.phase("forward"): ...;  print(ledger.table())
    """

    def __init__(self, recent: int = RECENT_ENTRIES) -> None:
        self.recent: deque[Entry] = deque(maxlen=recent)
        self.spans: deque[Span] = deque(maxlen=recent)
        self.totals: dict[Key, Total] = {}
        self._phase = ""

    def begin(
        self,
        operation: str,
        payload: int,
        sent: int,
        group: str,
        group_size: int,
        peer: int | None = None,
        transport: str = "mpi",
    ) -> Entry:
        """Book a call that starts now; hand the entry to `end` when it is done."""
        phase, where = self._phase, calling_line()
        total = self._total(Key(phase, operation, group, where))
        total.calls += 1
        total.payload += payload
        total.sent += sent
        entry = Entry(
            operation,
            payload,
            sent,
            group,
            group_size,
            peer,
            transport,
            phase,
            where,
            time.perf_counter(),
            total,
        )
        self.recent.append(entry)
        return entry

    def end(self, entry: Entry) -> None:
        """Close the entry of a call that is done."""
        entry.end = time.perf_counter()
        entry.total.seconds += entry.end - entry.start

    def add_bytes(self, entry: Entry, payload: int, sent: int) -> None:
        """Book bytes that were not known when the call started: pickled objects."""
        entry.payload += payload
        entry.sent += sent
        entry.total.payload += payload
        entry.total.sent += sent

    def _total(self, key: Key) -> Total:
        total = self.totals.get(key)
        if total is None:
            total = self.totals[key] = Total()
        return total

    @contextmanager
    def phase(self, name: str, label: str = "") -> Iterator[None]:
        """Book the calls of this block under `name`; inside another, as outer/name.

        label: tells it from others of that name in a trace.
        """
        outer = self._phase
        self._phase = f"{outer}/{name}" if outer else name
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(self._phase, label, start, time.perf_counter()))
            self._phase = outer

    def sent_bytes(self, phase: str | None = None, group: str | None = None) -> int:
        """Bytes this rank sent, in `phase` (and phases inside it) and in `group`."""
        return sum(
            total.sent
            for key, total in self.totals.items()
            if (phase is None or f"{key.phase}/".startswith(f"{phase}/"))
            and group in (None, key.group)
        )

    def reset(self) -> None:
        """Forget all calls, not the phase that is open."""
        self.recent.clear()
        self.spans.clear()
        self.totals.clear()

    def table(self) -> str:
        """The totals as text, one row for each line of code, most bytes first."""
        rows = [("sent", "calls", "ms", "operation", "group", "phase", "line")]
        order = sorted(self.totals.items(), key=lambda item: -item[1].sent)
        for key, total in order:
            rows.append(
                (
                    human_bytes(total.sent),
                    str(total.calls),
                    f"{1e3 * total.seconds:.1f}",
                    key.operation,
                    key.group,
                    key.phase or "-",
                    short_path(key.where),
                )
            )
        return columns(rows, right_aligned=3)


def calling_line() -> str:
    """file:line of the innermost frame that lies outside `mpiscale/comm`."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(COMM_FOLDER) and frame.f_back:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def short_path(where: str) -> str:
    """`where` with a path relative to the working directory if it lies below it."""
    return where.removeprefix(os.getcwd() + os.sep)


def human_bytes(n: float) -> str:
    """A size with three digits: 999 B, 1.50 kB, 12.3 MB (powers of 1000)."""
    if n < 1000:
        return f"{n:.0f} B"
    power = min(5, math.floor(math.log10(n * 1.001) / 3))
    return f"{n / 1000**power:#.3g}".rstrip(".") + " " + " kMGTP"[power] + "B"


def columns(rows: Sequence[tuple[str, ...]], right_aligned: int) -> str:
    """Rows of cells as text in columns, the first few of them aligned on the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i < right_aligned else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
