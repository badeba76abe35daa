"""The NCCL communicator, on stand-ins for CuPy and for NCCL (over MPI)."""

import importlib.util
import inspect
import re
import sys
import textwrap
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.comm.algorithms.bruck_all_to_all import bruck_all_to_all
from mpiscale.comm.algorithms.recursive_doubling_all_gather import (
    recursive_doubling_all_gather,
)
from mpiscale.comm.algorithms.ring_all_reduce import ring_all_reduce
from mpiscale.comm.algorithms.ring_reduce_scatter import ring_reduce_scatter
from mpiscale.comm.communicator import Waitall
from mpiscale.comm.nccl import NcclCommunicator
from mpiscale.comm.nccl_calls import Cuda, import_cuda
from mpiscale.comm.nccl_watch import NcclWatch
from mpiscale.errors import InputError
from tests.comm import nccl_over_mpi
from tests.comm import strict_device_array as device
from tests.comm.every_method import Checked
from tests.comm.scripts import run_script
from tests.communicators import world_communicator

CUDA = Cuda(device, nccl_over_mpi)


def communicator(comm=MPI.COMM_WORLD, **options):
    return NcclCommunicator(comm, cuda=CUDA, **options)


def filled(value, *shape):
    x = device.empty(shape, np.float32)
    x.fill(value)
    return x


@pytest.mark.mpi(ranks=(1, 3))
def test_every_method_equals_numpy():
    comm = communicator()
    for n in (0, 1, 10):
        Checked(comm, device).all(n)
    for dtype in (np.int32, np.uint8, np.float64):
        Checked(comm, device).all(3, dtype)


@pytest.mark.mpi(ranks=(1, 3))
def test_every_layout_is_sent_and_filled():
    Checked(communicator(), device).every_layout()


@pytest.mark.mpi(ranks=(3,))
def test_half_precision_is_summed_in_float32_and_rounded_once():
    comm = communicator()
    for half in (np.float16, ml_dtypes.bfloat16):
        Checked(comm, device).half_precision(half)


@pytest.mark.mpi(ranks=(3,))
def test_types_that_nccl_does_not_know_are_moved_but_not_summed():
    comm = communicator()
    for dtype in (np.int16, np.complex64, bool):
        x = device.asarray((np.arange(6) == comm.rank).astype(dtype))
        comm.Bcast(x, root=2)
        assert (device.asnumpy(x) == (np.arange(6) == 2).astype(dtype)).all()
        with pytest.raises(TypeError, match="reduce elements of type"):
            comm.Allreduce(MPI.IN_PLACE, x)
    assert len(comm.ledger.recent) == 3


@pytest.mark.mpi(ranks=(3,))
def test_algorithms_of_messages_run_on_it():
    comm = communicator()
    p, rank = comm.size, comm.rank
    x = np.arange(5.0 * p).reshape(p, 5) + 100 * np.arange(p)[:, None, None]
    mine, total = device.asarray(x[rank]), x.sum(axis=0)
    same = np.testing.assert_array_equal
    same(device.asnumpy(ring_all_reduce(mine, comm)), total)
    same(device.asnumpy(ring_reduce_scatter(mine, comm)), total[rank])
    gathered = recursive_doubling_all_gather(mine, comm)
    same(device.asnumpy(gathered), x.reshape(-1))
    exchanged = bruck_all_to_all(mine, comm)
    same(device.asnumpy(exchanged), x[:, rank].reshape(-1))


@pytest.mark.mpi(ranks=(2,))
def test_ranks_that_both_send_first_do_not_wait_for_each_other():
    comm = communicator()
    other = 1 - comm.rank
    x, y = filled(comm.rank, 9), filled(-1, 9)
    send, receive = comm.Isend(x, other), comm.Irecv(y, other)
    send.Wait()
    receive.Wait()
    assert (device.asnumpy(y) == other).all()


@pytest.mark.mpi(ranks=(2,))
def test_collected_messages_start_before_the_next_collective():
    comm = communicator()
    x, y = filled(comm.rank, 9), filled(-1, 9)
    if comm.rank == 0:  # its message starts at once, and holds up its stream
        comm.Send(x, 1)
        comm.Allreduce(MPI.IN_PLACE, x)
    else:
        request = comm.Irecv(y, 0)
        comm.Allreduce(MPI.IN_PLACE, x)
        request.Wait()
        assert (device.asnumpy(y) == 0).all()
    assert (device.asnumpy(x) == 1).all()


@pytest.mark.mpi(ranks=(2,))
def test_messages_between_two_ranks_keep_their_order():
    comm = communicator()
    if comm.rank == 0:
        Waitall([comm.Isend(filled(i, 3), 1) for i in range(4)])
        comm.Barrier()
        return
    arrived = [filled(-1, 3) for _ in range(4)]
    Waitall([comm.Irecv(y, 0) for y in arrived])
    comm.Barrier()
    assert [device.asnumpy(y)[0] for y in arrived] == [0, 1, 2, 3]


