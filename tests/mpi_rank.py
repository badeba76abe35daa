"""What each rank does beside running its tests.

All ranks begin a test together, so that a rank that dies or waits forever does it in
a test that can be named. One failed rank ends all: its peers may wait for it in a
collective (mpi4py/mpi4py #290).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest

from tests.rank_log import SHOW_TRACEBACK, RankLog, traceback_path

if TYPE_CHECKING:  # a process that only starts ranks must not initialise MPI
    from mpi4py import MPI

ENDS_WELL = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def wanted_ranks(item: pytest.Item) -> int | None:
    """The number of ranks this item runs on; None for a test without `mpi` marker."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("mpi_ranks") if callspec else None


def ended_early(report: pytest.TestReport) -> bool:
    """Whether this rank left the test by an exception, so that peers may wait."""
    return report.failed or (report.skipped and hasattr(report, "wasxfail"))


def serve_launcher(config: pytest.Config, folder: Path, limit_s: float) -> None:
    """Make this process a rank that a test run has started and reads in `folder`."""
    crash_file = traceback_path(folder).open("w")
    faulthandler.register(SHOW_TRACEBACK, crash_file)  # from here on it may be asked
    log = RankLog(folder)
    comm = _silenced_world(but_rank=None)
    log.write("rank", comm.rank)
    config.option.basetemp = str(folder / f"tmp-{comm.rank}")
    config.pluginmanager.register(ReportToLauncher(config, log))
    config.pluginmanager.register(RankGuard(comm, crash_file, limit_s))


def serve_user(config: pytest.Config, limit_s: float) -> None:
    """Make this process a rank that the user's own mpirun has started."""
    crash_file = os.fdopen(os.dup(2), "w")  # pytest redirects 2 while a test runs
    comm = _silenced_world(but_rank=0)
    config.pluginmanager.register(ReportToUser(comm))
    config.pluginmanager.register(RankGuard(comm, crash_file, limit_s))


def _silenced_world(but_rank: int | None) -> MPI.Comm:
    """A copy of the world, so that no test's message is mistaken for the harness's.

    Takes the terminal from all ranks but one; later than this, pytest has looked it up.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    if comm.rank != but_rank:
        sys.stdout = Path(os.devnull).open("w")
    return comm


class RankGuard:
    """Keeps ranks in step, ends all with one, and ends a rank that waits too long."""

    def __init__(self, comm: MPI.Comm, crash_file: TextIO, limit_s: float) -> None:
        self._comm = comm
        self._crash_file = crash_file
        self._limit_s = limit_s

    def pytest_sessionstart(self) -> None:
        """Send tracebacks of crashes to our file: by now pytest has chosen its own."""
        faulthandler.enable(self._crash_file)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the tests that want as many ranks as there are."""
        others = [item for item in items if wanted_ranks(item) != self._comm.size]
        items[:] = [item for item in items if wanted_ranks(item) == self._comm.size]
        if others:
            config.hook.pytest_deselected(items=others)

    def pytest_runtest_logstart(self) -> None:
        """Start the clock."""
        faulthandler.dump_traceback_later(
            self._limit_s, exit=True, file=self._crash_file
        )

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """End all ranks if this one has left the test early; others report first."""
        if ended_early(report):
            self._abort(1)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Wait for the other ranks."""
        faulthandler.cancel_dump_traceback_later()
        self._comm.Barrier()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> Generator[None]:
        """End all ranks if this one stops before the last test."""
        yield  # pytest prints its report
        if exitstatus not in ENDS_WELL:
            self._abort(int(exitstatus))

    def _abort(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        self._comm.Abort(code)


class ReportToLauncher:
    """Writes what happens on this rank for the process that started it."""

    def __init__(self, config: pytest.Config, log: RankLog) -> None:
        self._config = config
        self._log = log

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """The test begins."""
        self._log.write("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setup, call or teardown is over."""
        to_dict = self._config.hook.pytest_report_to_serializable
        self._log.write("report", to_dict(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """The test is over."""
        self._log.write("finish", nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module can't be imported on this rank."""
        if report.failed:
            self._log.write("broken", report.longreprtext)

    def pytest_internalerror(self, excrepr: object) -> None:
        """Pytest itself or a plugin failed."""
        self._log.write("broken", str(excrepr))

    def pytest_keyboard_interrupt(
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> None:
        """A test left by pytest.exit() or an interrupt."""
        self._log.write("broken", excinfo.exconly())


class ReportToUser:
    """Prints a failure on the rank where it happens: rank 0 may not live to do it."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._who = f"rank {comm.rank} of {comm.size}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the traceback and what the test had printed."""
        if report.failed:
            printed = "".join(
                f"\n--- {title} ---\n{text}" for title, text in report.sections
            )
            self._print(f"{report.nodeid} failed", report.longreprtext + printed)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Print why a module can't be imported."""
        if report.failed:
            self._print(f"{report.nodeid} can't be collected", report.longreprtext)

    def _print(self, headline: str, text: str) -> None:
        print(f"\n=== {self._who}: {headline} ===\n{text}", file=sys.stderr, flush=True)
