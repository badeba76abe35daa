"""The world of ranks: how a program starts under mpirun or srun, and how it ends.

    def main(world: World) -> None:
        ...

    if __name__ == "__main__":
        run(main)

`run` makes sure that the job ends when one rank fails (`ending.py`); importing this
module does it for errors before `run`. It is the only module that reads or changes the
environment, apart from the choice of kernels.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from mpiscale.backend import keep_freed_memory
from mpiscale.comm.communicator import Communicator
from mpiscale.comm.devices import (
    DeviceChoice,
    Sight,
    place_on_devices,
    use_device,
    visible_gpus,
)
from mpiscale.comm.launcher import (
    launched_ranks,
    settings_before_mpi,
    why_worlds_of_one,
)
from mpiscale.comm.threads import (
    allowed_cpus,
    apply_threads,
    choose_threads,
    sharing_ranks,
)
from mpiscale.errors import InputError

if TYPE_CHECKING:  # at run time these start MPI: only when the environment is ready
    from mpi4py import MPI

    from mpiscale.comm.ending import Outcome
    from mpiscale.comm.mpi import MpiCommunicator

DEBUG_VARIABLE = "MPISCALE_DEBUG_COMM"
SLEEP_VARIABLE = "MPIR_CVAR_ENABLE_HEAVY_YIELD"


@dataclass(frozen=True)
class World:
    """All ranks of the job, and this rank's place among them."""

    comm: MpiCommunicator
    rank: int
    size: int
    node: str
    nodes: int
    local_rank: int  # among the ranks of the same node
    local_size: int
    cpus: int  # on which this rank may run
    threads: int  # which it was granted
    device: int | None  # number of its GPU, the current one; None: NumPy on the CPU
    library: str  # name and version of MPI
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        gpu = f", rank {self.rank} on GPU {self.device}"
        return (
            f"{self.size} rank{'s' * (self.size > 1)} on {self.nodes} "
            f"node{'s' * (self.nodes > 1)}, {self.threads} "
            f"thread{'s' * (self.threads > 1)} each ({self.cpus} "
            f"CPU{'s' * (self.cpus > 1)} allowed), {self.library}"
            f"{'' if self.device is None else gpu}"
        )


class Place(NamedTuple):
    """Where a rank runs."""

    node: str  # Slurm's name, if there is one: several nodes may share a machine
    machine: str
    cpus: frozenset[int]


def start(device: DeviceChoice = "cpu") -> World:
    """Start MPI, find this rank's place, and share out the CPUs, and GPUs if wanted.

    device: "cpu"; "cuda", a GPU for each rank; "auto", the same if every rank has one;
        or the number of a GPU. CuPy is not imported for "cpu". Alike on all ranks, but
        for the number.

    Raises:
        InputError: if MPI sees one rank where the launcher started several, or if
            there is no such GPU.
    """
    cpus = allowed_cpus()
    os.environ.update(settings_before_mpi(os.environ, len(cpus)))
    from mpi4py import MPI  # starts MPI

    from mpiscale.comm.mpi import MpiCommunicator

    error = why_worlds_of_one(os.environ, MPI.COMM_WORLD.size)
    if error:
        raise InputError(error)
    comm = MPI.COMM_WORLD.Dup()
    machine = platform.node()
    here = Place(os.environ.get("SLURMD_NODENAME", machine), machine, cpus)
    places: list[Place] = comm.allgather(here)
    local = [r for r, place in enumerate(places) if place.node == here.node]
    sharing = sharing_ranks(cpus, [p.cpus for p in places if p.machine == machine])
    threads, warnings = take_threads(len(cpus), sharing)
    number, cuda_aware, device_warnings = take_device(device, comm)
    world = World(
        comm=MpiCommunicator(comm, cuda_aware=cuda_aware),
        rank=comm.rank,
        size=comm.size,
        node=here.node,
        nodes=len({place.node for place in places}),
        local_rank=local.index(comm.rank),
        local_size=len(local),
        cpus=len(cpus),
        threads=threads,
        device=number,
        library=library_name(MPI.Get_library_version()),
        warnings=warnings + device_warnings,
    )
    timeout = os.environ.get(DEBUG_VARIABLE)
    return world if timeout is None else debugging(world, seconds_of(timeout))


def debugging(world: World, timeout_s: float) -> World:
    """The same world, whose communication explains its hangs; collective.

    timeout_s: after so many seconds without any progress rank 0 says who waits for
        whom; it ends the job if that is a deadlock.
    """
    from mpiscale.comm.debug.communicator import DebugCommunicator
    from mpiscale.comm.debug.watcher import Watcher

    plain = world.comm
    if isinstance(plain, DebugCommunicator):
        return world
    comm = DebugCommunicator(
        plain.mpi,
        Watcher(plain.mpi, timeout_s),
        plain.ledger,
        plain.name,
        plain.max_count,
        plain.cuda_aware,
    )
    return replace(world, comm=comm)


def seconds_of(text: str) -> float:
    """The timeout that MPISCALE_DEBUG_COMM asks for.

    Raises:
        InputError: if it is no positive number.
    """
    try:
        timeout = float(text)
    except ValueError:
        timeout = 0.0
    if not 0 < timeout < math.inf:
        raise InputError(
            f"{DEBUG_VARIABLE} must be the timeout in seconds, such as 30, got {text!r}"
        )
    return timeout


