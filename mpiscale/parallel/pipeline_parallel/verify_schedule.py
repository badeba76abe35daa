"""Proves a schedule before a message is sent.

Checked, in this order:

1. every micro-batch passes every stage forward once and backward once (BW, or B and
   W), on the rank that holds the stage;
2. a rank does not begin a pass before what it needs from itself;
3. every message is sent once and received once, after its pass and before its use, and
   two ranks receive from each other in the order of sending;
4. no ranks wait for each other in a circle;
5. no rank holds more activations than it may.

A schedule that passes runs to its end on any transport that delivers messages of a pair
of ranks in order, and computes what the serial run computes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from mpiscale.parallel.pipeline_parallel.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Schedule,
    event,
    matching_receive,
)
from mpiscale.parallel.pipeline_parallel.activations_in_flight import in_flight
from mpiscale.parallel.pipeline_parallel.simulate_schedule import (
    Costs,
    StuckError,
    simulate,
)


class ScheduleError(ValueError):
    """A schedule breaks a rule; the message names the rank, the stage, the action."""


def verify(schedule: Schedule, most_activations: int | None = None) -> None:
    """Check all rules.

    Args:
        schedule: with its messages.
        most_activations: how many passes' activations a rank may hold between F and B
            (for several stages a rank each counts as one); None: any number.

    Raises:
        ScheduleError: at the first rule that is broken.
    """
    _each_pass_once(schedule)
    for rank in range(schedule.ranks):
        _own_order(schedule, rank)
    _messages_pair_up(schedule)
    _no_circle(schedule)
    if most_activations is not None:
        _memory(schedule, most_activations)


def _fail(schedule: Schedule, text: str) -> ScheduleError:
    return ScheduleError(f"schedule {schedule.name!r}: {text}")


def _each_pass_once(schedule: Schedule) -> None:
    count: Counter[Action] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not (
                0 <= action.stage < schedule.stages
                and 0 <= action.micro_batch < schedule.micro_batches
            ):
                raise _fail(
                    schedule,
                    f"rank {rank} has {action}; there are {schedule.stages} stages and "
                    f"{schedule.micro_batches} micro-batches, counted from 0",
                )
            owner = schedule.rank_of(action.stage, action.micro_batch)
            if owner != rank:
                raise _fail(
                    schedule,
                    f"rank {rank} has {action}, which belongs to rank {owner}",
                )
            count[action] += 1
    for action, times in count.items():
        if times > 1:
            raise _fail(schedule, f"{action} is there {times} times, expected once")
    for expected in _expected_passes(schedule, count):
        if count[expected] == 0:
            raise _fail(schedule, f"{expected} is missing")


def _expected_passes(schedule: Schedule, count: Counter[Action]) -> Iterator[Action]:
    for stage in range(schedule.stages):
        for m in range(schedule.micro_batches):
            yield Action(Kind.F, stage, m)
            if not schedule.trains:
                continue
            whole, split = Action(Kind.BW, stage, m), Action(Kind.B, stage, m)
            weights = Action(Kind.W, stage, m)
            if count[whole] and (count[split] or count[weights]):
                twice = split if count[split] else weights
                raise _fail(schedule, f"{whole} and {twice}: one of them is too much")
            if count[whole] == 0:
                yield split
                yield weights


def _own_order(schedule: Schedule, rank: int) -> None:
    """What a rank's action needs from the rank itself comes before it."""
    actions = schedule.actions[rank]
    place = {event(action): i for i, action in enumerate(actions)}
    for i, action in enumerate(actions):
        for need in schedule.needs(action):
            on = schedule.rank_of(need.stage, need.micro_batch)
            if on != rank:
                continue
            if need not in place:
                raise _fail(schedule, f"rank {rank}: {action} needs {need}: missing")
            if place[need] > i:
                raise _fail(
                    schedule, f"rank {rank}: {action} comes before {need}, its input"
                )


def _messages_pair_up(schedule: Schedule) -> None:
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                to = schedule.receiver(action)
                if to is None:
                    raise _fail(schedule, f"rank {rank}: {action} has no receiver")
                sent[rank, to].append(action)
            elif action.kind in RECEIVES:
                source = schedule.sender(action)
                if source is None:
                    raise _fail(schedule, f"rank {rank}: {action} has no sender")
                received[source, rank].append(action)
    for pair in sorted(sent.keys() | received.keys()):
        _same_order(schedule, pair, sent[pair], received[pair])


def _same_order(
    schedule: Schedule,
    pair: tuple[int, int],
    sent: list[Action],
    received: list[Action],
) -> None:
    source, to = pair
    expected = [matching_receive(send) for send in sent]
    for i, (want, got) in enumerate(zip(expected, received, strict=False)):
        if want != got:
            raise _fail(
                schedule,
                f"message {i} from rank {source} to rank {to} is sent by {sent[i]}, "
                f"but received by {got}; expected {want}",
            )
    if len(sent) > len(received):
        lost = sent[len(received)]
        raise _fail(schedule, f"rank {to} never receives {lost} of rank {source}")
    if len(received) > len(sent):
        missing = received[len(sent)]
        raise _fail(schedule, f"rank {to}: {missing} is never sent by rank {source}")


def _no_circle(schedule: Schedule) -> None:
    try:
        simulate(schedule, Costs())
    except StuckError as stuck:
        lines = [
            f"rank {rank} waits at {action} for {need} of rank "
            f"{schedule.rank_of(need.stage, need.micro_batch)}"
            for rank, action, need in stuck.waiting
        ]
        raise _fail(
            schedule, "ranks wait for each other: " + "; ".join(lines)
        ) from None


def _memory(schedule: Schedule, most: int) -> None:
    for rank, actions in enumerate(schedule.actions):
        passes = [action for action in actions if action.kind in COMPUTE]
        for action, held in zip(passes, in_flight(passes), strict=True):
            if held.before_b > most:
                raise _fail(
                    schedule,
                    f"rank {rank} holds {held.before_b} passes' activations after "
                    f"{action}, at most {most} are allowed",
                )
