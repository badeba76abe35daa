"""How many threads each rank may use, so that the ranks of a node don't fight."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import threadpoolctl

THREAD_VARIABLES = ("MPISCALE_THREADS", "OMP_NUM_THREADS")  # the first one set counts


def allowed_cpus() -> frozenset[int]:
    """The CPUs on which this process may run, as the launcher or Slurm bound it."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def sharing_ranks(
    mine: frozenset[int], on_this_machine: Sequence[frozenset[int]]
) -> int:
    """How many ranks, this one included, may run on a CPU of this one's.

    A launcher may bind all local ranks to the same CPUs, or each to its own.
    """
    return sum(not mine.isdisjoint(cpus) for cpus in on_this_machine)


def choose_threads(
    cpus: int, ranks: int, environ: Mapping[str, str]
) -> tuple[int, tuple[str, ...]]:
    """Threads for each of `ranks` ranks that share `cpus` CPUs, and warnings.

    The default is cpus // ranks, at least 1. MPISCALE_THREADS or else OMP_NUM_THREADS
    overrides it; more threads than CPUs are granted, but not silently.
    """
    default = max(1, cpus // ranks)
    name = next((name for name in THREAD_VARIABLES if environ.get(name)), None)
    if name is None:
        return default, ()
    text = environ[name].split(",")[0].strip()  # OpenMP allows one number per level
    if not text.isdecimal() or int(text) < 1:
        ignored = f"{name}={environ[name]} is not a number of threads: using {default}"
        return default, (ignored,)
    threads = int(text)
    if threads * ranks <= cpus or threads == 1:
        return threads, ()
    return threads, (
        f"{name}={threads} gives {ranks} rank{'s' * (ranks > 1)} x {threads} threads = "
        f"{ranks * threads} on {cpus} CPU{'s' * (cpus > 1)}, where {default} a rank "
        f"fit: unset it, or let the launcher bind the ranks to more CPUs",
    )


def apply_threads(threads: int) -> None:
    """Limit the BLAS of NumPy, and Numba if it is loaded, to so many threads."""
    threadpoolctl.threadpool_limits(threads, user_api="blas")
    if "numba" in sys.modules:
        import numba

        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
