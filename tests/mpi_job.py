"""One mpirun: started, watched and, when its ranks fall silent, shown and ended."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rank_log import SHOW_TRACEBACK, RankRecord, read_rank_records

POLL_S = 0.05
GRACE_S = 2.0  # to write tracebacks, or to end on SIGTERM
LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "HYDI_", "MPI_LOCAL", "SLURM_")
FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<line>\d+) in ')
HARNESS = re.compile(r"site-packages/(_pytest|pluggy|pytest)/|<frozen runpy>|/runpy.py")


@dataclass(frozen=True)
class EndedJob:
    """How one mpirun ended, and what its ranks had told until then."""

    returncode: int
    silent: bool  # killed, since no rank had told anything for too long
    output: str
    ranks: list[RankRecord]

    def tracebacks(self) -> str:
        """Where each rank waited or crashed, innermost call first."""
        shown = [(r.name, readable_traceback(r.traceback)) for r in self.ranks]
        return "\n".join(f"{name}:\n{text}" for name, text in shown if text)


def run_job(
    ranks: int, command: list[str], cwd: Path, folder: Path, silence_s: float
) -> EndedJob:
    """Run `command` on so many ranks that log into `folder`, and leave none running.

    The job is ended when no rank has logged anything for `silence_s` seconds.
    """
    output = folder / "output.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [*mpirun_command(ranks), *command],
            cwd=cwd,
            env=rank_environment(ranks),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        silent = not _ends_while_heard(process, folder, silence_s)
        if silent:
            _ask_for_tracebacks(folder)
    finally:  # an interrupt of this process ends the job, too
        _kill(process, folder)
    text = output.read_text(errors="replace").strip()
    return EndedJob(process.returncode, silent, text, read_rank_records(folder))


def mpirun_command(ranks: int) -> list[str]:
    """Start of the command line: the mpirun beside this Python, or else on the PATH."""
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    mpirun = mpirun or shutil.which("mpirun")
    if mpirun is None:
        raise FileNotFoundError(
            f"no mpirun beside {sys.executable} nor on the PATH: run "
            "`pip install mpich`, or load your site's MPI"
        )
    return [
        mpirun,
        *(["--oversubscribe"] if _is_open_mpi(mpirun) else []),
        "-n",
        str(ranks),
    ]


def rank_environment(ranks: int) -> dict[str, str]:
    """The environment of a rank: a job of its own, and its share of the cores."""
    cores = os.cpu_count() or 1
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # Numba's cache saves minutes
    env |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": str(max(1, cores // ranks))}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > cores:
        env["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"  # a waiting rank lets others work
    return env


def readable_traceback(text: str) -> str:
    """faulthandler's traceback with its source lines, without the test framework's."""
    lines: list[str] = []
    for line in text.splitlines():
        frame = FRAME.match(line)
        if frame and HARNESS.search(frame["path"]):
            continue
        lines.append(line)
        if frame:
            source = linecache.getline(frame["path"], int(frame["line"])).strip()
            lines.append(f"    {source}")
    return "\n".join(lines)


def _is_open_mpi(mpirun: str) -> bool:
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    )
    return "Open MPI" in version.stdout


def _ends_while_heard(
    process: subprocess.Popen[bytes], folder: Path, silence_s: float
) -> bool:
    """Wait for the end; False as soon as the ranks have been silent for too long."""
    heard, deadline = 0, time.monotonic() + silence_s
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return True
        logged = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
        if logged > heard:
            heard, deadline = logged, time.monotonic() + silence_s
    return False


def _ask_for_tracebacks(folder: Path) -> None:
    for pid in _signalled(folder, SHOW_TRACEBACK):
        path, deadline = folder / f"{pid}.traceback", time.monotonic() + GRACE_S
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _kill(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End mpirun, which ends its ranks; then every rank that it has left behind.

    Ranks are looked after one by one, since Hydra and PRRTE give each its own session.
    """
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for _ in _signalled(folder, signal.SIGKILL):
        pass
    process.wait()


def _signalled(folder: Path, number: signal.Signals) -> Iterator[int]:
    """Send a signal to each rank that is alive, and yield its process id."""
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.stem), number)
            yield int(path.stem)
