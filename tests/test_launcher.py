"""Tests on ranks: whatever goes wrong in one is shown as its failure and no other's."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.mpi_job import mpirun_command, rank_environment, readable_traceback
from tests.planting import BARE, PLAIN, PYTEST, Results, alive, plant, run, wait_until

MANY_WAYS_TO_END = """
import os
import time
import pytest
from mpi4py import MPI

COMM = MPI.COMM_WORLD


def test_without_ranks():
    assert COMM.size == 1


@pytest.mark.mpi(ranks=(1, 2))
def test_passes(tmp_path, mpi_ranks):
    assert COMM.size == COMM.allreduce(1) == mpi_ranks
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert len(set(COMM.allgather(str(tmp_path)))) == COMM.size


@pytest.mark.mpi(ranks=(2,))
def test_waits_for_nobody():
    COMM.recv(source=1 - COMM.rank)  # nobody sends


@pytest.mark.mpi(ranks=(2,))
def test_raises_on_rank_1_while_rank_0_waits():
    if COMM.rank == 1:
        print("said before the end")
        raise ValueError("boom")
    COMM.Barrier()


@pytest.fixture
def broken():
    raise RuntimeError("a broken fixture")


@pytest.mark.mpi(ranks=(2,))
def test_whose_fixture_raises(broken):
    COMM.Barrier()


@pytest.mark.mpi(ranks=(2,))
def test_calls_sys_exit():
    if COMM.rank == 0:
        raise SystemExit(0)
    COMM.Barrier()


@pytest.mark.mpi(ranks=(2,))
def test_ends_later_on_rank_0():
    time.sleep(0.5 * (COMM.rank == 0))  # rank 1 may not run ahead and die meanwhile


@pytest.mark.mpi(ranks=(2,))
@pytest.mark.parametrize("code", [0, 3])
def test_loses_a_rank(code):
    if COMM.rank == 1:
        os._exit(code)
    COMM.Barrier()


@pytest.mark.mpi(ranks=(2,))
def test_crashes():
    import ctypes
    if COMM.rank == 1:
        ctypes.string_at(0)
    COMM.Barrier()


@pytest.mark.mpi(ranks=(2,))
def test_skips_itself():
    pytest.skip("on every rank")


@pytest.mark.mpi(ranks=(2,))
def test_skips_on_rank_1():
    if COMM.rank == 1:
        pytest.skip("on one rank")


@pytest.mark.mpi(ranks=(2,))
@pytest.mark.xfail(reason="is known")
def test_fails_as_expected():
    if COMM.rank == 0:
        raise ValueError
    COMM.Barrier()


