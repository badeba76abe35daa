# ruff: noqa: N802  (the names are mpi4py's)
"""Running an algorithm that is written as steps: to its end, or bit by bit.

A collective algorithm is a generator: it starts its messages of one step, yields their
requests, and goes on when they are done. So one text serves both forms of a call: the
blocking one waits at each `yield`, the non-blocking one goes on whenever it is tested.

A step must be able to end by itself: no receive may be posted ahead for a message that
its sender starts in a later step. NCCL runs the messages of a step as one, and would
wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

from mpiscale.backend import Array
from mpiscale.comm.communicator import Request, Waitall

Steps: TypeAlias = "Iterator[Sequence[Request]]"


def nothing() -> None:
    """Nothing is left to do."""


class Running:
    """A collective in flight: `Test` starts the next step as soon as it can.

    Like MPI itself it moves on only inside calls, so a caller that computes meanwhile
    tests now and then.
    """

    def __init__(
        self,
        steps: Steps,
        finish: Callable[[], None] = nothing,
        result: Array | None = None,
    ) -> None:
        self._steps, self._finish, self.result = steps, finish, result
        self._current: Sequence[Request] | None = ()
        self._advance()

    def Wait(self) -> Literal[True]:
        """Return when the collective is done and its arrays may be used."""
        while self._current is not None:
            Waitall(self._current)
            self._advance()
        return True

    def Test(self) -> bool:
        """Whether the collective is done; does not wait."""
        while self._current is not None:
            # Not all(...): every message shall move on, not only the first unfinished.
            if not min([request.Test() for request in self._current], default=True):
                return False
            self._advance()
        return True

    def value(self) -> Array:
        """Wait, and return the result, which this rank must have."""
        self.Wait()
        assert self.result is not None
        return self.result

    def _advance(self) -> None:
        self._current = next(self._steps, None)
        if self._current is None:
            self._finish()
