"""When each action of a schedule runs, for given costs: an event simulation.

A rank carries out one action after the other; a pass begins when what it needs is done.
Sends and posting receives cost the rank nothing; a message arrives `communication`
after it was sent. With that the published bubble rates of arXiv:2401.10241, table 5,
come out to four digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mpiscale.parallel.pipeline_parallel.actions import (
    COMPUTE,
    SENDS,
    Action,
    Kind,
    Schedule,
    event,
)


@dataclass(frozen=True)
class Costs:
    """Seconds, or any other unit, of one pass of a whole rank's layers.

    A rank that holds several stages takes F / their number for each of them.

    Attributes:
        forward, backward_input, backward_weight: F, B, W.
        communication: of one message between neighbours.
        side_by_side: of a forward and the backward after it, where a machine runs the
            two at once (DualPipe); both are done at its end. None: one by one.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    communication: float = 0.0
    side_by_side: float | None = None

    def of(self, action: Action, stages_at_once: int) -> float:
        """Of an action; `stages_at_once`: how many of a rank a micro-batch passes."""
        f, b, w = self.forward, self.backward_input, self.backward_weight
        whole = {Kind.F: f, Kind.B: b, Kind.W: w, Kind.BW: b + w}
        return whole.get(action.kind, 0.0) / stages_at_once


@dataclass(frozen=True)
class CostTable:
    """Costs of each pass apart, such as were measured: (kind, stage) -> seconds."""

    seconds: Mapping[tuple[Kind, int], float]
    communication: float = 0.0
    side_by_side: None = None

    def of(self, action: Action, stages_at_once: int) -> float:
        """Of an action."""
        return self.seconds.get((action.kind, action.stage), 0.0)


class Span(NamedTuple):
    """An action of a rank and when it runs."""

    rank: int
    action: Action
    start: float
    end: float


class StuckError(Exception):
    """No rank can go on; `waiting`: (rank, action, what it needs first)."""

    def __init__(self, waiting: list[tuple[int, Action, Action]]) -> None:
        self.waiting = waiting
        super().__init__(f"stuck: {waiting}")


def simulate(schedule: Schedule, costs: Costs | CostTable) -> list[Span]:
    """Start and end of every action; of each rank in its own order.

    Raises:
        StuckError: if ranks wait for each other, or for what never comes.
    """
    done: dict[Action, float] = {}  # event -> when what needs it may begin
    clocks, nexts = [0.0] * schedule.ranks, [0] * schedule.ranks
    spans: list[Span] = []
    stages_at_once = schedule.stages // schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while nexts[rank] < len(actions):
                block = _block(actions, nexts[rank], costs)
                needs = {need for action in block for need in schedule.needs(action)}
                needs -= {event(action) for action in block}
                if not needs <= done.keys():
                    break
                start = max([clocks[rank], *(done[need] for need in needs)])
                end = start + _seconds(block, costs, stages_at_once)
                for action in block:
                    late = costs.communication if action.kind in SENDS else 0.0
                    done[event(action)] = end + late
                    spans.append(Span(rank, action, start, end))
                clocks[rank] = end
                nexts[rank] += len(block)
                moved = True
    _check_all_ran(schedule, nexts, done)
    return spans


def _block(
    actions: tuple[Action, ...], first: int, costs: Costs | CostTable
) -> tuple[Action, ...]:
    """The next action, or all from a forward to the backward beside it."""
    if costs.side_by_side is not None and actions[first].kind is Kind.F:
        for last in range(first + 1, len(actions)):
            if actions[last].kind is Kind.BW:
                return actions[first : last + 1]
            if actions[last].kind in COMPUTE:
                break
    return (actions[first],)


def _seconds(
    block: tuple[Action, ...], costs: Costs | CostTable, stages_at_once: int
) -> float:
    if len(block) > 1:
        assert costs.side_by_side is not None
        return costs.side_by_side / stages_at_once
    return costs.of(block[0], stages_at_once)


def _check_all_ran(
    schedule: Schedule, nexts: list[int], done: dict[Action, float]
) -> None:
    waiting = []
    for rank, actions in enumerate(schedule.actions):
        if nexts[rank] < len(actions):
            action = actions[nexts[rank]]
            missing = [need for need in schedule.needs(action) if need not in done]
            waiting.append((rank, action, missing[0]))
    if waiting:
        raise StuckError(waiting)


def passes_of(spans: list[Span], rank: int) -> list[Span]:
    """The computing ones among a rank's spans."""
    return [s for s in spans if s.rank == rank and s.action.kind in COMPUTE]
