"""What the launcher (mpirun, srun) tells a rank through its environment.

Functions of the variables alone, so that a table of cases can test them; `world.py`
hands them the real environment. Which launcher sets what:

launcher                      ranks of the job       ranks on this node
Open MPI's mpirun             OMPI_COMM_WORLD_SIZE   OMPI_COMM_WORLD_LOCAL_SIZE
MPICH's mpirun (Hydra)        PMI_SIZE               MPI_LOCALNRANKS
srun --mpi=pmi2               PMI_SIZE               SLURM_STEP_TASKS_PER_NODE
srun with any other --mpi     SLURM_STEP_NUM_TASKS   SLURM_STEP_TASKS_PER_NODE

Under mpirun inside a Slurm job the variables of Slurm describe mpirun's own helpers,
not the ranks, so mpirun's variables are asked first.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

LAUNCHERS = re.compile(r"mpirun|mpiexec.*|orterun|prterun|srun")


def launched_ranks(environ: Mapping[str, str]) -> int:
    """The number of ranks that the launcher started; 1 without one."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"):
        if name in environ:
            return int(environ[name])
    return _slurm_tasks(environ)


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of the Slurm step that this process belongs to; 1 in a batch script.

    A batch script has SLURM_NTASKS too, of the whole job, and it is process 0: plain
    `python x.py` in it is one process by intention.
    """
    if "SLURM_PROCID" not in environ:
        return 1
    if "SLURM_STEP_NUM_TASKS" in environ:
        return int(environ["SLURM_STEP_NUM_TASKS"])
    return int(environ.get("SLURM_NTASKS", 1)) if environ["SLURM_PROCID"] != "0" else 1


def why_worlds_of_one(environ: Mapping[str, str], size: int) -> str:
    """The error if MPI sees one rank where several were started; "" if all is well.

    Each of them would believe that it is rank 0 and write the same files. It happens
    where launcher and MPI library don't speak the same protocol.
    """
    launched = launched_ranks(environ)
    if size != 1 or launched == 1:
        return ""
    return (
        f"the launcher started {launched} ranks, but MPI sees a world of size {size}: "
        f"{launched} separate runs would overwrite each other's files. Use a launcher "
        "that fits the MPI library: its own mpirun, or under Slurm `srun --mpi=pmi2` "
        "for MPICH and `srun --mpi=pmix` for Open MPI."
    )


def local_ranks(environ: Mapping[str, str]) -> int:
    """The number of ranks on the (fullest) node as the launcher tells it; 1 if not."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if name in environ:
            return int(environ[name])
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ and _slurm_tasks(environ) > 1:
            return max(map(int, re.findall(r"(?:^|,)(\d+)", environ[name])))
    return 1


def settings_before_mpi(environ: Mapping[str, str], cpus: int) -> dict[str, str]:
    """Variables that Open MPI must find when it starts: ranks that wait shall yield.

    Only where more ranks run on the node than there are CPUs, and where the user has
    not decided. MPICH can be told later (`busy_waiting.py`).
    """
    name = "OMPI_MCA_mpi_yield_when_idle"
    return {name: "1"} if local_ranks(environ) > cpus and name not in environ else {}


def stdout_is_terminal(proc: Path = Path("/proc")) -> bool:
    """Whether what this rank prints ends up in a terminal, not in a file or pipe.

    Under mpirun a rank's stdout is a pipe to the launcher, so the launcher's own
    stdout is what counts: it is looked for among the parents of this process. False
    where it can't be found, as for ranks on other nodes.
    """
    if sys.stdout.isatty():
        return True
    try:
        mode = os.fstat(1).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return False  # redirected to a file behind the launcher's back
        return _launcher_has_terminal(proc, os.getpid())
    except OSError:
        return False


def _launcher_has_terminal(proc: Path, pid: int) -> bool:
    while pid > 1:
        status = (proc / str(pid) / "status").read_text()
        name, parent = re.findall(r"^(?:Name|PPid):\t(.*)$", status, re.MULTILINE)
        if LAUNCHERS.fullmatch(name):
            target = os.readlink(proc / str(pid) / "fd" / "1")
            return target.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
        pid = int(parent)
    return False
