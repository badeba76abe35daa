"""Traces of ledgers, and clocks of ranks brought together."""

import json

import numpy as np
import pytest

from mpiscale.comm.clock import clock_offset
from mpiscale.comm.ledger import Ledger
from mpiscale.comm.trace import Slice, slices_of, trace_events, write_trace
from tests.communicators import world_communicator


def test_phases_and_calls_become_slices():
    ledger = Ledger()
    with ledger.phase("backward", "layer 3"):
        entry = ledger.begin("Allreduce", 80, 40, "dp", 2, peer=1)
        ledger.end(entry)
        ledger.begin("Irecv", 8, 0, "dp", 2)  # still in flight
    call, phase = sorted(slices_of(ledger, "rank 0", 10.0), key=lambda s: s.row)
    assert (phase.row, phase.name) == ("phases", "layer 3")
    assert phase.start <= call.start <= call.end <= phase.end
    assert call.start == entry.start + 10.0
    assert call.name == "Allreduce"
    assert call.details["bytes sent"] == 40
    assert call.details["peer"] == 1
    assert call.details["phase"] == "backward"


def test_non_blocking_calls_have_a_row_of_their_own():
    ledger = Ledger()
    ledger.end(ledger.begin("Isend", 8, 8, "pp", 2))
    assert slices_of(ledger, "rank 1")[0].row == "calls in flight"


def test_events_are_in_microseconds_from_the_first(tmp_path):
    slices = [
        Slice("rank 0", "calls", "Send", 5.0, 5.5),
        Slice("rank 1", "calls", "Recv", 4.0, 5.5, {"bytes sent": 3}),
    ]
    write_trace(tmp_path / "t.json", slices)
    events = json.loads((tmp_path / "t.json").read_text())
    assert events == trace_events(slices)
    first, second = (e for e in events["traceEvents"] if e["ph"] == "X")
    assert (first["ts"], first["dur"]) == (1e6, 5e5)
    assert (second["ts"], second["args"]) == (0, {"bytes sent": 3})
    assert first["pid"] != second["pid"] and first["tid"] != second["tid"]
    assert trace_events([])["traceEvents"] == []


def test_the_ledger_forgets_spans_on_reset():
    ledger = Ledger(recent=2)
    for name in ("a", "b", "c"):
        with ledger.phase(name):
            pass
    assert [span.phase for span in ledger.spans] == ["b", "c"]
    ledger.reset()
    assert not ledger.spans


@pytest.mark.mpi(ranks=(1, 3))
def test_clocks_of_one_host_agree():
    offset = clock_offset(world_communicator())
    assert abs(offset) < 5e-3


@pytest.mark.mpi(ranks=(2,))
def test_a_clock_that_is_off_is_found(monkeypatch):
    comm = world_communicator()
    late = 100.0 if comm.rank == 1 else 0.0

    class Clock:
        import time as real

        @classmethod
        def perf_counter(cls):
            return cls.real.perf_counter() + late

    monkeypatch.setattr("mpiscale.comm.clock.time", Clock)
    expected = -100.0 if comm.rank == 1 else 0.0
    np.testing.assert_allclose(clock_offset(comm), expected, atol=5e-3)
