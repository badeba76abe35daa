"""Planted faults of communication, and what debug mode says of each."""

import re

import pytest

from tests.comm.scripts import run_script

HEAD = """
def main(world):
    comm, rank, p = world.comm, world.rank, world.size
    x, y = np.ones(10, np.float32), np.empty(10, np.float32)
"""


def debug(folder, body, ranks=2, timeout="1", **variables):
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    script = f"{HEAD}{lines}\nrun(main)\n"
    return run_script(
        folder, script, ranks=ranks, MPISCALE_DEBUG_COMM=timeout, **variables
    )


def line_of(folder, text):
    """script.py:N of the first line of the script with this text."""
    lines = (folder / "script.py").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if text in line)
    return f"script.py:{number}"


def test_two_ranks_that_send_first_are_shown_as_a_cycle(tmp_path):
    done = debug(tmp_path, """
if rank == 0:
    comm.Send(x, 1, tag=7)
else:
    comm.Send(x, 0, tag=8)
comm.Recv(y, 1 - rank)
""")  # fmt: skip
    assert done.code == 1
    assert "a deadlock" in done.err and "cycle: rank 0 -> rank 1 -> rank 0" in done.err
    for rank, tag in ((0, 7), (1, 8)):
        said = rf"rank {rank} waits .*Send of 10 float32 to rank {1 - rank} tag {tag} "
        where = re.escape(line_of(tmp_path, f"tag={tag}"))
        assert re.search(rf"{said}\(40 B\), .*{where}", done.err), done.err


def test_three_ranks_in_a_circle_are_shown(tmp_path):
    done = debug(tmp_path, """
request = comm.Irecv(y, (rank - 1) % p)
request.Wait()
comm.Send(x, (rank + 1) % p)
""", ranks=3)  # fmt: skip
    assert done.code == 1
    assert "cycle: rank 0 -> rank 2 -> rank 1 -> rank 0" in done.err
    assert done.err.count("Irecv of 10 float32 from rank") == 3


def test_a_rank_that_has_left_is_named(tmp_path):
    done = debug(tmp_path, "if rank != 1:\n    comm.Barrier()", ranks=3)
    assert done.code == 1
    assert "rank 0 waits for rank 1: Barrier" in done.err
    assert "rank 2 waits for rank 1: Barrier" in done.err
    assert "rank 1 has left: nobody can wait for it" in done.err


def test_a_rank_that_computes_is_shown_but_not_ended(tmp_path):
    done = debug(tmp_path, """
if rank == 1:
    time.sleep(3)
comm.Allreduce(x, y)
sys.stdout.write(f"sum {y[0]}\\n")
""")  # fmt: skip
    assert done.code == 0 and done.out.count("sum 2.0") == 2
    assert done.err.count("no deadlock: somebody computes") == 1
    where = re.escape(line_of(tmp_path, "time.sleep"))
    assert re.search(rf"rank 1 computes in main, .*{where}", done.err)


def test_a_slow_rank_below_the_timeout_raises_no_alarm(tmp_path):
    done = debug(tmp_path, """
for _ in range(3):
    time.sleep(0.3 * rank)
    comm.Allreduce(x, y)
""", timeout="2")  # fmt: skip
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            ("comm.Allreduce(x, y)", "comm.Allgather(x[:5].copy(), y)"),
            ("Allreduce of 10 float32 SUM", "Allgather of 5 float32"),
        ),
        (
            ("comm.Allreduce(x, y)", "comm.Allreduce(x[:4].copy(), y[:4].copy())"),
            ("Allreduce of 10 float32", "Allreduce of 4 float32"),
        ),
        (
            ("comm.Allreduce(x, y)", "comm.Allreduce(x.astype('i4'), y.astype('i4'))"),
            ("of 10 float32", "of 10 int32"),
        ),
        (("comm.Bcast(x, 0)", "comm.Bcast(x, 1)"), ("root 0", "root 1")),
        (("comm.bcast(3, 0)", "comm.bcast(3, 1)"), ("root 0", "root 1")),
        (("comm.Barrier()", "comm.allgather(1)"), ("Barrier", "allgather")),
        (
            ("comm.Iallreduce(x, y).Wait()", "comm.Allreduce(x, y)"),
            ("Iallreduce", "Allreduce"),
        ),
        (
            ("comm.Split(0).Barrier()", "comm.Barrier(); comm.Split(0)"),
            ("Split", "Barrier"),
        ),
        (
            (
                "from mpi4py import MPI; comm.Allreduce(x, y, MPI.MAX)",
                "comm.Allreduce(x, y)",
            ),
            ("MAX", "SUM"),
        ),
    ],
)
def test_collectives_that_differ_are_reported_at_the_call(tmp_path, calls, words):
    done = debug(tmp_path, f"if rank == 0:\n    {calls[0]}\nelse:\n    {calls[1]}")
    assert done.code == 1 and done.seconds < 10
    assert "ranks do not make the same collective call on group world" in done.err
    for rank, (call, word) in enumerate(zip(calls, words, strict=True)):
        where = re.escape(line_of(tmp_path, call))
        assert re.search(rf"rank {rank}: .*{word}.* at .*{where}", done.err), done.err


def test_two_groups_used_in_another_order_are_a_cycle(tmp_path):
    done = debug(tmp_path, """
first, second = comm.Split(0), comm.Split(0)
for group in (first, second) if rank == 0 else (second, first):
    group.Barrier()
""")  # fmt: skip
    assert done.code == 1
    assert "cycle: rank 0 -> rank 1 -> rank 0" in done.err


def test_an_array_changed_while_it_is_sent_is_found(tmp_path):
    done = debug(tmp_path, """
if rank == 0:
    request = comm.Isend(x, 1)
    x[3] = 7
    request.Wait()
else:
    time.sleep(0.5)
    comm.Recv(y, 0)
""")  # fmt: skip
    assert done.code == 1
    assert "BufferChangedError: Isend of 10 float32 to rank 1" in done.err
    assert line_of(tmp_path, "comm.Isend") in done.err


def test_collectives_in_flight_may_be_waited_for_in_any_order(tmp_path):
    done = debug(tmp_path, """
z = np.empty_like(y)
first, second = comm.Iallreduce(x, y), comm.Iallreduce(2 * x, z)
if rank == 0:
    comm.Send(x, 1)
    second.Wait(), first.Wait()
else:
    comm.Recv(x, 0)
    while not first.Test():
        pass
    second.Wait()
print(y[0], z[0])
""")  # fmt: skip
    assert done.code == 0, done.err
    assert done.out.split() == ["2.0", "4.0"] * 2


def test_a_timeout_that_is_no_number_is_refused(tmp_path):
    done = debug(tmp_path, "pass", timeout="soon")
    assert done.code == 2
    assert "MPISCALE_DEBUG_COMM must be the timeout in seconds" in done.err
