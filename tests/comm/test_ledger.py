"""The ledger: what an entry says, how phases nest, how totals add up."""

import math
import time

import pytest

from mpiscale.comm.ledger import Ledger, human_bytes


def book(ledger, sent=8, group="tp", operation="Send"):
    entry = ledger.begin(operation, sent, sent, group, 2, peer=1)
    ledger.end(entry)
    return entry


def test_entry_names_the_line_that_called():
    entry = book(Ledger())
    assert entry.where.startswith(__file__)
    assert entry.start <= entry.end


def test_phases_nest_and_outer_ones_include_inner_ones():
    ledger = Ledger()
    with ledger.phase("backward"):
        book(ledger, 1)
        with ledger.phase("recompute"):
            book(ledger, 2)
        book(ledger, 4)
    book(ledger, 8)
    with ledger.phase("backwards"):
        book(ledger, 16)
    assert ledger.sent_bytes() == 31
    assert ledger.sent_bytes("backward") == 7
    assert ledger.sent_bytes("backward/recompute") == 2
    assert ledger.sent_bytes("") == 8


def test_phase_ends_with_an_exception():
    ledger = Ledger()
    with pytest.raises(KeyError), ledger.phase("forward"):
        raise KeyError
    assert book(ledger).phase == ""


def test_sent_bytes_by_group():
    ledger = Ledger()
    book(ledger, 3, "tp")
    book(ledger, 5, "dp")
    assert ledger.sent_bytes(group="dp") == 5
    assert ledger.sent_bytes(phase="forward", group="dp") == 0


def test_calls_of_one_line_are_one_total():
    ledger = Ledger()
    for _ in range(3):
        book(ledger, 10)
    ((key, total),) = ledger.totals.items()
    assert (key.operation, key.group) == ("Send", "tp")
    assert (total.calls, total.payload, total.sent) == (3, 30, 30)
    assert total.seconds > 0


def test_call_in_flight_is_counted_but_has_no_end():
    ledger = Ledger()
    entry = ledger.begin("Isend", 8, 8, "tp", 2)
    assert ledger.sent_bytes() == 8
    assert math.isnan(entry.end)


def test_old_entries_go_but_totals_stay():
    ledger = Ledger(recent=2)
    for _ in range(5):
        book(ledger, 1)
    assert len(ledger.recent) == 2
    assert ledger.sent_bytes() == 5


def test_reset_forgets_calls():
    ledger = Ledger()
    with ledger.phase("forward"):
        book(ledger)
        ledger.reset()
        assert ledger.sent_bytes() == 0
        assert not ledger.recent
        assert book(ledger).phase == "forward"


def test_table_has_the_most_bytes_first():
    ledger = Ledger()
    with ledger.phase("forward"):
        book(ledger, 12, "tp", "Allreduce")
    book(ledger, 34_500, "dp", "Send")
    header, first, second = ledger.table().splitlines()
    assert header.split() == "sent calls ms operation group phase line".split()
    assert first.split()[:3] == ["34.5", "kB", "1"]
    assert second.split()[:3] == ["12", "B", "1"]
    assert "Allreduce  tp     forward  " in second
    assert "test_ledger.py:" in first


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.50 kB"),
        (999_999, "1.00 MB"),
        (12_345_678, "12.3 MB"),
        (123e9, "123 GB"),
    ],
)
def test_sizes_have_three_digits(n, text):
    assert human_bytes(n) == text


def test_one_entry_takes_microseconds():
    ledger, n, best = Ledger(), 1000, math.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(n):
            ledger.end(ledger.begin("Send", 8, 8, "tp", 2))
        best = min(best, (time.perf_counter() - start) / n)
    assert best < 50e-6  # 3 us on a quiet machine