@pytest.mark.mpi(ranks=(2,))
def test_sum_is_right_though_slow_kernels_run_before_and_after_it():
    comm = communicator()
    x, y = device.empty(50, np.float32), device.empty(50, np.float32)
    for run in range(100):
        with device.cuda.Stream():
            x.fill(comm.rank + 1)
            comm.Allreduce(x, y)
            z = y * 1
            x.fill(-100)
            y.fill(-100)
            assert (device.asnumpy(z) == 3).all(), run


@pytest.mark.mpi(ranks=(2,))
def test_stream_that_waits_for_a_request_sees_what_another_stream_received():
    comm = communicator()
    messages, other = device.cuda.Stream(), 1 - comm.rank
    for n in range(1, 20):
        x, y, z = filled(comm.rank + 1, n, 2), filled(0, 2, n), filled(0, n)
        messages.wait_event(device.get_current_stream().record())
        with messages:
            collective = comm.Iallreduce(x, y.T)
            received, sent = comm.Irecv(z, other), comm.Isend(x[:, 0], other)
        for request in (collective, received, sent):
            request.Wait()
        assert (device.asnumpy(y * 2) == 6).all()
        assert (device.asnumpy(z + 1) == other + 2).all()


@pytest.mark.mpi(ranks=(2,))
def test_temporary_is_not_used_again_before_another_stream_has_read_it():
    comm, messages = communicator(), device.cuda.Stream()
    y = filled(0, 2, 5)
    device.get_current_stream().synchronize()
    with messages:
        request = comm.Iallreduce(filled(comm.rank + 1, 5, 2), y.T)
    request.Wait()  # here the temporary is read, and freed
    messages.synchronize()
    assert (y._memory == 3).all()


@pytest.mark.mpi(ranks=(2,))
def test_test_says_false_until_the_gpu_is_done():
    comm = communicator()
    requests = [comm.Iallreduce(filled(1, 4), filled(0, 4))]
    requests.append(comm.Irecv(filled(0, 4), 1 - comm.rank))
    requests.append(comm.Isend(filled(0, 4), 1 - comm.rank))
    assert [request.Test() for request in requests] == [False] * 3
    assert np.isnan(comm.ledger.recent[0].end)
    assert [request.Test() for request in requests] == [True] * 3
    assert [request.Test() and request.Wait() for request in requests] == [True] * 3
    assert comm.ledger.recent[0].end > 0


@pytest.mark.mpi(ranks=(3,))
def test_ledger_says_the_same_as_over_mpi_but_for_the_transport():
    booked = []
    for comm in (communicator(), world_communicator()):
        x, blocks = filled(1, 4), filled(1, 3, 4)
        half = device.empty(4, np.float16)
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        comm.Allreduce(x, filled(0, 4))
        comm.Allreduce(half, device.empty(4, np.float16))
        comm.Iallgather(x, filled(0, 3, 4)).Wait()
        comm.Reduce(x, filled(0, 4), root=1)
        comm.Alltoallv(blocks, filled(0, 12))
        comm.Allgatherv(x, filled(0, 12))
        comm.Reduce_scatter_block(blocks, x)
        comm.Bcast(half, 2)
        comm.Sendrecv(x, right, 0, filled(0, 4), left)
        Waitall([comm.Irecv(x, left), comm.Isend(filled(0, 4), right)])
        comm.Barrier()
        entries = list(comm.ledger.recent)
        assert all(np.isfinite(entry.end) for entry in entries)
        assert all(entry.where.startswith(__file__) for entry in entries)
        booked.append(
            [
                (e.operation, e.payload, e.sent, e.group, e.group_size, e.peer)
                for e in entries
            ]
        )
        said = [entry.transport for entry in entries]
        if isinstance(comm, NcclCommunicator):
            assert said == ["nccl", "nccl, float32", *["nccl"] * 9, "mpi"]
    assert booked[0] == booked[1]


@pytest.mark.mpi(ranks=(2,))
def test_what_nccl_can_not_do_is_refused_before_anything_is_sent():
    comm = communicator()
    x, other = filled(1, 4), 1 - comm.rank
    refused = [
        (lambda: comm.Allreduce(np.zeros(4), np.zeros(4)), "copy it there with cupy"),
        (lambda: comm.Bcast(np.zeros(4)), "NCCL moves arrays on a GPU, got a NumPy"),
        (lambda: comm.Isend(np.zeros(4), other), "NCCL moves arrays on a GPU"),
        (lambda: comm.Allreduce([1.0], x), "must be a NumPy array"),
        (lambda: comm.Send(x, other, tag=3), "NCCL has no tags.* got 3"),
        (lambda: comm.Recv(x), "pass source"),
        (lambda: comm.Sendrecv(x, other, 0, x * 1, other, 7), "NCCL has no tags"),
        (lambda: comm.Allreduce(x, x), "share memory"),
        (lambda: comm.Allreduce(x, filled(1, 5)), "got 4 and 5"),
        (lambda: comm.send(x, other), "use Send"),
    ]
    for call, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert not comm.ledger.recent
    comm.Barrier()


