"""A contender on several ranks: rank 0 is told what to do, and tells the others.

mpirun hands its stdin to rank 0. Between two messages the other ranks sleep: the
machine belongs to the contender whose turn it is. A step's time is that of the slowest
rank, from the moment when all are ready.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from mpiscale.bench.contender import Contender, Session, Settings
from mpiscale.comm.communicator import Communicator
from mpiscale.comm.world import World, polite_barrier, run

Build = Callable[[Settings, Communicator], Contender]


def serve_on_ranks(build: Build) -> None:
    """Answer until stdin ends, on all ranks that mpirun has started."""

    def main(world: World) -> None:
        session = RankedSession(build, world.comm)
        if world.rank == 0:
            with os.fdopen(os.dup(1), "w") as replies:
                os.dup2(2, 1)  # what the libraries print goes to stderr
                for line in sys.stdin:
                    reply = session.answer_together(json.loads(line))
                    replies.write(json.dumps(reply) + "\n")
                    replies.flush()
                session.answer_together(None)
        else:
            while session.answer_together({}) is not None:
                pass

    run(main)


class RankedSession(Session):
    """A session whose steps all ranks make together."""

    def __init__(self, build: Build, comm: Communicator) -> None:
        super().__init__(lambda settings: build(settings, comm))
        self._comm = comm

    def answer_together(self, message: dict[str, Any] | None) -> Any:
        """Carry out rank 0's message on all ranks; None ends it. Collective."""
        polite_barrier(self._comm)
        message = self._comm.bcast(message)
        return None if message is None else self.answer(message) or {}

    def _step(self, number: int) -> dict[str, float]:
        self._comm.Barrier()
        mine = super()._step(number)
        everyone = self._comm.allgather(mine)
        slowest: dict[str, float] = {
            name: max(rank[name] for rank in everyone) for name in mine
        }
        return slowest | {"loss": sum(rank["loss"] for rank in everyone)}
