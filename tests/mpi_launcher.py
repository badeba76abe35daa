"""Runs `mpi` tests on ranks from a pytest that was started without mpirun.

The selected tests of a module that want the same number of ranks share one mpirun for
as long as all pass. After a failure, a crash or a deadlock the rest starts afresh.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.mpi_job import EndedJob, run_job
from tests.mpi_rank import ended_early, wanted_ranks

# The rest, such as the test's id, is this process's own.
SHOWN = "outcome longrepr sections duration location user_properties wasxfail".split()


@dataclass
class Verdict:
    """What became of one test: a report per phase, or why there is none."""

    reports: dict[str, pytest.TestReport] = field(default_factory=dict)
    problem: str = ""

    @property
    def ended_job(self) -> bool:
        """Whether mpirun had to end with this test."""
        return bool(self.problem) or any(map(ended_early, self.reports.values()))

    def show_in(self, report: pytest.TestReport) -> None:
        """Let this process's report on one phase say what the ranks reported."""
        of_ranks = self.reports.get(report.when or "")
        if self.problem and report.when == "call":
            report.outcome, report.longrepr = "failed", self.problem
        elif of_ranks and not self.problem:
            vars(report).pop("wasxfail", None)  # of a whole module marked xfail
            shown = {k: v for k, v in vars(of_ranks).items() if k in SHOWN}
            vars(report).update(shown)


class RankGroup:
    """The selected tests of one module that want the same number of ranks."""

    def __init__(self, config: pytest.Config, ranks: int, silence_s: float) -> None:
        self._config = config
        self._ranks = ranks
        self._silence_s = silence_s
        self._nodeids: list[str] = []
        self._verdicts: dict[str, Verdict] = {}

    def add(self, nodeid: str) -> None:
        """Select one more test; all must be there before the first verdict."""
        self._nodeids.append(nodeid)

    def verdict(self, nodeid: str) -> Verdict:
        """What became of a test; the first call runs them all."""
        while pending := [n for n in self._nodeids if n not in self._verdicts]:
            self._verdicts |= self._run(pending)
        return self._verdicts[nodeid]

    def _run(self, nodeids: list[str]) -> dict[str, Verdict]:
        """Verdicts on the tests that one mpirun reached: at least one."""
        with tempfile.TemporaryDirectory(prefix="mpiscale-ranks-") as name:
            folder = Path(name)
            command = rank_command(self._config, nodeids, folder, self._silence_s)
            root = self._config.rootpath
            job = run_job(self._ranks, command, root, folder, self._silence_s)
        verdicts = {n: v for n in nodeids if (v := self._judge(n, job))}
        if not verdicts:
            return dict.fromkeys(nodeids, Verdict(problem=self._why_ended(job)))
        if job.returncode and not any(v.ended_job for v in verdicts.values()):
            last = list(verdicts)[-1]
            problem = f"passed, but then {self._why_ended(job)}"
            verdicts[last] = Verdict(problem=problem)
        return verdicts

    def _judge(self, nodeid: str, job: EndedJob) -> Verdict | None:
        """None if no rank began the test, or none that is to blame for the end."""
        if not any(nodeid in rank.started for rank in job.ranks):
            return None
        reports = self._reports_by_phase(nodeid, job)
        verdict = Verdict({phase: self._join(of) for phase, of in reports.items()})
        if verdict.ended_job:
            return verdict
        if not all(nodeid in rank.finished for rank in job.ranks):
            return Verdict(problem=self._why_ended(job))
        for of in reports.values():
            if len({report.outcome for report in of.values()}) > 1:
                skipped = [rank for rank, report in of.items() if report.skipped]
                return Verdict(
                    problem=f"skipped on ranks {skipped} of {self._ranks}, but not on "
                    "the others: skip a test on every rank or on none"
                )
        return verdict

    def _reports_by_phase(
        self, nodeid: str, job: EndedJob
    ) -> dict[str, dict[int, pytest.TestReport]]:
        """Setup, call and teardown -> rank -> report."""
        phases: dict[str, dict[int, pytest.TestReport]] = {}
        from_dict = self._config.hook.pytest_report_from_serializable
        for record in job.ranks:
            for data in record.reports:
                if data["nodeid"] == nodeid and record.rank is not None:
                    if isinstance(data["longrepr"], list):  # JSON has no tuples
                        data["longrepr"] = tuple(data["longrepr"])
                    report = from_dict(config=self._config, data=data)
                    phases.setdefault(report.when, {})[record.rank] = report
        return phases

    def _join(self, reports: dict[int, pytest.TestReport]) -> pytest.TestReport:
        """The report of the rank that failed first, or else of the lowest rank."""
        failed = {rank: r for rank, r in reports.items() if r.failed}
        if not failed:
            ended = [r for r in reports.values() if ended_early(r)]
            return ended[0] if ended else reports[min(reports)]
        first = min(failed, key=lambda rank: failed[rank].stop)
        report = failed[first]
        path, line, name = report.location
        report.location = path, line, f"{name} on rank {first} of {self._ranks}"
        for rank in sorted(failed.keys() - {first}):
            last_line = failed[rank].longreprtext.splitlines()[-1:]
            report.sections.append((f"rank {rank} failed, too", "".join(last_line)))
        return report

    def _why_ended(self, job: EndedJob) -> str:
        if job.silent:
            why = (
                f"no rank began or ended a test for {self._silence_s:g} s: a deadlock? "
                "(--rank-timeout gives more.)\nWhere each rank waited:"
            )
        else:
            why = (
                f"a rank ended in here without a report; exit code {job.returncode} "
                f"of mpirun -n {self._ranks}"
            )
        broken = [f"{r.name}: {text}" for r in job.ranks for text in r.broken]
        return "\n".join(
            part for part in [why, job.tracebacks(), *broken, job.output] if part
        )