@pytest.mark.mpi(ranks=(4,))
def test_split_groups_share_ledger_and_watch():
    comm = communicator()
    part = comm.Split(comm.rank % 2, key=-comm.rank)
    assert (part.size, part.rank) == (2, 1 - comm.rank // 2)
    total = filled(comm.rank, 2)
    part.Allreduce(MPI.IN_PLACE, total)
    assert (device.asnumpy(total) == [2, 4][comm.rank % 2]).all()
    assert comm.ledger.sent_bytes(group=f"world/{comm.rank % 2}") == 8
    assert part._watch is comm._watch
    assert part.allgather(comm.rank) == [comm.rank % 2 + 2, comm.rank % 2]


@pytest.mark.mpi(ranks=(2,))
def test_ranks_with_the_same_gpu_are_named():
    class Device:
        pci_bus_id = "0000:18:00.0"

    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=Device))
    with pytest.raises(InputError, match=r"ranks \[0, 1\] all use GPU 0000:18:00.0"):
        NcclCommunicator(MPI.COMM_WORLD, cuda=Cuda(cupy, nccl_over_mpi))


@pytest.mark.mpi(ranks=(2,))
def test_call_after_a_failure_raises_and_gives_up_what_is_in_flight():
    comm = communicator()
    request = comm.Iallreduce(filled(1, 4), filled(0, 4))
    comm.Barrier()
    comm.nccl.failure = nccl_over_mpi.NcclError("NCCL_ERROR_SYSTEM_ERROR")
    for call in (request.Test, lambda: comm.Bcast(filled(1, 4))):
        with pytest.raises(RuntimeError, match="of 2 in group 'world': NCCL_ERROR_SYS"):
            call()
    assert comm.nccl.aborted
    assert comm.failed


def test_watch_ends_the_job_for_a_failure_that_nobody_else_reports():
    class Comm:
        failed = False

        def check(self):
            raise RuntimeError("NCCL failed")

    ended = []
    watch = NcclWatch(ended.append, period=3600)
    broken, reported = Comm(), Comm()
    reported.failed = True
    watch.add(broken)
    watch.add(reported)
    watch.look()
    assert ended == ["NCCL failed"]
    del broken
    watch.look()
    assert ended == ["NCCL failed"]


def test_rank_that_hangs_in_cuda_is_ended_when_nccl_fails(tmp_path):
    script = """
        from mpiscale.comm.nccl import NcclCommunicator
        from tests.comm import nccl_over_mpi, strict_device_array
        from tests.comm.test_nccl import CUDA

        def main(world: World) -> None:
            comm = NcclCommunicator(world.comm.mpi, cuda=CUDA)
            if world.rank == 1:
                comm.nccl.failure = nccl_over_mpi.NcclError("connection lost")
            time.sleep(600)  # as a rank in cudaStreamSynchronize

        run(main)
        """
    result = run_script(tmp_path, textwrap.dedent(script), ranks=2)
    assert result.code != 0
    assert "NCCL failed on rank 1 of 2 in group 'world': connection lost." in result.err


def test_missing_cupy_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InputError, match=r"NCCL needs CuPy .*mpiscale\[cuda12\]"):
        import_cuda()


def arguments_of(signature):
    """Names of the arguments in the first line of a docstring of Cython's."""
    inside = re.fullmatch(r"\w+\((.*)\)(?: -> .*)?", signature).group(1)
    return [part.split("=")[0].split()[-1] for part in inside.split(", ") if part]


def test_stand_in_has_the_signatures_and_codes_of_nccl_in_cupy():
    table = nccl_over_mpi.TABLE
    kinds = (
        (nccl_over_mpi.NcclCommunicator, table["NcclCommunicator"]),
        (nccl_over_mpi, table["functions"]),
    )
    for stand_in, signatures in kinds:
        members = inspect.getmembers(stand_in, inspect.isfunction)
        checked = {name: f for name, f in members if name in signatures}
        assert len(checked) >= 3
        for name, function in checked.items():
            expected = arguments_of(signatures[name])
            assert list(inspect.signature(function).parameters) == expected, name
    calls = {
        name
        for name, _ in inspect.getmembers(nccl_over_mpi.NcclCommunicator)
        if not name.startswith("_")
    }
    assert calls <= table["NcclCommunicator"].keys()
    for code, name in enumerate(nccl_over_mpi.TYPES):
        assert table["constants"][f"NCCL_{name.upper()}"] == code


@pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"
)
def test_table_of_signatures_equals_the_installed_cupy():
    nccl = pytest.importorskip("cupy.cuda.nccl")
    table = nccl_over_mpi.TABLE
    for name, signature in table["NcclCommunicator"].items():
        documented = getattr(nccl.NcclCommunicator, name).__doc__.splitlines()[0]
        assert documented.removeprefix("NcclCommunicator.") == signature
    for name, signature in table["functions"].items():
        assert getattr(nccl, name).__doc__.splitlines()[0] == signature
    for name, code in table["constants"].items():
        assert getattr(nccl, name) == code
