"""Who waits for whom: from the states of all ranks to a verdict and a report.

A rank that computes will go on. One that waits goes on if what it waits for does: the
peer of a message, all ranks that are still missing in a collective. Whoever is left is
in a deadlock: a cycle of ranks that wait for each other, or a rank that has finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

GroupKey = tuple[tuple[int, ...], int]  # world ranks, and which group of these ranks


@dataclass(frozen=True)
class CollectiveCall:
    """The `number`-th collective call (from 1) on a group of ranks."""

    group: GroupKey
    number: int


@dataclass(frozen=True)
class RankState:
    """What a rank does at a moment.

    Attributes:
        text: the operation that it waits in, "Recv from rank 1, tag 0, 80 B", or the
            function that it computes in.
        where: file:line of the code that called.
        peers: the world ranks that it waits for; () where it waits for a collective.
        any_peer: whether one of them is enough (a receive from any source).
        collective: the call that it waits in, if it is one.
        arrivals: how many collective calls it has begun, for each group.
        in_flight: other operations that it has started and not yet waited for.
    """

    rank: int
    doing: Literal["waits", "computes", "finished"]
    text: str = ""
    where: str = ""
    peers: tuple[int, ...] = ()
    any_peer: bool = False
    collective: CollectiveCall | None = None
    arrivals: Mapping[GroupKey, int] = field(default_factory=dict)
    in_flight: tuple[str, ...] = ()


def waits_for(state: RankState, states: Mapping[int, RankState]) -> list[int]:
    """The ranks without which `state.rank` can't go on."""
    if state.doing != "waits":
        return []
    call = state.collective
    if call is None:
        return list(state.peers)
    members = call.group[0]
    return [r for r in members if states[r].arrivals.get(call.group, 0) < call.number]


def deadlocked(states: Mapping[int, RankState]) -> list[int]:
    """The ranks that can't ever go on."""
    alive = {r for r, state in states.items() if state.doing == "computes"}
    grows = True
    while grows:
        grows = False
        for r, state in states.items():
            if r in alive or state.doing != "waits":
                continue
            needed = waits_for(state, states)
            enough = any if state.any_peer else all
            if enough(other in alive for other in needed):
                alive.add(r)
                grows = True
    return [r for r, s in states.items() if s.doing == "waits" and r not in alive]


def cycle(states: Mapping[int, RankState], stuck: Sequence[int]) -> list[int]:
    """Ranks that wait for each other in a circle, the first again at the end; or []."""
    for first in stuck:
        path = [first]
        while True:
            after = [r for r in waits_for(states[path[-1]], states) if r in stuck]
            if not after:
                break
            if after[0] in path:
                return [*path[path.index(after[0]) :], after[0]]
            path.append(after[0])
    return []


def report(states: Mapping[int, RankState], quiet_s: float) -> str:
    """The wait-for graph as text, and what follows from it."""
    stuck = deadlocked(states)
    verdict = "a deadlock" if stuck else "no deadlock: somebody computes"
    lines = [f"debug-comm: some ranks have waited for {quiet_s:.0f} s; {verdict}"]
    for rank in sorted(states):
        lines += _rank_lines(states[rank], states)
    circle = cycle(states, stuck)
    if circle:
        lines.append("cycle: " + " -> ".join(f"rank {r}" for r in circle))
    gone = {
        other
        for r in stuck
        for other in waits_for(states[r], states)
        if states[other].doing == "finished"
    }
    lines += [f"rank {r} has left: nobody can wait for it" for r in sorted(gone)]
    return "\n".join(lines)


def _rank_lines(state: RankState, states: Mapping[int, RankState]) -> list[str]:
    if state.doing == "finished":
        return [f"rank {state.rank} has finished"]
    if state.doing == "computes":
        return [f"rank {state.rank} computes in {state.text}, {state.where}"]
    others = waits_for(state, states)
    whom = "rank " if len(others) == 1 else "ranks "
    whom = "any of ranks " if state.any_peer else whom
    names = ", ".join(map(str, others)) or "nobody"
    return [
        f"rank {state.rank} waits for {whom}{names}: {state.text}, {state.where}",
        *(f"    in flight: {text}" for text in state.in_flight),
    ]
