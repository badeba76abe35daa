"""How a job starts, as the user meets it: scripts under mpirun."""

import os

import pytest

from tests.comm.scripts import run_script


def test_world_says_where_each_rank_is(tmp_path):
    result = run_script(
        tmp_path,
        """
        def main(world: World) -> None:
            places = world.comm.gather((world.rank, world.local_rank, world.local_size))
            if places:
                print(places, world.size, world.comm.name, world.nodes)
                print(world)

        run(main)
        """,
    )
    places, description = result.out.splitlines()
    assert places == "[(0, 0, 3), (1, 1, 3), (2, 2, 3)] 3 world 1"
    assert description.startswith("3 ranks on 1 node, ")
    assert "thread" in description
    assert ("MPICH" in description) or ("Open MPI" in description)
    assert (result.code, result.err) == (0, "")


def test_rank_without_launcher_is_a_world_of_its_own(tmp_path):
    script = "run(lambda world: print(world.size, world.comm.allgather('x')))"
    result = run_script(tmp_path, script, ranks=0)
    assert (result.code, result.out, result.err) == (0, "1 ['x']\n", "")


def test_only_rank_0_prints_what_all_would(tmp_path):
    result = run_script(
        tmp_path,
        """
        def main(world: World) -> None:
            with printed_by_rank_0(world.rank):
                print("usage: ...")
                sys.exit(0)

        run(main)
        """,
    )
    assert (result.code, result.out, result.err) == (0, "usage: ...\n", "")


def test_several_worlds_of_one_are_refused_at_the_start(tmp_path):
    script = "run(lambda world: print('started'))"
    slurm = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
    result = run_script(tmp_path, script, ranks=0, **slurm)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: the launcher started 4 ranks, but MPI sees")


@pytest.mark.parametrize("first", ["numba", "sys"])
def test_threads_are_shared_out_and_warned_of(tmp_path, first):
    script = f"""
        import {first}, threadpoolctl

        def main(world: World) -> None:
            import numba  # which may thus be loaded before or after the threads are set

            pools = threadpoolctl.threadpool_info()
            blas = {{p["num_threads"] for p in pools if p["user_api"] == "blas"}}
            if world.rank == 0:
                print(world.threads, numba.get_num_threads(), blas)

        run(main)
        """
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    numba = {"NUMBA_NUM_THREADS": "64"}
    result = run_script(tmp_path, script, 2, **numba)
    assert result.out == f"{share} {share} {{{share}}}\n"
    assert result.err == ""
    result = run_script(tmp_path, script, 2, OMP_NUM_THREADS="40", **numba)
    assert result.out.startswith("40 40 ")
    assert result.err.startswith("warning: OMP_NUM_THREADS=40 gives 2 ranks x 40")


def test_waiting_ranks_sleep_where_ranks_outnumber_cpus(tmp_path):
    script = """
        from mpi4py import MPI

        def main(world: World) -> None:
            world.comm.Barrier()
            begin = time.process_time()
            if world.rank == 0:
                time.sleep(1.5)
            world.comm.Barrier()
            if world.rank == 1:
                print(time.process_time() - begin, "MPICH" in MPI.Get_library_version())

        run(main)
        """
    used, mpich = run_script(tmp_path, script, 2 + (os.cpu_count() or 1)).out.split()
    if mpich != "True":
        pytest.skip("Open MPI decides by itself")
    assert float(used) < 0.5


def test_polite_barrier_waits_for_all_without_burning_cpu(tmp_path):
    result = run_script(
        tmp_path,
        """
        def main(world: World) -> None:
            world.comm.Barrier()
            begin, cpu = time.monotonic(), time.process_time()
            if world.rank == 0:
                time.sleep(1.5)
            polite_barrier(world.comm)
            if world.rank == 1:
                print(time.monotonic() - begin, time.process_time() - cpu)

        run(main)
        """,
        ranks=2,
    )
    waited, used = map(float, result.out.split())
    assert waited > 1.4
    assert used < 0.25  # a blocking Wait takes all the CPU it gets
