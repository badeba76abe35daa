"""Arrays on a GPU through MPI, with the stand-in that forgives nothing.

Every check runs in both ways: MPI gets the device pointer, as a CUDA-aware one, or a
copy on the host; there a device pointer in MPI's hands ends the job.
"""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.backend import array_module, is_on_device
from mpiscale.comm.algorithms.recursive_doubling_all_gather import (
    recursive_doubling_all_gather,
)
from mpiscale.comm.algorithms.ring_all_reduce import ring_all_reduce
from mpiscale.comm.buffers import Landing, check_object, outgoing
from mpiscale.comm.cuda_aware import agreed_cuda_awareness, says_cuda_aware
from mpiscale.comm.mpi import MpiCommunicator
from tests.comm import strict_device_array as device
from tests.comm.every_method import Checked

LIMITS = (None, 7)


@contextlib.contextmanager
def communicator(cuda_aware, max_count=None):
    """Over an MPI that can follow device pointers, or one that can't."""
    access = device.mapped_for_mpi() if cuda_aware else contextlib.nullcontext()
    with access:
        yield MpiCommunicator(
            MPI.COMM_WORLD, max_count=max_count, cuda_aware=cuda_aware
        )


def both_ways():
    for cuda_aware in (False, True):
        for limit in LIMITS:
            with communicator(cuda_aware, limit) as comm:
                yield comm


def test_the_stand_in_lets_nobody_touch_its_memory():
    x = device.asarray(np.ones(3, np.float32))
    assert array_module(x) is device
    assert is_on_device(x)
    for touch in (np.asarray, float, bool, list, np.sum, memoryview):
        with pytest.raises(TypeError):
            touch(x)
    y = device.empty(3, np.float32)
    y[...] = x
    assert not (y._memory == 1).any()  # queued, until somebody waits
    np.testing.assert_array_equal(device.asnumpy(y), [1, 1, 1])
    with pytest.raises(TypeError, match="arrays of the host and of the device"):
        np.add(x, np.ones(3))


@pytest.mark.mpi(ranks=(1, 3))
def test_every_method_equals_numpy():
    for comm in both_ways():
        for n in (0, 1, 10):
            Checked(comm, device).all(n)


@pytest.mark.mpi(ranks=(3,))
def test_arrays_longer_than_a_count_of_mpi_arrive_in_pieces():
    for cuda_aware in (False, True):
        with communicator(cuda_aware, 1024) as comm:
            Checked(comm, device).all(5000)


@pytest.mark.mpi(ranks=(3,))
def test_algorithms_of_messages_run_on_it():
    for comm in both_ways():
        mine = device.asarray(np.arange(5.0) + comm.rank)
        total = ring_all_reduce(mine, comm)
        assert (device.asnumpy(total) == 3 * np.arange(5.0) + 3).all()
        everyone = recursive_doubling_all_gather(mine, comm)
        expected = np.concatenate([np.arange(5.0) + rank for rank in range(3)])
        assert (device.asnumpy(everyone) == expected).all()


@pytest.mark.mpi(ranks=(3,))
def test_every_type_arrives_as_it_was():
    for comm in both_ways():
        for dtype in (np.int8, np.uint16, np.int64, np.float64, np.complex64):
            x = device.asarray(np.arange(20).astype(dtype) * (comm.rank + 1))
            y = device.empty(20, dtype)
            comm.Sendrecv(x, (comm.rank + 1) % 3, 0, y, (comm.rank - 1) % 3, 0)
            source = (comm.rank - 1) % 3 + 1
            assert (device.asnumpy(y) == np.arange(20).astype(dtype) * source).all()
        flags = device.asarray(np.arange(10) % 3 == comm.rank)
        comm.Bcast(flags, root=2)
        assert (device.asnumpy(flags) == (np.arange(10) % 3 == 2)).all()


@pytest.mark.mpi(ranks=(1, 3))
def test_every_layout_is_sent_and_filled():
    for comm in both_ways():
        Checked(comm, device).every_layout()


