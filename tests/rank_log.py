"""What a rank tells the process that started it: a file per rank, a line per event.

A rank writes while it may be killed at any moment, so every line is one write, and
the reader leaves out a last line that was cut short.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SHOW_TRACEBACK = signal.SIGUSR2  # SIGUSR1 is Slurm's and the training loop's
Event = Literal["rank", "start", "report", "finish", "broken"]


class RankLog:
    """This process's file in `folder`, named by its process id."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("ab", buffering=0)

    def write(self, event: Event, value: object) -> None:
        """Append one event; `value` is a rank, a test's id, a report or a text."""
        line = json.dumps({"event": event, "value": value}, default=str)
        self._file.write(line.encode() + b"\n")


@dataclass
class RankRecord:
    """What one rank had told when it was read."""

    pid: int
    rank: int | None = None  # unknown until MPI is initialised
    started: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    reports: list[dict[str, Any]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # errors outside any test
    traceback: str = ""  # of every thread, where it hung or crashed

    @property
    def name(self) -> str:
        """`rank 2`, or the process id of a rank that isn't one yet."""
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank}"


def traceback_path(folder: Path) -> Path:
    """Where this process leaves its traceback when it hangs or crashes."""
    return folder / f"{os.getpid()}.traceback"


def read_rank_records(folder: Path) -> list[RankRecord]:
    """One record per rank that has begun, in the order of ranks."""
    records = [_read_record(path) for path in folder.glob("*.jsonl")]
    return sorted(records, key=lambda r: (r.rank is None, r.rank, r.pid))


def _read_record(path: Path) -> RankRecord:
    record = RankRecord(pid=int(path.stem))
    *lines, _cut_short = path.read_bytes().split(b"\n")
    for line in lines:
        entry = json.loads(line)
        match entry["event"]:
            case "rank":
                record.rank = entry["value"]
            case "start":
                record.started.add(entry["value"])
            case "report":
                record.reports.append(entry["value"])
            case "finish":
                record.finished.add(entry["value"])
            case "broken":
                record.broken.append(entry["value"])
    crash = path.with_suffix(".traceback")
    if crash.exists():
        record.traceback = crash.read_text(errors="replace")
    return record
