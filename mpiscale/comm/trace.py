"""A run's timeline as a file that Perfetto and chrome://tracing open.

Every rank is a process with two rows: the phases of the training step, and the calls of
communicators. Other timelines, such as a pipeline's predicted one, are more processes
beside them.

Source of the format: "Trace Event Format", Google, the JSON object form; times in
microseconds. https://ui.perfetto.dev opens it: nothing is uploaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from mpiscale.comm.clock import clock_offset
from mpiscale.comm.communicator import Communicator
from mpiscale.comm.ledger import Ledger, short_path

T = TypeVar("T")


class Slice(NamedTuple):
    """A bar in the picture; times in seconds of any one clock."""

    process: str  # "rank 3"
    row: str  # "passes"
    name: str
    start: float
    end: float
    details: Mapping[str, str | int | float] = MappingProxyType({})


def gather_trace(comm: Communicator, ledger: Ledger) -> list[Slice] | None:
    """What all ranks' ledgers remember, on rank 0's clock; None on the others.

    Collective over `comm`.
    """
    slices = slices_of(ledger, f"rank {comm.rank}", clock_offset(comm))
    everyones = comm.gather([(*s[:-1], dict(s.details)) for s in slices])
    if everyones is None:
        return None
    return [Slice(*fields) for rank in everyones for fields in rank]


def slices_of(ledger: Ledger, process: str, offset: float = 0.0) -> list[Slice]:
    """A ledger's latest phases and calls; those still in flight are left out."""
    slices = [
        Slice(process, "phases", s.label or s.phase, s.start + offset, s.end + offset)
        for s in ledger.spans
    ]
    for call in ledger.recent:
        if math.isnan(call.end):
            continue
        details: dict[str, str | int | float] = {
            "bytes sent": call.sent,
            "group": call.group,
            "phase": call.phase,
            "line": short_path(call.where),
        }
        if call.peer is not None:
            details["peer"] = call.peer
        start, end = call.start + offset, call.end + offset
        row = "calls in flight" if call.operation.startswith("I") else "calls"
        slices.append(Slice(process, row, call.operation, start, end, details))
    return slices


def write_trace(path: Path, slices: Iterable[Slice]) -> None:
    """Write the file; the earliest slice is at time 0."""
    path.write_text(json.dumps(trace_events(slices)))


def trace_events(slices: Iterable[Slice]) -> dict[str, Any]:
    """The file's content."""
    slices = list(slices)
    begin = min((s.start for s in slices), default=0.0)
    processes = _numbers(s.process for s in slices)
    rows = _numbers((s.process, s.row) for s in slices)
    events: list[dict[str, Any]] = [
        _named("process_name", name, pid) for name, pid in processes.items()
    ]
    events += [
        _named("thread_name", row, processes[process], tid)
        for (process, row), tid in rows.items()
    ]
    for s in slices:
        events.append(
            {
                "name": s.name,
                "cat": s.row,
                "ph": "X",
                "ts": round(1e6 * (s.start - begin), 3),
                "dur": round(1e6 * (s.end - s.start), 3),
                "pid": processes[s.process],
                "tid": rows[s.process, s.row],
                "args": dict(s.details),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _numbers(names: Iterable[T]) -> dict[T, int]:
    """Name -> number, in the order in which they first appear."""
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def _named(what: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
