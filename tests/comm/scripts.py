"""Starts small scripts under mpirun, as a user would, and says how they ended."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

from tests.mpi_job import mpirun_command, rank_environment

ROOT = Path(__file__).parents[2]
LONGEST_S = 15
PREAMBLE = """
import sys, threading, time
import numpy as np
from mpiscale.comm.world import World, polite_barrier, printed_by_rank_0, run
from mpiscale.errors import InputError

def print(*values, sep=" "):  # one write: the lines of several ranks stay whole
    sys.stdout.write(sep.join(map(str, values)) + "\\n")
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float


def start(folder, script, ranks=3, **variables):
    """Start `script` on so many ranks, or without mpirun for 0."""
    file = folder / "script.py"
    file.write_text(PREAMBLE + textwrap.dedent(script))
    launcher = mpirun_command(ranks) if ranks else []
    environment = rank_environment(max(ranks, 1))
    for variable in ("MPIR_CVAR_ENABLE_HEAVY_YIELD", "OMP_NUM_THREADS"):
        environment.pop(variable, None)
    return subprocess.Popen(
        [*launcher, sys.executable, str(file)],
        env=environment | {"PYTHONPATH": str(ROOT)} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(job, begin):
    """Wait for the end, which a hang would put off for ever."""
    try:
        out, err = job.communicate(timeout=4 * LONGEST_S)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
    return Ended(job.returncode, out, err, time.monotonic() - begin)


def run_script(folder, script, ranks=3, **variables):
    begin = time.monotonic()
    result = ended(start(folder, script, ranks, **variables), begin)
    assert result.seconds < LONGEST_S, result
    return result


def line_of(folder, text):
    """script.py:N of the first line of the script with this text."""
    lines = (folder / "script.py").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if text in line)
    return f"script.py:{number}"


def run_command(ranks, *args, folder=ROOT, seconds=60):
    """Run `mpiscale ARGS` on so many ranks; without mpirun for 0."""
    launcher = mpirun_command(ranks) if ranks else []
    return subprocess.run(
        [*launcher, sys.executable, "-m", "mpiscale.cli.main", *args],
        env=rank_environment(max(ranks, 1)) | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