@pytest.mark.mpi(ranks=(2,))
def test_passes_after_all_this():
    assert COMM.allreduce(1) == 2
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of MANY_WAYS_TO_END, all from one run."""
    folder = plant(tmp_path_factory.mktemp("ways"), test_ways=MANY_WAYS_TO_END)
    return run(folder, *PLAIN, "--rank-timeout=5", "-rA")


def test_each_test_gets_its_own_outcome(planted):
    assert planted.outcomes == {
        "test_without_ranks": "passed",
        "test_passes[1ranks]": "passed",
        "test_passes[2ranks]": "passed",
        "test_waits_for_nobody[2ranks]": "failure",
        "test_raises_on_rank_1_while_rank_0_waits[2ranks]": "failure",
        "test_whose_fixture_raises[2ranks]": "error",
        "test_calls_sys_exit[2ranks]": "failure",
        "test_ends_later_on_rank_0[2ranks]": "passed",
        "test_loses_a_rank[2ranks-0]": "failure",
        "test_loses_a_rank[2ranks-3]": "failure",
        "test_crashes[2ranks]": "failure",
        "test_skips_itself[2ranks]": "skipped",
        "test_skips_on_rank_1[2ranks]": "failure",
        "test_fails_as_expected[2ranks]": "skipped",
        "test_passes_after_all_this[2ranks]": "passed",
    }, planted.printed
    assert "1 xfailed" in planted.printed


def test_deadlock_shows_the_waiting_line_of_every_rank(planted):
    text = planted.texts["test_waits_for_nobody[2ranks]"]
    assert "no rank began or ended a test for 5 s" in text
    assert "rank 0:" in text and "rank 1:" in text
    assert text.count("COMM.recv(source=1 - COMM.rank)  # nobody sends") == 2


def test_exception_on_one_rank_shows_its_traceback_and_output(planted):
    text = planted.texts["test_raises_on_rank_1_while_rank_0_waits[2ranks]"]
    assert 'raise ValueError("boom")' in text
    headline = "test_raises_on_rank_1_while_rank_0_waits[2ranks] on rank 1 of 2"
    assert headline in planted.printed
    assert "said before the end" in planted.printed


def test_failing_rank_ends_its_waiting_peers_at_once(tmp_path):
    source = """
    import pytest
    from mpi4py import MPI

    @pytest.mark.mpi(ranks=(3,))
    def test_one():
        assert MPI.COMM_WORLD.rank != 2
        MPI.COMM_WORLD.Barrier()
    """
    begin = time.monotonic()
    results = run(plant(tmp_path, test_end=source), *PLAIN, "--rank-timeout=60")
    assert results.outcomes == {"test_one[3ranks]": "failure"}
    assert time.monotonic() - begin < 30


def test_lost_rank_is_told_with_the_exit_code(planted):
    text = planted.texts["test_loses_a_rank[2ranks-3]"]
    assert "a rank ended in here without a report; exit code 3 of mpirun -n 2" in text
    text = planted.texts["test_loses_a_rank[2ranks-0]"]
    assert "a rank ended in here without a report" in text  # MPICH's own code is 0
    crash = planted.texts["test_crashes[2ranks]"]
    assert "rank 1:\nFatal Python error: Segmentation fault" in crash
    assert "ctypes.string_at(0)" in crash


def test_skip_on_some_ranks_only_is_a_failure(planted):
    text = planted.texts["test_skips_on_rank_1[2ranks]"]
    assert "skipped on ranks [1] of 2, but not on the others" in text
    assert "on every rank" in planted.texts["test_skips_itself[2ranks]"]


def test_ranks_share_one_mpirun_while_all_pass_and_only_selected_tests_run(tmp_path):
    source = """
    import os
    import pytest

    @pytest.mark.mpi(ranks=(2, 3))
    @pytest.mark.parametrize("name", "abc")
    def test_one(name):
        with open("ran", "a") as ran:
            print(f"{name} {os.getppid()}", file=ran)
    """
    plant(tmp_path, test_shared=source)
    results = run(tmp_path, *PLAIN, "-k", "2ranks and not b")
    assert list(results.outcomes) == ["test_one[2ranks-a]", "test_one[2ranks-c]"]
    lines = (tmp_path / "ran").read_text().split("\n")[:-1]
    assert sorted(line[0] for line in lines) == ["a", "a", "c", "c"]
    assert len({line[2:] for line in lines}) == 1  # one parent: Hydra's proxy


def test_module_that_breaks_on_one_rank_fails_all_its_tests(tmp_path):
    source = """
    import pytest
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        raise ImportError("no luck on rank 1")

    @pytest.mark.mpi(ranks=(2,))
    @pytest.mark.parametrize("name", "ab")
    def test_one(name):
        pass
    """
    results = run(plant(tmp_path, test_broken=source), *PLAIN)
    assert set(results.outcomes.values()) == {"failure"}
    assert len(results.outcomes) == 2
    assert "no luck on rank 1" in results.texts["test_one[2ranks-b]"]


def test_rank_that_dies_after_the_last_test_fails_that_test(tmp_path):
    source = """
    import atexit, os
    import pytest

    @pytest.mark.mpi(ranks=(2,))
    def test_one():
        atexit.register(os._exit, 7)
    """
    results = run(plant(tmp_path, test_exit=source), *PLAIN)
    assert "passed, but then" in results.texts["test_one[2ranks]"]
    assert "exit code 7" in results.texts["test_one[2ranks]"]


def test_marker_without_ranks_is_refused_with_what_to_write(tmp_path):
    source = """
    import pytest

    @pytest.mark.mpi
    def test_one():
        pass
    """
    results = run(plant(tmp_path, test_bare=source), *PLAIN)
    assert results.returncode == pytest.ExitCode.INTERRUPTED
    assert "got ranks=None: write @pytest.mark.mpi(ranks=(1, 2, 4))" in results.printed


USERS_OWN = """
    import pytest
    from mpi4py import MPI

    def test_without_ranks():
        pass

    @pytest.mark.mpi(ranks=(1, 2))
    def test_passes():
        assert MPI.COMM_WORLD.allreduce(1) == 2

    @pytest.mark.mpi(ranks=(3,))
    def test_wants_3():
        pass

    @pytest.mark.mpi(ranks=(2,))
    def test_raises_on_rank_1():
        if MPI.COMM_WORLD.rank == 1:
            raise ValueError("boom")
        MPI.COMM_WORLD.Barrier()
