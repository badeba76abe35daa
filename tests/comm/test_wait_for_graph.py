"""Verdicts on who waits for whom, without any message."""

import pytest

from mpiscale.comm.debug.wait_for_graph import (
    CollectiveCall,
    RankState,
    cycle,
    deadlocked,
    report,
)

ALL = ((0, 1, 2), 1)


def message(rank, *peers, any_peer=False):
    text = f"Recv from {peers}"
    return RankState(rank, "waits", text, f"a.py:{rank}", peers, any_peer)


def collective(rank, number, arrived=None):
    arrivals = {ALL: number if arrived is None else arrived}
    call = CollectiveCall(ALL, number)
    return RankState(
        rank, "waits", "Barrier", f"a.py:{rank}", collective=call, arrivals=arrivals
    )


def computes(rank, **arrivals):
    return RankState(rank, "computes", "step", "b.py:5", arrivals={ALL: 0})


def finished(rank):
    return RankState(rank, "finished", arrivals={ALL: 0})


def by_rank(*states):
    return {state.rank: state for state in states}


@pytest.mark.parametrize(
    ("states", "stuck", "circle"),
    [
        ((message(0, 1), message(1, 0), computes(2)), [0, 1], [0, 1, 0]),
        ((message(0, 1), message(1, 2), message(2, 0)), [0, 1, 2], [0, 1, 2, 0]),
        ((message(0, 1), computes(1), computes(2)), [], []),
        ((message(0, 1), message(1, 2), computes(2)), [], []),
        ((message(0, 1), finished(1), computes(2)), [0], []),
        ((collective(0, 1), collective(1, 1), computes(2)), [], []),
        ((collective(0, 1), collective(1, 1), finished(2)), [0, 1], []),
        ((collective(0, 1), collective(1, 1), message(2, 0)), [0, 1, 2], [0, 2, 0]),
        ((collective(0, 2), collective(1, 2), collective(2, 1)), [], []),
        ((message(0, 1, 2, any_peer=True), finished(1), computes(2)), [], []),
        ((message(0, 1, 2, any_peer=True), finished(1), finished(2)), [0], []),
        ((message(0, 1, 2), finished(1), computes(2)), [0], []),
    ],
)
def test_who_cannot_go_on_is_found(states, stuck, circle):
    states = by_rank(*states)
    assert deadlocked(states) == stuck
    assert cycle(states, stuck) == circle


def test_the_report_says_what_every_rank_does():
    states = by_rank(message(0, 1), collective(1, 1), finished(2))
    text = report(states, 30.4)
    assert text.splitlines() == [
        "debug-comm: some ranks have waited for 30 s; a deadlock",
        "rank 0 waits for rank 1: Recv from (1,), a.py:0",
        "rank 1 waits for ranks 0, 2: Barrier, a.py:1",
        "rank 2 has finished",
        "cycle: rank 0 -> rank 1 -> rank 0",
        "rank 2 has left: nobody can wait for it",
    ]
    text = report(by_rank(message(0, 1, 2, any_peer=True), computes(1), computes(2)), 2)
    assert "waits for any of ranks 1, 2" in text and "no deadlock" in text
    assert "rank 1 computes in step, b.py:5" in text
