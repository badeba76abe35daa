"""`@pytest.mark.mpi(ranks=(1, 2, 4))` runs a test on 1, on 2 and on 4 MPI ranks.

Plain `python -m pytest` starts the ranks itself (`mpi_launcher.py`). Started as
`mpirun -n 4 python -m pytest --with-mpi`, it runs the tests that want 4 ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.mpi_launcher import RankedTest, put_ranked_tests_in_place
from tests.mpi_rank import serve_launcher, serve_user

WORLD_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")  # of MPICH's mpirun, of Open MPI's


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for tests on ranks."""
    group = parser.getgroup("MPI ranks")
    about = "seconds after which ranks that neither begin nor end a test are ended"
    group.addoption("--rank-timeout", type=float, metavar="SECONDS", help=about)
    group.addoption("--rank-log", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.addini("rank_timeout", f"{about} (--rank-timeout)", default="60")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make this process a rank if mpirun has started it."""
    config.addinivalue_line("markers", "mpi(ranks=(2, 4)): run on 2, then on 4 ranks")
    folder, limit_s = config.getoption("--rank-log"), rank_timeout(config)
    if folder:
        # The launcher is the one to end ranks; a rank does it when it has lost that.
        serve_launcher(config, Path(folder), 2 * limit_s)
    elif on_ranks(config):
        serve_user(config, limit_s)
    elif any(int(os.environ.get(name, 1)) > 1 for name in WORLD_SIZES):
        raise pytest.UsageError(
            "mpirun has started several pytests that know nothing of each other: add "
            "--with-mpi, or leave mpirun out (pytest starts the ranks itself)"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per number of ranks out of a test with the `mpi` marker."""
    marker = metafunc.definition.get_closest_marker("mpi")
    if marker is None:
        return
    ranks = marker.kwargs.get("ranks")
    if not (isinstance(ranks, tuple) and ranks and all(type(n) is int for n in ranks)):
        pytest.fail(
            f"{metafunc.definition.nodeid}: expected the numbers of ranks to run on, "
            f"got ranks={ranks!r}: write @pytest.mark.mpi(ranks=(1, 2, 4))",
            pytrace=False,
        )
    metafunc.fixturenames.append("mpi_ranks")
    metafunc.parametrize("mpi_ranks", ranks, ids=lambda n: f"{n}ranks")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Where ranks are still to be started, let them run what is selected by now."""
    if not on_ranks(config):
        put_ranked_tests_in_place(config, items, rank_timeout(config))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the report of the ranks as this process's."""
    report = yield
    if isinstance(item, RankedTest) and item.verdict:
        item.verdict.show_in(report)
    return report


def on_ranks(config: pytest.Config) -> bool:
    """Whether this process is one of several ranks that run the same tests."""
    return bool(config.getoption("--with-mpi") or config.getoption("--only-mpi"))


def rank_timeout(config: pytest.Config) -> float:
    """Seconds for which ranks may be silent: the option, or else the ini value."""
    option: float | None = config.getoption("--rank-timeout")
    return float(config.getini("rank_timeout")) if option is None else option
