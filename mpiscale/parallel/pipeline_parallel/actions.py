"""A pipeline schedule is data: for each rank, a list of actions in order.

The model is cut into S stages, a batch into M micro-batches. An action is one pass of
one micro-batch m through one stage s, or a message that such a pass needs:

action     what it does                                          it needs
F(s, m)    forward                                               F(s - 1, m)
B(s, m)    gradient of the stage's input                         F(s, m), B(s + 1, m)
W(s, m)    gradient of the stage's weights                       B(s, m)
BW(s, m)   both in one pass: the usual backward                  F(s, m), B(s + 1, m)
SEND_F     the output of F(s, m), to the rank of stage s + 1     F(s, m)
RECV_F     the input of F(s, m): the receive is posted           -
SEND_B     the input's gradient, to the rank of stage s - 1      B(s, m)
RECV_B     the gradient of the output of F(s, m)                 -

Which rank holds a stage is said by a `StageMap`. Schedules (`schedule_*.py`) are
generators of F, B, W, BW alone; `insert_communication.py` adds the messages,
`verify_schedule.py` proves the result, `run_schedule.py` carries it out.

Source: P. Qi et al., "Zero bubble pipeline parallelism", 2023 (arXiv:2401.10241), for
B and W apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol


class Kind(Enum):
    """What an action does; see the module's table."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE = (Kind.F, Kind.B, Kind.W, Kind.BW)
INPUT_GRADIENT = (Kind.B, Kind.BW)
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)


class Action(NamedTuple):
    """One pass or message of one micro-batch at one stage."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}(stage {self.stage}, micro-batch {self.micro_batch})"


class StageMap(Protocol):
    """Which rank holds which stage."""

    @property
    def ranks(self) -> int:
        """P."""

    @property
    def stages(self) -> int:
        """S."""

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that passes this micro-batch through this stage."""

    def stages_of(self, rank: int) -> list[int]:
        """The stages whose weights `rank` holds, in order."""


@dataclass(frozen=True)
class Loop:
    """Stage s on rank s mod P: with `chunks` > 1 the pipeline loops over the ranks.

    2 ranks, 2 chunks:   rank 0   stages 0   2
                         rank 1   stages   1   3
    """

    ranks: int
    chunks: int = 1

    @property
    def stages(self) -> int:
        """P chunks."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Stage mod P."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> list[int]:
        """One of each chunk."""
        return list(range(rank, self.stages, self.ranks))


@dataclass(frozen=True)
class VShape:
    """Two stages a rank, down and up again: the last stage is on the first rank.

    2 ranks:   rank 0   stages 0     3
               rank 1   stages   1 2
    """

    ranks: int

    @property
    def stages(self) -> int:
        """2 P."""
        return 2 * self.ranks

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Down, then up."""
        return min(stage, self.stages - 1 - stage)

    def stages_of(self, rank: int) -> list[int]:
        """One on the way down, one on the way up."""
        return [rank, self.stages - 1 - rank]


@dataclass(frozen=True)
class Bidirectional:
    """The pipeline twice, in opposite directions: stage s on ranks s and P - 1 - s.

    Micro-batches 0 ... down - 1 go down the ranks, the others up. Both copies of a
    stage's weights see a part of the batch: their gradients are added up.

    2 ranks:   rank 0   stage 0 for those down, stage 1 for those up
               rank 1   stage 1 for those down, stage 0 for those up
    """

    ranks: int
    down: int

    @property
    def stages(self) -> int:
        """P."""
        return self.ranks

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """By the micro-batch's direction."""
        return stage if micro_batch < self.down else self.ranks - 1 - stage

    def stages_of(self, rank: int) -> list[int]:
        """One of each direction: the same one in the middle of an odd number."""
        return sorted({rank, self.ranks - 1 - rank})


@dataclass(frozen=True)
class Schedule:
    """All ranks' actions of one training step.

    Attributes:
        name: as the user types it.
        stage_map: which rank holds which stage.
        micro_batches: M.
        actions: of each rank, in order.
        trains: whether there is a backward pass.
    """

    name: str
    stage_map: StageMap
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    trains: bool = True

    @property
    def ranks(self) -> int:
        """P."""
        return self.stage_map.ranks

    @property
    def stages(self) -> int:
        """S."""
        return self.stage_map.stages

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that passes this micro-batch through this stage."""
        return self.stage_map.rank_of(stage, micro_batch)

    def sender(self, receive: Action) -> int | None:
        """The rank that a receive is from; None: it would be the rank itself."""
        return self._partner(receive, -1 if receive.kind is Kind.RECV_F else 1)

    def receiver(self, send: Action) -> int | None:
        """The rank that a send is to; None: it would be the rank itself."""
        return self._partner(send, 1 if send.kind is Kind.SEND_F else -1)

    def _partner(self, action: Action, towards: int) -> int | None:
        stage = action.stage + towards
        if not 0 <= stage < self.stages:
            return None
        other = self.rank_of(stage, action.micro_batch)
        own = self.rank_of(action.stage, action.micro_batch)
        return None if other == own else other

    def needs(self, action: Action) -> list[Action]:
        """What must be done before `action`; a BW counts as the B that it contains."""
        kind, stage, m = action
        if kind is Kind.F:
            return self._brought(Kind.F, stage - 1, action) if stage > 0 else []
        if kind in INPUT_GRADIENT:
            forward = [Action(Kind.F, stage, m)]
            if stage == self.stages - 1:
                return forward
            return forward + self._brought(Kind.B, stage + 1, action)
        if kind in (Kind.W, Kind.SEND_B):
            return [Action(Kind.B, stage, m)]
        return [Action(Kind.F, stage, m)] if kind is Kind.SEND_F else []

    def _brought(self, kind: Kind, stage: int, to: Action) -> list[Action]:
        """A neighbouring stage's pass: on the same rank itself, else its message."""
        m = to.micro_batch
        if self.rank_of(stage, m) == self.rank_of(to.stage, m):
            return [Action(kind, stage, m)]
        send, receive = MESSAGE[kind]
        return [Action(send, stage, m), Action(receive, to.stage, m)]


MESSAGE = {Kind.F: (Kind.SEND_F, Kind.RECV_F), Kind.B: (Kind.SEND_B, Kind.RECV_B)}


def event(action: Action) -> Action:
    """What is done once `action` is: for BW that is B."""
    if action.kind is Kind.BW:
        return Action(Kind.B, action.stage, action.micro_batch)
    return action


def matching_receive(send: Action) -> Action:
    """The receive of the message that `send` sends."""
    if send.kind is Kind.SEND_F:
        return Action(Kind.RECV_F, send.stage + 1, send.micro_batch)
    return Action(Kind.RECV_B, send.stage - 1, send.micro_batch)