class RankedTest(pytest.Item):
    """Takes a test's place in the process that starts ranks; runs none of its code."""

    def __init__(self, *, test: pytest.Item, group: RankGroup, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._test = test
        self._group = group
        self.verdict: Verdict | None = None

    def setup(self) -> None:
        """Run the test's group, unless an earlier test has."""
        self.verdict = self._group.verdict(self.nodeid)

    def runtest(self) -> None:
        """Nothing is left to do: the reports come from the ranks."""

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Path, line and name of the test itself."""
        return self._test.reportinfo()


def put_ranked_tests_in_place(
    config: pytest.Config, items: list[pytest.Item], silence_s: float
) -> None:
    """Replace every selected test that wants ranks by one that asks them."""
    groups: dict[tuple[Path, int], RankGroup] = {}
    for i, item in enumerate(items):
        ranks = wanted_ranks(item)
        if ranks is None or item.parent is None:
            continue
        new = RankGroup(config, ranks, silence_s)
        group = groups.setdefault((item.path, ranks), new)
        group.add(item.nodeid)
        items[i] = RankedTest.from_parent(
            item.parent, name=item.name, test=item, group=group
        )


def rank_command(
    config: pytest.Config, nodeids: Iterable[str], folder: Path, silence_s: float
) -> list[str]:
    """The command of every rank: these tests, reported into `folder`."""
    selection = folder / "selection.txt"  # ids may hold what mpirun would interpret
    selection.write_text("".join(f"{nodeid}\n" for nodeid in nodeids))
    command = [sys.executable, "-m", "pytest", "--with-mpi", "-p", "no:cacheprovider"]
    command += [f"--rootdir={config.rootpath}", f"--rank-log={folder}"]
    command += [f"--rank-timeout={silence_s}", f"--tb={config.option.tbstyle}"]
    if config.inipath:
        command.append(f"--config-file={config.inipath}")
    command += ["-v"] * config.option.verbose
    command += ["--showlocals"] * config.option.showlocals
    command += ["--runxfail"] * config.option.runxfail
    for setting in config.option.override_ini or ():
        command.append(f"--override-ini={setting}")
    for warning in config.option.pythonwarnings or ():
        command.append(f"--pythonwarnings={warning}")
    return [*command, f"@{selection}"]
