"""The communicator that tests on ranks use: plain, or one that watches every call.

With the variable MPISCALE_DEBUG_COMM (its value: seconds that count as a hang) the same
tests run in debug mode: synchronous sends, compared collectives.
"""

import functools
import os

from mpi4py import MPI

from mpiscale.comm.debug.communicator import DebugCommunicator
from mpiscale.comm.debug.watcher import Watcher
from mpiscale.comm.mpi import MpiCommunicator
from mpiscale.comm.world import DEBUG_VARIABLE, seconds_of


def world_communicator(**options):
    """All ranks, with a new ledger."""
    timeout = os.environ.get(DEBUG_VARIABLE)
    if timeout is None:
        return MpiCommunicator(MPI.COMM_WORLD, **options)
    return DebugCommunicator(MPI.COMM_WORLD, watcher(seconds_of(timeout)), **options)


@functools.cache
def watcher(timeout_s):
    """One for the process: it lives as long as MPI."""
    return Watcher(MPI.COMM_WORLD, timeout_s)
