"""Whether MPI can read and write the memory of a GPU: it is asked, then tried.

library                          what it is asked
Open MPI, MPICH 4, MVAPICH2      its function MPIX_Query_cuda_support, after MPI_Init
Cray MPICH                       MPICH_GPU_SUPPORT_ENABLED=1 as well
others                           nothing: taken for a no

An MPI that says no never gets to see a device pointer: it would follow it and crash.
One that says yes may owe it to how it was built, with the transport in use knowing
nothing of GPUs; so each rank then sends itself an array, and looks whether it arrives.

Sources: manual page of MPIX_Query_cuda_support(3) of Open MPI; intro_mpi(3) of Cray
MPICH. Seen in: open-mpi/ompi #7963, pmodels/mpich #4716.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from mpi4py import MPI

PING_ELEMENTS = 2**18  # 1 MiB of float32: far above every library's eager limit


def says_cuda_aware(library: Any, version: str, environ: Mapping[str, str]) -> bool:
    """What MPI says of itself.

    library: with the functions of MPI as attributes, as of `loaded_library`.
    """
    is_cray = "CRAY" in version.upper()
    if is_cray and environ.get("MPICH_GPU_SUPPORT_ENABLED") != "1":
        return False
    try:
        query = library.MPIX_Query_cuda_support
    except AttributeError:  # an extension of MPI: not every library has it
        return False
    return bool(query() == 1)


def loaded_library() -> ctypes.CDLL:
    """The MPI library of this process; mpi4py doesn't wrap its extensions."""
    return ctypes.CDLL(MPI.__file__)  # finds the symbols of the libmpi behind it


def agreed_cuda_awareness(comm: MPI.Comm, cupy: ModuleType, said: bool) -> bool:
    """Whether MPI can be given device pointers on every rank; collective.

    said: what MPI says of itself on this rank.
    """
    if not comm.allreduce(said, MPI.LAND):
        return False
    return bool(comm.allreduce(_ping_arrives(comm, cupy), MPI.LAND))


def _ping_arrives(comm: MPI.Comm, cupy: ModuleType) -> bool:
    expected = np.arange(PING_ELEMENTS, dtype=np.float32)
    sent, received = cupy.asarray(expected), cupy.empty(PING_ELEMENTS, np.float32)
    cupy.cuda.get_current_stream().synchronize()
    try:
        comm.Sendrecv(sent, comm.rank, 0, received, comm.rank, 0)
    except MPI.Exception:
        return False
    return np.array_equal(cupy.asnumpy(received), expected)
