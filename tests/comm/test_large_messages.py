"""Messages around 2^31 bytes, where a count that is a C int ends."""

import os

import numpy as np
import pytest

from tests.communicators import world_communicator

NEEDED_GIB = 20  # two ranks with two arrays of 2 GiB each, and MPI's own copies
MACHINE_GIB = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


@pytest.mark.mpi(ranks=(2,))
@pytest.mark.skipif(
    MACHINE_GIB < NEEDED_GIB, reason=f"needs a machine with {NEEDED_GIB} GiB"
)
def test_messages_around_2_to_the_31_bytes_arrive_whole():
    comm = world_communicator()
    other = 1 - comm.rank
    for size in (2**31 - 1, 2**31, 2**31 + 1):
        mine, theirs = np.empty(size, np.uint8), np.zeros(size, np.uint8)
        for place, value in ((0, 1), (size // 2, 2), (-1, 3)):
            mine[place] = value + 10 * comm.rank
        comm.Sendrecv(mine, other, 0, theirs, other, 0)
        for place, value in ((0, 1), (size // 2, 2), (-1, 3)):
            assert theirs[place] == value + 10 * other
    comm.Bcast(mine, root=0)
    assert (mine[0], mine[-1]) == (1, 3)
