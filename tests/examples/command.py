"""Runs an example as its user does, and reads what it leaves."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tests.mpi_job as mpi_job

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str


def run_example(name, *flags, ranks=None, timeout=TIMEOUT_S):
    """Run examples/`name` under mpirun with `ranks`, or without mpirun if None."""
    launcher = [] if ranks is None else mpi_job.mpirun_command(ranks)
    done = subprocess.run(
        [*launcher, sys.executable, f"examples/{name}", *map(str, flags)],
        cwd=ROOT,
        env=mpi_job.rank_environment(ranks or 1),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr)


def metrics(folder):
    """The lines of metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def curve(folder, name="loss"):
    return [line[name] for line in metrics(folder)]
