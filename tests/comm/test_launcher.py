"""What the launcher's variables mean, case by case."""

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mpiscale.comm.launcher import (
    launched_ranks,
    local_ranks,
    settings_before_mpi,
    stdout_is_terminal,
    why_worlds_of_one,
)
from tests.mpi_job import mpirun_command, rank_environment

ROOT = Path(__file__).parents[2]

SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OLD_SRUN = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "3"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
ONE_IN_STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "1"}


@pytest.mark.parametrize(
    ("environ", "ranks", "local"),
    [
        ({}, 1, 1),
        (SRUN, 4, 2),
        (OLD_SRUN, 4, 1),
        (BATCH, 1, 1),
        (HYDRA, 4, 3),
        (OPEN_MPI, 4, 2),
        (SRUN | HYDRA, 4, 3),
        (ONE_IN_STEP, 1, 1),
        ({"MPI_LOCALNRANKS": "5"}, 5, 5),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),12,1"}, 4, 12),
        (SRUN | {"SLURM_PROCID": "0"}, 4, 2),
    ],
)
def test_ranks_that_the_launcher_started(environ, ranks, local):
    assert launched_ranks(environ) == ranks
    assert local_ranks(environ) == local


@pytest.mark.parametrize("environ", [SRUN, OLD_SRUN, HYDRA, OPEN_MPI])
def test_several_worlds_of_one_are_refused(environ):
    error = why_worlds_of_one(environ, size=1)
    assert error.startswith(
        "the launcher started 4 ranks, but MPI sees a world of size 1"
    )
    assert "srun --mpi=pmi2" in error
    assert why_worlds_of_one(environ, size=4) == ""


@pytest.mark.parametrize("environ", [{}, BATCH, ONE_IN_STEP])
def test_one_process_on_purpose_is_not_refused(environ):
    assert why_worlds_of_one(environ, size=1) == ""


def test_open_mpi_yields_only_if_ranks_outnumber_cpus_and_the_user_agrees():
    name = "OMPI_MCA_mpi_yield_when_idle"
    assert settings_before_mpi(OPEN_MPI, cpus=1) == {name: "1"}
    assert settings_before_mpi(OPEN_MPI, cpus=2) == {}
    assert settings_before_mpi(OPEN_MPI | {name: "0"}, cpus=1) == {}


def processes(root, *rows):
    """A /proc with one process a row: pid, parent, name, where its stdout goes."""
    for pid, parent, name, target in rows:
        (root / str(pid) / "fd").mkdir(parents=True)
        status = f"Name:\t{name}\nUmask:\t0022\nPPid:\t{parent}\n"
        (root / str(pid) / "status").write_text(status)
        (root / str(pid) / "fd" / "1").symlink_to(target)


@pytest.mark.parametrize(
    ("launcher", "target", "expected"),
    [
        ("mpirun", "/dev/pts/3", True),
        ("mpiexec.hydra", "/dev/pts/3", True),
        ("prterun", "/dev/tty1", True),
        ("srun", "/dev/pts/0", True),
        ("mpirun", "pipe:[123]", False),
        ("mpirun", "/home/me/log.txt", False),
        ("bash", "/dev/pts/3", False),
    ],
)
def test_stdout_of_the_launcher_counts(
    tmp_path, monkeypatch, launcher, target, expected
):
    reading, writing = os.pipe()
    saved = os.dup(1)
    os.dup2(writing, 1)  # as if a launcher collected what this process prints
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    try:
        processes(
            tmp_path,
            (os.getpid(), 30, "python", "pipe:[9]"),
            (30, 20, "hydra_pmi_proxy", "pipe:[8]"),
            (20, 1, launcher, target),
        )
        assert stdout_is_terminal(tmp_path) is expected
    finally:
        os.dup2(saved, 1)
        for descriptor in (reading, writing, saved):
            os.close(descriptor)


ASK = (
    "from mpiscale.comm.launcher import stdout_is_terminal as t; print('terminal', t())"
)


def test_terminal_is_seen_through_mpirun_and_a_pipe_is_not():
    command = [*mpirun_command(2), sys.executable, "-c", ASK]
    options = {"env": rank_environment(2), "cwd": ROOT, "stdin": subprocess.DEVNULL}
    piped = subprocess.run(
        command, **options, capture_output=True, text=True, timeout=30, check=True
    )
    assert piped.stdout.count("False") == 2  # the ranks' lines may run into another
    assert "True" not in piped.stdout

    terminal, other_end = pty.openpty()
    seen = bytearray()

    def read() -> None:
        while chunk := _read(terminal):
            seen.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    subprocess.run(command, **options, stdout=other_end, timeout=30, check=True)
    os.close(other_end)
    reader.join()
    os.close(terminal)
    assert seen.count(b"True") == 2
    assert b"False" not in seen


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1024)
    except OSError:  # Linux says so when the other end is closed
        return b""