@pytest.mark.mpi(ranks=(2,))
def test_transposed_array_arrives_in_a_slice_and_the_rest_stays():
    for comm in both_ways():
        x = device.asarray(np.arange(6.0).reshape(2, 3))
        y = device.asarray(np.zeros((3, 4)))
        if comm.rank == 0:
            comm.Send(x.T, 1)
            continue
        comm.Recv(y[:, ::2], 0)
        expected = [[0, 0, 3, 0], [1, 0, 4, 0], [2, 0, 5, 0]]
        np.testing.assert_array_equal(device.asnumpy(y), expected)


@pytest.mark.mpi(ranks=(1,))
def test_scalars_arrive_and_repeated_elements_are_sent():
    for comm in both_ways():
        x, y = device.asarray(np.array(3.0)), device.asarray(np.array(0.0))
        comm.Allreduce(x, y)
        assert device.asnumpy(y) == 3
        repeated = device.ndarray(np.broadcast_to(np.float32(7), (2, 2)), False)
        z = device.empty((2, 2), np.float32)
        comm.Allreduce(repeated, z)
        np.testing.assert_array_equal(device.asnumpy(z), np.full((2, 2), 7))


def test_receive_buffers_must_be_writable_and_without_overlap():
    read_only = device.ndarray(np.zeros(3), writeable=False)
    with pytest.raises(ValueError, match="read-only"):
        Landing(read_only, "recvbuf")
    repeated = device.ndarray(
        np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8))
    )
    with pytest.raises(ValueError, match="share memory"):
        Landing(repeated, "recvbuf")
    assert outgoing(read_only, "sendbuf").shape == (3,)
    with pytest.raises(TypeError, match="use Send, which"):
        check_object(read_only, "send")


@pytest.mark.mpi(ranks=(2,))
def test_sum_is_right_though_a_slow_kernel_still_fills_the_array():
    for comm in both_ways():
        stream = device.cuda.Stream()
        x, y = device.empty(50, np.float32), device.empty(50, np.float32)
        for run in range(100):
            with stream:
                x.fill(comm.rank + 1)
                if run % 2:
                    comm.Allreduce(x, y)
                else:
                    comm.Iallreduce(x, y).Wait()
                z = y * 1  # of the caller's stream, after the call
                x.fill(-100)
                y.fill(-100)
                assert (device.asnumpy(z) == 3).all(), run


@pytest.mark.mpi(ranks=(2,))
def test_work_queued_before_the_call_reads_the_old_contents_of_the_receive_buffer():
    for comm in both_ways():
        with device.cuda.Stream():
            y = device.asarray(np.full(50, 5.0))
            before = y * 1
            comm.Allreduce(device.asarray(np.ones(50)), y)
            assert (device.asnumpy(before) == 5).all()
            assert (device.asnumpy(y) == 2).all()


@pytest.mark.mpi(ranks=(2,))
def test_request_that_is_waited_for_on_another_stream_fills_it_there():
    for comm in both_ways():
        y = device.asarray(np.zeros((6, 5))).T
        with device.cuda.Stream():
            x = device.empty((5, 6))
            x.fill(comm.rank + 1)
            request = comm.Iallreduce(x, y)
        with device.cuda.Stream():
            request.Wait()
            assert (device.asnumpy(y) == 3).all()


@pytest.mark.mpi(ranks=(3,))
def test_half_precision_is_summed_in_float32_and_rounded_once():
    for comm in both_ways():
        for half in (np.float16, ml_dtypes.bfloat16):
            Checked(comm, device).half_precision(half)


