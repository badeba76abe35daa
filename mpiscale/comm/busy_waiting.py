"""A rank that waits inside MPICH burns its CPU: let it sleep where ranks share CPUs.

With 8 ranks on 2 CPUs an 8-byte all-reduce took 9.7 ms as MPICH comes, and 1.7 ms when
waiting ranks sleep a little. Where each rank has a CPU of its own, sleeping makes it
slower, 2 us becoming 120 us: so it is switched on only where needed, which is known
when the ranks have told each other their CPUs, after MPI has started. MPI's tools
interface allows that (MPI 4.0, section 15.3); mpi4py does not wrap it.
"""

from __future__ import annotations

import ctypes

from mpi4py import MPI

YIELD_VARIABLE = "MPIR_CVAR_ENABLE_HEAVY_YIELD"


def let_waiting_ranks_sleep() -> bool:
    """Switch MPICH to sleeping waits; False if this library can't, or is not MPICH."""
    library = ctypes.CDLL(MPI.__file__)  # finds the symbols of the libmpi behind it
    index, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    provided, on = ctypes.c_int(), ctypes.c_int(1)
    by = ctypes.byref
    try:
        steps = (
            (library.MPI_T_init_thread, MPI.THREAD_SINGLE, by(provided)),
            (library.MPI_T_cvar_get_index, YIELD_VARIABLE.encode(), by(index)),
            (library.MPI_T_cvar_handle_alloc, index, None, by(handle), by(count)),
            (library.MPI_T_cvar_write, handle, by(on)),
        )
    except AttributeError:  # a library without the tools interface
        return False
    return all(function(*arguments) == MPI.SUCCESS for function, *arguments in steps)
