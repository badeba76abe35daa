"""How a job ends, as the user meets it: scripts under mpirun."""

import signal
import time

import pytest

from tests.comm.scripts import LONGEST_S, ended, line_of, run_script, start


def test_exception_on_one_rank_ends_all(tmp_path):
    result = run_script(
        tmp_path,
        """
        def main(world: World) -> None:
            if world.rank == 1:
                raise ValueError("boom")
            world.comm.Barrier()

        run(main)
        """,
    )
    assert result.code != 0
    assert "on rank 1 of 3: Traceback" in result.err
    assert "ValueError: boom" in result.err
    assert result.err.count("Traceback") == 1
    assert "world.py" not in result.err  # the traceback begins in main


@pytest.mark.parametrize("ranks", [0, 1])
def test_exception_in_a_world_of_one_is_shown_as_by_python(tmp_path, ranks):
    script = "run(lambda world: 1 / 0)"
    result = run_script(tmp_path, script, ranks)
    assert result.code == 1
    assert result.err.startswith("Traceback")
    assert "ZeroDivisionError" in result.err


def test_exception_on_rank_0_alone_or_on_the_last_one(tmp_path):
    for rank in (0, 2):
        result = run_script(
            tmp_path,
            f"""
            def main(world: World) -> None:
                if world.rank == {rank}:
                    raise ValueError("boom")

            run(main)
            """,
        )
        assert result.code != 0
        assert f"on rank {rank} of 3: Traceback" in result.err


def test_exception_in_a_thread_ends_all(tmp_path):
    result = run_script(
        tmp_path,
        """
        def fail() -> None:
            raise ValueError("boom")

        def main(world: World) -> None:
            if world.rank == 1:
                threading.Thread(target=fail, name="loader").start()
            time.sleep(60)

        run(main)
        """,
    )
    assert result.code != 0
    assert "on rank 1 of 3, in thread loader: Traceback" in result.err
    assert "ValueError: boom" in result.err


def test_thread_may_leave_by_sys_exit(tmp_path):
    result = run_script(
        tmp_path,
        """
        def main(world: World) -> None:
            thread = threading.Thread(target=sys.exit, args=(3,))
            thread.start()
            thread.join()

        run(main)
        """,
    )
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize("code", [0, 3])
def test_sys_exit_on_one_rank_ends_all(tmp_path, code):
    result = run_script(
        tmp_path,
        f"""
        def main(world: World) -> None:
            if world.rank == 2:
                sys.exit({code})
            world.comm.Barrier()

        run(main)
        """,
    )
    assert result.code != 0
    line = line_of(tmp_path, "sys.exit(")
    where = f"at {tmp_path}/{line} while the others still run"
    assert f"rank 2 left with exit code {code} {where}: ending the job" in result.err


def test_exception_during_import_ends_the_ranks_that_wait_in_mpi_init(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os\nif os.environ.get('PMI_RANK', os.environ.get("
        "'OMPI_COMM_WORLD_RANK')) == '1':\n    raise ImportError('boom')\n"
    )
    result = run_script(
        tmp_path,
        """
        import broken

        run(lambda world: world.comm.Barrier())
        """,
    )
    assert result.code != 0
    assert "on rank 1 of 3: Traceback" in result.err
    assert "ImportError: boom" in result.err


def test_exception_of_all_ranks_during_import_is_printed_once(tmp_path):
    result = run_script(tmp_path, "raise RuntimeError('boom')")
    assert result.code == 1
    assert result.err.count("on all 3 ranks: Traceback") == 1
    assert result.err.count("RuntimeError: boom") == 1


def test_same_input_error_on_all_ranks_is_printed_once(tmp_path):
    result = run_script(
        tmp_path,
        """
        def main(world: World) -> None:
            time.sleep(0.3 * world.rank)
            raise InputError("12 heads on 5 ranks")

        run(main)
        """,
    )
    assert (result.code, result.err) == (2, "error: 12 heads on 5 ranks\n")


def test_input_error_of_some_ranks_names_them(tmp_path):
    result = run_script(
        tmp_path,
        """
        def main(world: World) -> None:
            if world.rank:
                raise InputError("no such file")

        run(main)
        """,
    )
    assert result.code != 0
    assert "on ranks 1, 2 of 3: error: no such file\n" in result.err
    assert result.err.count("no such file") == 1


def test_same_exception_on_all_ranks_is_printed_once(tmp_path):
    result = run_script(tmp_path, "run(lambda world: 1 / 0)")
    assert result.code == 1
    assert result.err.count("Traceback") == 1
    assert "on all 3 ranks: Traceback" in result.err


def test_ranks_that_fail_alike_while_others_run_print_once(tmp_path):
    result = run_script(
        tmp_path,
        """
        def main(world: World) -> None:
            if world.rank > 0:
                raise ValueError("boom")
            time.sleep(60)

        run(main)
        """,
    )
    assert result.code != 0
    assert result.err.count("ValueError: boom") == 1


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), ("'too old'", 1)])
def test_sys_exit_on_all_ranks_is_no_error_of_the_job(tmp_path, code, expected):
    result = run_script(tmp_path, f"run(lambda world: sys.exit({code}))")
    assert result.code == expected
    assert result.err == ("too old\n" if expected == 1 else "")


@pytest.mark.parametrize("wait", ["time.sleep(60)", "world.comm.Barrier()"])
def test_interrupt_is_one_line(tmp_path, wait):
    begin = time.monotonic()
    job = start(
        tmp_path,
        f"""
        def main(world: World) -> None:
            sys.stdout.write("ready\\n")
            sys.stdout.flush()
            if world.rank == 0:
                time.sleep(60)
            {wait}

        run(main)
        """,
    )
    assert job.stdout is not None
    for _ in range(3):
        assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGINT)
    result = ended(job, begin)
    assert result.seconds < LONGEST_S
    assert result.code != 0
    assert result.err.count("interrupted") == 1
    assert "Traceback" not in result.err


def test_finished_rank_waits_without_burning_cpu(tmp_path):
    result = run_script(
        tmp_path,
        """
        import atexit

        def main(world: World) -> None:
            if world.rank == 1:
                time.sleep(2)
            begin = time.process_time()
            if world.rank == 0:
                atexit.register(lambda: print(time.process_time() - begin))

        run(main)
        """,
    )
    assert result.code == 0
    assert float(result.out) < 0.5


def test_finished_rank_says_for_whom_it_waits(tmp_path):
    result = run_script(
        tmp_path,
        """
        import mpiscale.comm.ending as ending

        ending.NOTICE_S = 1.0

        def main(world: World) -> None:
            if world.rank == 1:
                time.sleep(3)

        run(main)
        """,
    )
    assert result.code == 0
    assert result.err == "rank 0 has finished and waits for rank 1 of 3\n"
