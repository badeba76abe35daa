"""Adds the messages to a schedule of passes.

A pass whose output another rank needs is followed by its send. Sends do not wait. A
receive is posted one pass before the one that needs it, so that the message can arrive
while that pass computes; the pass itself waits for it.

Messages between two ranks are received in the order in which they are sent, whatever
they carry: activations of several chunks and gradients may travel between the same
pair (always so with two ranks, whose neighbours on both sides are one), and not every
transport has tags. If a message that is needed early is sent after one that is needed
late, the receive of the late one is posted early too:

    rank 0 sends x, y;   rank 1 needs y first:   it posts x, y, then comes y's pass
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from mpiscale.parallel.pipeline_parallel.actions import (
    SENDS,
    Action,
    Kind,
    Schedule,
    event,
    matching_receive,
)


def insert_communication(passes: Schedule) -> Schedule:
    """The same schedule with sends and receives."""
    sending = [_with_sends(passes, actions) for actions in passes.actions]
    posts = _posts(passes, sending)
    actions = [_with_receives(mine, posts[rank]) for rank, mine in enumerate(sending)]
    return replace(passes, actions=tuple(actions))


def _with_sends(schedule: Schedule, actions: tuple[Action, ...]) -> list[Action]:
    out = []
    for action in actions:
        out.append(action)
        send = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}.get(event(action).kind)
        if send is not None:
            message = Action(send, action.stage, action.micro_batch)
            if schedule.receiver(message) is not None:
                out.append(message)
    return out


def _posts(
    schedule: Schedule, sending: list[list[Action]]
) -> list[dict[int, list[Action]]]:
    """For each rank: before which of its actions which receives are posted."""
    needed = [_needed_at(schedule, actions) for actions in sending]
    posts: list[dict[int, list[Action]]] = [defaultdict(list) for _ in sending]
    for actions in sending:
        to: dict[int, list[Action]] = defaultdict(list)
        for action in actions:
            if action.kind in SENDS:
                receiver = schedule.receiver(action)
                assert receiver is not None
                to[receiver].append(matching_receive(action))
        for receiver, receives in to.items():
            latest = len(sending[receiver])
            places = []
            for receive in reversed(receives):  # not after one that is sent later
                latest = min(latest, needed[receiver].get(receive, latest))
                places.append(latest)
            for receive, place in zip(receives, reversed(places), strict=True):
                posts[receiver][place].append(receive)
    return posts


def _needed_at(schedule: Schedule, actions: list[Action]) -> dict[Action, int]:
    """Receive -> index of the pass before the one that waits for it."""
    found: dict[Action, int] = {}
    previous = 0
    for i, action in enumerate(actions):
        if action.kind in SENDS:
            continue
        for needed in schedule.needs(action):
            if needed.kind in (Kind.RECV_F, Kind.RECV_B):
                found[needed] = previous
        previous = i
    return found


def _with_receives(
    actions: list[Action], posts: dict[int, list[Action]]
) -> tuple[Action, ...]:
    out: list[Action] = []
    for i, action in enumerate(actions):
        out += posts.get(i, [])
        out.append(action)
    return tuple(out + posts.get(len(actions), []))
