"""The whole examination on all ranks."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mpi4py import MPI

from mpiscale.comm.world import World, debugging
from mpiscale.doctor.facts import facts_of, has
from mpiscale.doctor.finding import Finding
from mpiscale.doctor.judge import (
    judge_clock,
    judge_files,
    judge_gpus,
    judge_launcher,
    judge_limits,
    judge_placement,
    judge_shared_memory,
    judge_versions,
)
from mpiscale.doctor.messages import (
    judge_large_message,
    judge_pings,
    large_message,
    pings,
)

PATIENCE_S = 30.0


def examine(world: World, environ: Mapping[str, str]) -> list[Finding] | None:
    """All findings on rank 0, None elsewhere; collective.

    If a check hangs, rank 0 says after `PATIENCE_S` which ranks wait for which, and
    ends the job.
    """
    watched = debugging(world, PATIENCE_S)
    everyone = watched.comm.allgather(facts_of(watched, environ))
    nodes = [facts.node for facts in everyone]
    travel = pings(world.comm, nodes)  # not watched: that costs time
    large = large_message(world.comm, min(watched.comm.allgather(free_memory())))
    if world.rank != 0:
        return None
    return [
        *judge_versions(everyone, world.library),
        judge_launcher(world.size, mpirun_version(), world.library),
        *judge_placement(everyone),
        judge_shared_memory(everyone),
        *judge_pings(travel),
        judge_large_message(large),
        *judge_gpus(everyone, has("cupy")),
        *judge_files(everyone, parallel_hdf5()),
        *judge_limits(everyone),
        judge_clock(everyone, MPI.Wtick()),
    ]


def mpirun_version() -> str:
    """What the mpirun on the PATH says of itself; "" without one."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return ""
    done = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=10, check=False
    )
    return done.stdout


def parallel_hdf5() -> bool | None:
    """Whether h5py writes one file from many ranks; None without h5py."""
    if importlib.util.find_spec("h5py") is None:
        return None
    import h5py

    return bool(h5py.get_config().mpi)


def free_memory() -> int:
    """Bytes of memory that this node could still give out; 0 where unknown."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return 0
    _, _, rest = path.read_text().partition("MemAvailable:")
    return 1024 * int(rest.split()[0])