def environment() -> Mapping[str, str]:
    """The environment variables, for those that must show or judge them."""
    return dict(os.environ)


def take_threads(cpus: int, sharing: int) -> tuple[int, tuple[str, ...]]:
    """Grant this rank its share of CPUs, which `sharing` ranks share; and warnings."""
    threads, warnings = choose_threads(cpus, sharing, os.environ)
    apply_threads(threads)
    keep_freed_memory()
    if "numba" not in sys.modules:
        os.environ["NUMBA_NUM_THREADS"] = str(threads)  # which it reads when imported
    if sharing > cpus:
        warnings += share_cpus_politely()
    return threads, warnings


def take_device(
    wanted: DeviceChoice, comm: MPI.Comm
) -> tuple[int | None, bool, tuple[str, ...]]:
    """Choose this rank's GPU among all ranks, and make it the current one.

    Before anything is allocated: a first array elsewhere would leave a context there.
    Returns its number, None for the CPU; whether MPI may be given device pointers; and
    warnings.
    """
    if wanted == "cpu":
        return None, False, ()
    gpus, problem = visible_gpus()
    sight = Sight(platform.node(), gpus, wanted, problem)
    devices, warnings = place_on_devices(comm.allgather(sight))
    number = devices[comm.rank]
    if number is None:
        return None, False, warnings
    from mpi4py import MPI

    from mpiscale.comm.cuda_aware import (
        agreed_cuda_awareness,
        loaded_library,
        says_cuda_aware,
    )

    cupy, version = use_device(number), MPI.Get_library_version()
    said = says_cuda_aware(loaded_library(), version, os.environ)
    return number, agreed_cuda_awareness(comm, cupy, said), warnings


def share_cpus_politely() -> tuple[str, ...]:
    """Let waiting ranks sleep, unless the user has decided; returns warnings."""
    from mpi4py import MPI

    from mpiscale.comm.busy_waiting import let_waiting_ranks_sleep

    is_mpich = "MPICH" in MPI.Get_library_version()
    if SLEEP_VARIABLE in os.environ or not is_mpich or let_waiting_ranks_sleep():
        return ()
    return (
        "more ranks than CPUs, and this MPICH can't be told to yield while it waits: "
        f"set {SLEEP_VARIABLE}=1 before mpirun",
    )


def library_name(version: str) -> str:
    """Name and version from MPI's own text, as 'MPICH 5.0.2' or 'Open MPI v5.0.11'."""
    words = version.splitlines()[0].replace("Version:", " ").split(",")[0]
    return " ".join(words.split())


def run(main: Callable[[World], None], device: DeviceChoice = "cpu") -> None:
    """Start MPI, call main(world), and end all ranks together; device: as in `start`.

    Exit code 0 if main returned everywhere; 2 if every rank raised the same InputError,
    whose text is printed once; 130 after Ctrl-C; else that of the failure.
    """
    try:
        world = start(device)
        threading.excepthook = end_job_after_thread
        if world.rank == 0:
            for warning in world.warnings:
                print(f"warning: {warning}", file=sys.stderr)
        main(world)
    except BaseException as error:
        if "mpi4py.MPI" not in sys.modules:
            raise  # mpi4py or MPI itself is missing: there are no ranks to end
        from mpiscale.comm.ending import outcome_of

        finish(outcome_of(error, skipped_frames=1))
    else:
        from mpiscale.comm.ending import Outcome

        finish(Outcome("returned"))


def finish(outcome: Outcome) -> None:
    """End together with all other ranks; leave with the outcome's exit code."""
    from mpi4py import MPI

    from mpiscale.comm.ending import end_together

    end_together(outcome, MPI.COMM_WORLD)
    if outcome.code:
        sys.exit(outcome.code)


def end_job_after_thread(failure: threading.ExceptHookArgs) -> None:
    """End all ranks after an uncaught exception in a thread, which only it can see."""
    error = failure.exc_value
    if error is None or isinstance(error, SystemExit):
        return  # a thread may leave by sys.exit, says Python
    from mpi4py import MPI

    from mpiscale.comm.ending import abort, outcome_of, rank_list

    comm, thread = MPI.COMM_WORLD, failure.thread
    where = f"{rank_list([comm.rank], comm.size)}, in thread {thread and thread.name}"
    abort(f"{where}: {outcome_of(error).text or repr(error)}", 1)


def end_job_after_import(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End all ranks after an uncaught exception before `run`.

    The others may already wait in MPI_Init, so MPI has to be started to tell them.
    """
    sys.excepthook = sys.__excepthook__
    try:
        from mpiscale.comm.ending import outcome_of
    except ImportError:  # no MPI: then nobody waits for this process
        sys.__excepthook__(kind, error, trace)
        return
    finish(outcome_of(error))


@contextmanager
def printed_by_rank_0(rank: int) -> Iterator[None]:
    """Let only rank 0 print: a `--help`, or an error that all ranks meet alike."""
    if rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere:
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield


def polite_barrier(comm: Communicator, nap: float = 1e-3) -> None:
    """Wait for all ranks without burning CPU: one may compute on this rank's core.

    nap: seconds between two looks; a plain Barrier answers faster.
    """
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(nap)


if launched_ranks(os.environ) > 1:
    sys.excepthook = end_job_after_import
