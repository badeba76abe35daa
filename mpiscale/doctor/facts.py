"""What every rank knows about itself and its node; gathered, then judged elsewhere."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpiscale.comm.algorithms.node_groups import shared_memory_id
from mpiscale.comm.cuda_aware import loaded_library, says_cuda_aware
from mpiscale.comm.devices import visible_gpus
from mpiscale.comm.world import World

PACKAGES = ("numpy", "numba", "mpi4py", "h5py", "cupy-cuda12x", "matplotlib")
SHARED_WINDOW_BYTES = 1 << 20


@dataclass(frozen=True)
class RankFacts:
    """Of one rank.

    Attributes:
        shares_memory_with: the lowest rank with which it shares memory, says MPI.
        window_works: whether a window of shared memory could be allocated on the node;
            the error if not.
        shm_free: bytes free in /dev/shm; None where there is none.
        clock_offset_s: its system clock less that of rank 0.
        sees_file: whether it sees a file that rank 0 wrote into the working directory.
        lock_error: why HDF5 files can't be locked there; "" if they can.
        open_files, locked_memory: the process's limits; -1 for none.
        gpus: identifiers of the GPUs it sees; gpu_problem says why none if it should.
        cuda_aware: what MPI says of itself.
    """

    rank: int
    node: str
    cpus: int
    threads: int
    versions: Mapping[str, str]
    shares_memory_with: int
    window_works: str
    shm_free: int | None
    clock_offset_s: float
    sees_file: bool
    lock_error: str
    open_files: int
    locked_memory: int
    gpus: tuple[str, ...]
    gpu_problem: str
    cuda_aware: bool


def facts_of(world: World, environ: Mapping[str, str]) -> RankFacts:
    """This rank's; collective."""
    gpus, problem = visible_gpus() if has("cupy") else ((), "")
    version = MPI.Get_library_version()
    return RankFacts(
        rank=world.rank,
        node=world.node,
        cpus=world.cpus,
        threads=world.threads,
        versions=versions(),
        shares_memory_with=shared_memory_id(world.comm),
        window_works=_try_window(world),
        shm_free=_free_bytes(Path("/dev/shm")),
        clock_offset_s=_clock_offset(world),
        sees_file=_sees_file(world),
        lock_error=_lock_error(world),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        gpus=gpus,
        gpu_problem=problem,
        cuda_aware=says_cuda_aware(loaded_library(), version, environ),
    )


def has(module: str) -> bool:
    """Whether a module can be imported."""
    return importlib.util.find_spec(module) is not None


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _try_window(world: World) -> str:
    """ "" if the node's ranks can allocate shared memory; the error if not."""
    node: Any = world.comm.mpi.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        window = MPI.Win.Allocate_shared(SHARED_WINDOW_BYTES, 1, comm=node)
    except MPI.Exception as error:
        return str(error)
    window.Free()
    return ""


def _free_bytes(folder: Path) -> int | None:
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def _clock_offset(world: World) -> float:
    """From the fastest of several round trips with rank 0: half of it is the way."""
    comm = world.comm
    best = (float("inf"), 0.0)
    for other in range(1, world.size):
        for _ in range(5):
            if world.rank == other:
                sent = time.time()
                comm.send(None, 0)
                theirs = comm.recv(source=0)
                back = time.time()
                best = min(best, (back - sent, (sent + back) / 2 - theirs))
            elif world.rank == 0:
                comm.recv(source=other)
                comm.send(time.time(), other)
    return best[1]


def _sees_file(world: World) -> bool:
    """Whether a file that rank 0 writes here is there on this rank, too."""
    name = None
    if world.rank == 0:
        with contextlib.suppress(OSError):
            with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
                name = Path(file.name).name
    name = world.comm.bcast(name)
    seen = name is not None and Path(name).exists()
    world.comm.Barrier()
    if world.rank == 0 and name is not None:
        Path(name).unlink()
    return seen


def _lock_error(world: World) -> str:
    """Whether HDF5 can lock a file in the working directory, tried by rank 0."""
    error = ""
    if world.rank == 0 and has("h5py"):
        import h5py

        try:
            with tempfile.TemporaryDirectory(dir=".") as folder:
                with h5py.File(Path(folder) / "lock.h5", "w"):
                    pass
        except OSError as problem:
            error = str(problem)
    found: str = world.comm.bcast(error)
    return found