@pytest.mark.mpi(ranks=(2,))
def test_ledger_says_what_is_staged_and_what_is_converted():
    x, host = device.asarray(np.ones(4, np.float16)), np.ones(4, np.float16)
    transports = {}
    for cuda_aware in (False, True):
        with communicator(cuda_aware) as comm:
            comm.Allreduce(x, device.empty(4, np.float16))
            comm.Allgather(x, device.empty((2, 4), np.float16))
            comm.Bcast(x)
            comm.Isend(x, 1 - comm.rank)
            comm.Recv(device.empty(4, np.float16))
            comm.Allgatherv(x, device.empty(8, np.float16))
            comm.Allreduce(host, np.empty_like(host))
            comm.Bcast(host)
            said = [entry.transport for entry in comm.ledger.recent]
            sent = [entry.sent for entry in comm.ledger.recent]
            transports[cuda_aware] = said, sent
            comm.Barrier()
    staged, direct = transports[False], transports[True]
    assert staged[0] == ["mpi, staged, float32", *["mpi, staged"] * 5, *direct[0][6:]]
    assert direct[0] == ["mpi, float32", *["mpi"] * 5, "mpi, float32", "mpi"]
    assert staged[1] == direct[1]


@pytest.mark.mpi(ranks=(2,))
def test_arrays_of_host_and_device_may_meet():
    for comm in both_ways():
        x = np.full(20, comm.rank + 1.0)
        y = device.empty(20)
        comm.Allreduce(x, y)
        assert (device.asnumpy(y) == 3).all()
        comm.Allreduce(y, x)
        assert (x == 6).all()


@pytest.mark.mpi(ranks=(2,))
def test_overlapping_device_buffers_are_refused_before_anything_is_sent():
    for comm in both_ways():
        x = device.asarray(np.zeros(4))
        with pytest.raises(ValueError, match="share memory"):
            comm.Allreduce(x[:3], x[1:])
        assert not comm.ledger.recent
        comm.Barrier()


@pytest.mark.mpi(ranks=(2,))
def test_split_communicators_know_that_mpi_is_cuda_aware():
    for cuda_aware in (False, True):
        with communicator(cuda_aware) as comm:
            assert comm.Split(0).cuda_aware is cuda_aware


@pytest.mark.parametrize(
    ("answer", "version", "enabled", "expected"),
    [
        (1, "Open MPI v5.0.5", None, True),
        (0, "Open MPI v5.0.5", None, False),
        (None, "Intel(R) MPI Library 2021.12", None, False),
        (1, "MPICH Version: 4.2", None, True),
        (1, "MPI VERSION : CRAY MPICH version 8.1.28", None, False),
        (1, "MPI VERSION : CRAY MPICH version 8.1.28", "0", False),
        (1, "MPI VERSION : CRAY MPICH version 8.1.28", "1", True),
    ],
)
def test_what_the_library_says_of_itself(answer, version, enabled, expected):
    class Library:
        if answer is not None:
            MPIX_Query_cuda_support = staticmethod(lambda: answer)

    environ = {} if enabled is None else {"MPICH_GPU_SUPPORT_ENABLED": enabled}
    assert says_cuda_aware(Library(), version, environ) is expected


@pytest.mark.mpi(ranks=(2,))
def test_cuda_awareness_is_tried_and_all_ranks_agree():
    comm = MPI.COMM_WORLD
    # Whoever pinged in one of the first two cases would follow a wrong pointer.
    assert agreed_cuda_awareness(comm, device, said=False) is False
    assert agreed_cuda_awareness(comm, device, said=comm.rank == 0) is False
    with device.mapped_for_mpi():
        assert agreed_cuda_awareness(comm, device, said=True) is True


@pytest.mark.mpi(ranks=(2,))
def test_library_that_says_yes_but_delivers_garbage_is_not_cuda_aware():
    class Forgetful:
        """On one rank the ping doesn't arrive."""

        rank, allreduce = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.allreduce

        def Sendrecv(self, *arguments):  # noqa: N802
            if self.rank == 0:
                MPI.COMM_WORLD.Sendrecv(*arguments)

    with device.mapped_for_mpi():
        assert agreed_cuda_awareness(Forgetful(), device, said=True) is False
