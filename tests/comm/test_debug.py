"""Planted faults of communication, and what debug mode says of each."""

import re

import pytest

from tests.comm.scripts import line_of, run_script

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


def test_one_array_sent_again_while_it_is_on_its_way_is_found(tmp_path):
    done = debug(tmp_path, """
big = np.empty(262_144, np.float32)
if rank == 0:
    requests = []
    for m in range(8):
        big.fill(m)
        requests.append(comm.Isend(big, 1))
    for request in requests:
        request.Wait()
else:
    for m in range(8):
        time.sleep(0.1)
        comm.Recv(big, 0)
""")  # fmt: skip
    assert done.code == 1
    assert "BufferChangedError: Isend of 262144 float32 to rank 1" in done.err


def test_an_array_read_before_it_has_arrived_holds_nan(tmp_path):
    done = debug(tmp_path, """
n, other = np.zeros(10, np.int16), 1 - rank
arriving = [comm.Irecv(y, other), comm.Irecv(n, other, tag=1)]
early = np.isnan(y).all() and (n == 32767).all()
comm.Barrier()
leaving = [comm.Isend(x, other), comm.Isend(n * 0, other, tag=1)]
for request in arriving + leaving:
    request.Wait()
print(early, (y == 1).all(), (n == 0).all())
""")  # fmt: skip
    assert done.code == 0, done.err
    assert done.out.split() == ["True"] * 6


def test_what_is_in_flight_is_listed_with_its_line(tmp_path):
    done = debug(tmp_path, """
request = comm.Irecv(y, 1 - rank, tag=5)
comm.Sendrecv(x, 1 - rank, 6, y.copy(), 1 - rank, 7)
""")  # fmt: skip
    assert done.code == 1
    where = re.escape(line_of(tmp_path, "comm.Irecv"))
    waiting = r"in flight: Irecv of 10 float32 from rank 1 tag 5 \(40 B\), "
    assert re.search(rf"{waiting}.*{where}", done.err), done.err
    said = "Sendrecv of 10 float32 to rank 1 tag 6 (40 B) and of 10 float32 from rank 1"
    assert f"{said} tag 7" in done.err


def test_a_rank_that_keeps_pythons_lock_is_not_taken_for_waiting(tmp_path):
    done = debug(tmp_path, """
if rank == 0:
    time.sleep(0.6)  # rank 1 is known to wait for rank 0
    comm.Send(x, 1)
    comm.Recv(y, 1)
else:
    comm.Recv(y, 0)
    end = time.monotonic() + 2.5
    sys.setswitchinterval(100)  # its watcher gets no turn
    while time.monotonic() < end:
        pass
    comm.Send(x, 0)
""")  # fmt: skip
    assert done.code == 0, done.err
    assert "rank 1 computes in a call that keeps Python's lock" in done.err


def test_a_thread_may_move_on_what_the_main_thread_started(tmp_path):
    done = debug(tmp_path, """
from mpi4py import MPI
from mpiscale.parallel.mover import Mover
sys.setswitchinterval(1e-5)
for step in range(60):
    mover, sums = Mover(), [np.full(1000, i, float) for i in range(4)]
    requests = []
    for part in sums:
        with mover.lock:
            requests.append(comm.Iallreduce(MPI.IN_PLACE, part))
            mover.in_flight.append(requests[-1])
        time.sleep(0.001 * ((step + rank) % 2))
        comm.Allreduce(x, y)
    mover.stop()
    for request in requests:
        request.Wait()
    assert [part[0] for part in sums] == [0, 2, 4, 6]
""", timeout="5")  # fmt: skip
    assert done.code == 0, done.err


def test_an_error_that_a_test_has_raised_is_raised_again_by_wait(tmp_path):
    done = debug(tmp_path, """
request = comm.Iallreduce(*((x, y) if rank else (x[:3].copy(), y[:3].copy())))
try:
    while not request.Test():
        pass
except RuntimeError:
    pass
request.Wait()
""")  # fmt: skip
    assert done.code == 1
    assert "rank 0: Iallreduce of 3 float32 SUM" in done.err
    assert "rank 1: Iallreduce of 10 float32 SUM" in done.err


def test_buckets_reduced_in_another_order_are_named(tmp_path):
    done = debug(tmp_path, """
a, b = np.ones(2), np.full(3, 10.0)
for gradient in (a, b) if rank == 0 else (b, a):
    comm.Allreduce(gradient, np.empty_like(gradient))
""")  # fmt: skip
    assert done.code == 1
    assert "rank 0: Allreduce of 2 float64 SUM" in done.err
    assert "rank 1: Allreduce of 3 float64 SUM" in done.err


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("elements", [25, 16_384])
def test_a_ring_in_which_all_send_first_hangs_at_any_size(tmp_path, ranks, elements):
    done = debug(tmp_path, f"""
big, into = np.ones({elements}, np.float32), np.empty({elements}, np.float32)
comm.Sendrecv(big, (rank + 1) % p, 0, into, (rank - 1) % p)  # this is the right way
comm.Send(big, (rank + 1) % p)
comm.Recv(into, (rank - 1) % p)
""", ranks=ranks)  # fmt: skip
    assert done.code == 1
    circle = " -> ".join(f"rank {r}" for r in [*range(ranks), 0])
    assert f"cycle: {circle}" in done.err
    where = re.escape(line_of(tmp_path, "comm.Send(big"))
    assert len(re.findall(rf"Send of {elements} float32 .*{where}", done.err)) == ranks


def test_activations_and_gradients_of_two_ranks_are_told_apart_by_tag(tmp_path):
    """On two ranks the previous and the next peer coincide, with equal shapes."""
    done = debug(tmp_path, """
other, activation, gradient = 1 - rank, np.empty(4), np.empty(4)
arriving = [comm.Irecv(gradient, other, tag=2), comm.Irecv(activation, other, tag=1)]
leaving = [comm.Isend(np.full(4, float(t)), other, tag=t) for t in (1, 2)]
for request in arriving + leaving:
    request.Wait()
print(activation[0], gradient[0])
""")  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert done.out.split() == ["1.0", "2.0"] * 2


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