"""


def test_users_own_mpirun_runs_tests_of_its_size_and_prints_once(tmp_path):
    plant(tmp_path, test_own=USERS_OWN)
    command = [*mpirun_command(2), *PYTEST, "--with-mpi"]
    good = run(tmp_path, *command, "-k", "not raises")
    assert good.returncode == 0, good.printed
    assert good.printed.count("1 passed, 4 deselected") == 1
    bad = run(tmp_path, *command)
    assert bad.returncode == 1
    assert "=== rank 1 of 2: test_own.py::test_raises_on_rank_1[2ranks]" in bad.printed
    assert bad.printed.count("ValueError: boom") == 1


WAITS = """
    import os
    import pytest
    from mpi4py import MPI

    @pytest.mark.mpi(ranks=(2,))
    def test_waits():
        with open("pids", "a") as pids:
            print(os.getpid(), file=pids)
        MPI.COMM_WORLD.recv(source=1 - MPI.COMM_WORLD.rank)
"""


def test_deadlock_leaves_no_process(tmp_path):
    results = run(plant(tmp_path, test_wait=WAITS), *PLAIN, "--rank-timeout=4")
    assert results.outcomes == {"test_waits[2ranks]": "failure"}
    wait_until(lambda: not alive(tmp_path / "pids"), 2)


def test_interrupt_ends_the_ranks(tmp_path):
    plant(tmp_path, test_wait=WAITS)
    pytest_process = subprocess.Popen(
        PYTEST, cwd=tmp_path, env=BARE, stdout=subprocess.DEVNULL
    )
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, 30)
    pytest_process.send_signal(signal.SIGINT)
    assert pytest_process.wait(30) == pytest.ExitCode.INTERRUPTED
    wait_until(lambda: not alive(pids), 2)


def test_users_own_mpirun_ends_a_deadlock(tmp_path):
    plant(tmp_path, test_wait=WAITS)
    command = [*mpirun_command(2), *PYTEST, "--with-mpi", "--rank-timeout=2"]
    begin = time.monotonic()
    results = run(tmp_path, *command)
    assert results.returncode != 0
    assert time.monotonic() - begin < 30
    assert "in test_waits" in results.printed


def test_mpirun_without_with_mpi_is_refused(tmp_path):
    plant(tmp_path, test_own=USERS_OWN)
    results = run(tmp_path, *PLAIN, PMI_SIZE="2")
    assert results.returncode == pytest.ExitCode.USAGE_ERROR
    assert "add --with-mpi, or leave mpirun out" in results.printed


def test_ranks_inherit_nothing_of_another_launcher(monkeypatch):
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("HOME", "/home/learner")
    env = rank_environment((os.cpu_count() or 1) + 1)
    assert not [
        k for k in env if k.startswith(("PMI_", "OMPI_COMM", "MPI_L", "SLURM_"))
    ]
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["HOME"] == "/home/learner"
    assert env["MPIR_CVAR_ENABLE_HEAVY_YIELD"] == env["NUMBA_NUM_THREADS"] == "1"
    assert "MPIR_CVAR_ENABLE_HEAVY_YIELD" not in rank_environment(1)


def test_traceback_shows_source_without_the_frames_of_pytest():
    text = (
        "Current thread 0x1 (most recent call first):\n"
        f'  File "{__file__}", line 1 in test_one\n'
        '  File "/x/site-packages/_pytest/python.py", line 1 in pytest_pyfunc_call\n'
    )
    first, frame, source = readable_traceback(text).splitlines()
    assert first.startswith("Current thread")
    assert frame.endswith("in test_one")
    assert source.startswith('    """Tests on ranks')
