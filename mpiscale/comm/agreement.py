"""What one rank does for all, and an error in it that all of them raise."""

from __future__ import annotations

from collections.abc import Callable

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.world import polite_barrier
from mpiscale.errors import InputError


def on_some_ranks(comm: Communicator, here: bool, work: Callable[[], None]) -> None:
    """Run `work` on the ranks where `here` is true while the others wait politely.

    Raises:
        InputError: on every rank, if `work` raised one on any: nobody goes on alone,
            and nobody waits for a rank that has left.
    """
    problem = None
    if here:
        try:
            work()
        except InputError as error:
            problem = str(error)
    polite_barrier(comm)
    problems = [text for text in comm.allgather(problem) if text is not None]
    if problems:
        raise InputError(problems[0])
